"""What is split how, the bytes that one device holds, and what a step sends, as tables."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from .._mesh import AnyMesh
from .._plan import Plan
from .._sharding import LeafSpec, TreePlan
from .timeline import spans, timeline_table
from .traffic import Traffic, readable_bytes


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf. `dim` None: whole on every device. `padding`: zeros added to `dim`."""

    kind: str  # "parameters", "gradients" or "optimizer state"
    path: str
    shape: tuple[int, ...]
    dtype: str
    dim: int | None
    padding: int
    total_bytes: int  # of the true shape
    device_bytes: int  # on one device, padding included


@dataclasses.dataclass(frozen=True)
class Report:
    """The layout of a training job's state, and what a step of it sends."""

    num_devices: int
    rows: tuple[Row, ...]
    traffic: Traffic | None = None  # of one optimizer step, if a plan was given
    plan: Plan | None = None

    def device_bytes(self, kind: str) -> int:
        """Bytes that one device holds of `kind`."""
        return sum(row.device_bytes for row in self.rows if row.kind == kind)

    def total_bytes(self, kind: str) -> int:
        """Bytes of `kind` if one device held it all, without padding."""
        return sum(row.total_bytes for row in self.rows if row.kind == kind)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.kind for row in self.rows))

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "num_devices": self.num_devices,
            "bytes": {
                kind: {"total": self.total_bytes(kind), "per_device": self.device_bytes(kind)}
                for kind in self.kinds
            },
            "leaves": [dataclasses.asdict(row) for row in self.rows],
            "traffic": None if self.traffic is None else self.traffic.as_dict(),
            "timeline": [dataclasses.asdict(x) for x in spans(self.plan)] if self.plan else None,
        }

    def print(self, console: Console | None = None) -> None:
        """Print the parameters leaf by leaf, the sums of each kind, a step's timeline and wire."""
        console = console or Console()
        leaves = Table("parameter", "shape", "dtype", "split on", "padding", "per device")
        for row in self.rows:
            if row.kind == "parameters":
                leaves.add_row(
                    row.path,
                    str(list(row.shape)),
                    row.dtype,
                    "whole" if row.dim is None else f"dim {row.dim}",
                    str(row.padding or ""),
                    readable_bytes(row.device_bytes),
                )
        console.print(leaves)
        sums = Table("held by one device", "bytes", "of", "share")
        for kind in self.kinds:
            mine, total = self.device_bytes(kind), self.total_bytes(kind)
            share = f"1/{total / mine:.2f}" if mine else ""
            sums.add_row(kind, readable_bytes(mine), readable_bytes(total), share)
        console.print(sums)
        if self.plan is not None:
            console.print(timeline_table(self.plan))
        if self.traffic is not None:
            console.print(self.traffic.table())
            console.print(self.traffic.group_table())


def make_report(
    params: TreePlan,
    state: TreePlan | None,
    plan: Plan | None,
    mesh: AnyMesh,
    axes: dict[str, tuple[str, ...]],
) -> Report:
    """Describe trees that are laid out.

    Args:
        params: the plan of parameters; gradients are like those that are not stored encoded.
        state: the plan of the optimizer state, if there is one.
        plan: of the training step, if there is one.
        mesh: gives the number of devices.
        axes: for each kind of row, the axes that split it.
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
