"""Tables of how leaves are split, the bytes that one device holds, and those that a step sends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console

from .._mesh import HOST, AnyMesh
from .._plan import Plan
from .._sharding import LeafSpec, TreePlan
from .capacity import LargestModel, largest_model
from .data import ReportData, Row
from .details import available_details, check_detail, detail_table
from .host_traffic import HostTraffic
from .summary import summary_lines
from .traffic import Traffic


class Report(ReportData):
    """The layout of a training job's state, and what a step of it sends."""

    def __repr__(self) -> str:
        return "\n".join(summary_lines(self, available_details(self)))

    def print(
        self, detail: str | Sequence[str] | None = None, console: Console | None = None
    ) -> None:
        """Print five lines, then the tables asked for.

        The lines are: the bytes that a device holds; those that enter a node in a step; the weights
        that are held in full, and for how long; the largest collective that nothing overlaps with;
        and the details that there are.

        Args:
            detail: one or several of "leaves", "state", "gathers", "reductions", "waits",
                "traffic", "parts", "host" and "timeline". All but the first two need a plan.
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

    def largest_model(
        self,
        *,
        device_bytes: int,
        host_bytes: int = 0,
        activation_bytes: int = 0,
        layer_activation_bytes: int = 0,
    ) -> LargestModel:
        """The largest model with these layers, this config and this optimizer that memory holds.

        The model of the report is taken apart into layers, which are repeated, and the rest
        (embeddings, a head). With `n` layers, one device needs

            rest + n * layer + step <= device_bytes, host rest + n * host layer <= host_bytes,

        where `rest` and `layer` are the bytes of parameters, gradients and optimizer state, padding
        included; offloaded leaves count on the host. If a step copies an offloaded leaf in full,
        `layer` has it too. `step` is the most that weights in full, unreduced gradients and shards
        copied ahead take at one time, which does not depend on `n`, plus `activation_bytes`. A
        device holds gradients, parameters and state together, as between gradient and update. Node
        slices (hpZ) that a step keeps count in proportion to the parameters.

        Args:
            device_bytes: memory of one device.
            host_bytes: memory of the host for one device: of 8 devices, an eighth of a host's.
            activation_bytes: what a step needs besides, such as the activations of one layer, the
                logits, and buffers of the compiler. `temp_size_in_bytes` of the compiled step's
                `memory_analysis()` is an upper bound for a model of this depth.
            layer_activation_bytes: what each layer keeps until backward, in device memory; under
                `jax.checkpoint` its input.

        Returns:
            The number of layers and parameters, and the bytes that they take; 0 layers if not even
            one fits. It is a bound by arithmetic: nothing is compiled.

        Raises:
            ValueError: the report has no plan or no optimizer state; no layers are found, which are
                iterations of a loop or numbered parts of the tree (`layers.0.kernel`); or a number
                of bytes is negative.
        """
        return largest_model(
            self, device_bytes, host_bytes, activation_bytes, layer_activation_bytes
        )


def make_report(
    params: TreePlan,
    gradients: TreePlan,
    state: TreePlan | None,
    plan: Plan | None,
    mesh: AnyMesh,
    axes: dict[str, tuple[str, ...]],
) -> Report:
    """Make the report of trees that are laid out, and of a training step.

    Args:
        params: layouts of the parameters.
        gradients: layouts of their gradients; those of parameters that are stored encoded are left
            out, as there are none.
        state: layouts of the optimizer state, if there is one.
        plan: plan of the training step, if there is one.
        mesh: gives the number of devices.
        axes: for each `Row.kind`, the mesh axes that split it.
    """
    rows = [_row("parameters", leaf, mesh, axes["parameters"]) for leaf in params.leaves]
    trained = [leaf for leaf in gradients.leaves if leaf.codec is None]
    rows += [_row("gradients", leaf, mesh, axes["gradients"]) for leaf in trained]
    for leaf in state.leaves if state else ():
        rows.append(_row("optimizer state", leaf, mesh, axes["optimizer state"]))
    traffic = plan and Traffic.of(plan, mesh)
    has_state = state is not None
    return Report(
        mesh.size, tuple(rows), traffic, plan, _host_traffic(rows, plan, has_state), has_state
    )


def _host_traffic(rows: Sequence[Row], plan: Plan | None, has_state: bool) -> HostTraffic | None:
    if not any(row.host_bytes for row in rows) and not (plan and plan.host_transfers):
        return None
    trained = {row.path for row in rows if row.kind == "gradients"}
    transfers = plan.host_transfers if plan else ()
    in_plan = {x.name.removesuffix("[i]") for x in transfers if x.purpose == "update"}
    rows = [row for row in rows if row.path not in in_plan]
    both_ways = sum(
        row.host_bytes
        for row in rows
        if row.kind == "optimizer state" or (row.kind == "parameters" and row.path in trained)
    )
    gradients = sum(row.host_bytes for row in rows if row.kind == "gradients")
    update = (both_ways + gradients, both_ways) if has_state else None
    return HostTraffic(plan.host_transfers if plan else None, update)


def _row(kind: str, leaf: LeafSpec, mesh: AnyMesh, axes: tuple[str, ...]) -> Row:
    pieces = math.prod(mesh.shape[axis] for axis in axes) if leaf.layout else 1
    size = leaf.dtype.itemsize
    held = leaf.stored.size * leaf.stored.dtype.itemsize // pieces
    is_in_host = leaf.memory_kind == HOST
    return Row(
        kind=kind,
        path=leaf.path,
        shape=leaf.shape,
        dtype=str(leaf.codec or leaf.dtype),
        dim=leaf.layout.dim if leaf.layout and axes else None,
        padding=leaf.layout.padded - leaf.layout.size if leaf.layout else 0,
        total_bytes=math.prod(leaf.shape) * size,
        device_bytes=0 if is_in_host else held,
        host_bytes=held if is_in_host else 0,
    )
