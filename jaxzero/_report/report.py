"""Tables of how leaves are split, the bytes that one device holds, and those that a step sends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console

from .._mesh import AnyMesh
from .._plan import Plan
from .._sharding import LeafSpec, TreePlan
from .data import ReportData, Row
from .details import available_details, check_detail, detail_table
from .summary import summary_lines
from .traffic import Traffic


class Report(ReportData):
    """The layout of a training job's state, and what a step of it sends."""

    def print(
        self, detail: str | Sequence[str] | None = None, console: Console | None = None
    ) -> None:
        """Print five lines, then the tables asked for.

        The lines are: the bytes that a device holds; those that enter a node in a step; the weights
        that are held in full, and for how long; the largest collective that nothing overlaps with;
        and the details that there are.

        Args:
            detail: one or several of "leaves", "state", "gathers", "reductions", "waits",
                "traffic", "parts" and "timeline". All but the first two need a plan.
            console: where to print; its width bounds that of the tables.

        Raises:
            ValueError: there is no such detail, or the report lacks the plan for it.
        """
        details = [detail] if isinstance(detail, str) else list(detail or ())
        for name in details:
            check_detail(self, name)
        console = console or Console()
        lines = list(summary_lines(self, available_details(self)))
        for name in details:
            lines += ["", *detail_table(self, name).lines(console.width)]
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def make_report(
    params: TreePlan,
    state: TreePlan | None,
    plan: Plan | None,
    mesh: AnyMesh,
    axes: dict[str, tuple[str, ...]],
) -> Report:
    """Make the report of trees that are laid out, and of a training step.

    Args:
        params: layouts of the parameters; gradients have those of parameters that are not stored
            encoded.
        state: layouts of the optimizer state, if there is one.
        plan: plan of the training step, if there is one.
        mesh: gives the number of devices.
        axes: for each `Row.kind`, the mesh axes that split it.
    """
    rows = [_row("parameters", leaf, mesh, axes["parameters"]) for leaf in params.leaves]
    trained = [leaf for leaf in params.leaves if leaf.codec is None]
    rows += [_row("gradients", leaf, mesh, axes["gradients"]) for leaf in trained]
    for leaf in state.leaves if state else ():
        rows.append(_row("optimizer state", leaf, mesh, axes["optimizer state"]))
    return Report(mesh.size, tuple(rows), plan and Traffic.of(plan, mesh), plan)


def _row(kind: str, leaf: LeafSpec, mesh: AnyMesh, axes: tuple[str, ...]) -> Row:
    pieces = math.prod(mesh.shape[axis] for axis in axes) if leaf.layout else 1
    size = leaf.dtype.itemsize
    return Row(
        kind=kind,
        path=leaf.path,
        shape=leaf.shape,
        dtype=str(leaf.codec or leaf.dtype),
        dim=leaf.layout.dim if leaf.layout and axes else None,
        padding=leaf.layout.padded - leaf.layout.size if leaf.layout else 0,
        total_bytes=math.prod(leaf.shape) * size,
        device_bytes=leaf.stored.size * leaf.stored.dtype.itemsize // pieces,
    )
