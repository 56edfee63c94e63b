"""`Report`, which prints memory, traffic, full weights and exposed collectives in five lines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console

from .._collectives import readable_bytes
from .._mesh import HOST, AnyMesh
from .._plan import Plan
from .._sharding import LeafSpec, TreeLayout, axes_of
from .capacity import LargestModel, largest_model
from .data import HostTraffic, ReportData, Row, Traffic
from .details import available_details, check_detail, detail_table
from .text_table import summarized
from .timeline import live_bytes, spans, waits

WIDTH = 80  # columns of a summary line, whatever the terminal
_NO_PLAN = "not known: pass `plan=zero.plan(loss_fn, params, batch)`"


class Report(ReportData):
    """The layout of a training job's state, and the traffic and plan of its step; `print` it."""

    def __repr__(self) -> str:
        return "\n".join(summary_lines(self, available_details(self)))

    def print(
        self, detail: str | Sequence[str] | None = None, console: Console | None = None
    ) -> None:
        """Print five lines, then the tables that `detail` names.

        The lines are: the bytes that a device holds; the bytes that enter a node in a step; the
        weights that are held in full, and for how long; the largest collective that nothing
        overlaps with; and the names of the tables.

        Args:
            detail: the name of a table, or several: "leaves", "state", "gathers", "reductions",
                "waits", "traffic", "parts", "host", "timeline". All but the first two need a plan.
            console: where to print. Tables are no wider than the console.

        Raises:
            ValueError: there is no such table, or it needs a plan and the report has none.
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
        """Return the deepest model that fits in memory, with layers like those of this report.

        Config and optimizer stay the same. The model of the report is taken apart into layers,
        which are repeated, and the rest (embeddings, a head). With `n` layers, one device needs

            rest + n * layer + step  <=  device_bytes     in device memory
            rest + n * layer         <=  host_bytes       in host memory

        `rest` and `layer` are the bytes of parameters, gradients and optimizer state together, with
        padding, since a device holds all three between gradient and update. Offloaded leaves count
        on the host; leaves that a step copies in full also count on the device. Node slices (hpZ)
        count in proportion to the parameters. `step` is `activation_bytes` plus the most bytes that
        full weights, unreduced gradients and shards copied ahead take at one time, which do not
        depend on `n`.

        Args:
            device_bytes: memory of one device.
            host_bytes: memory of the host for one device: of 8 devices, an eighth of a host's.
            activation_bytes: bytes that a step needs besides, such as for the activations of one
                layer, the logits, and buffers of the compiler. `temp_size_in_bytes` of the compiled
                step's `memory_analysis()` is an upper bound for a model of this depth.
            layer_activation_bytes: bytes that each layer keeps in device memory until backward;
                under `jax.checkpoint` those of its input.

        Returns:
            The number of layers and parameters, and the bytes that the model takes; 0 layers if not
            even one fits. It is a bound by arithmetic: nothing is compiled.

        Raises:
            ValueError: the report has no plan or no optimizer state; no layers are found, neither
                iterations of a loop nor numbered parts of the tree (`layers.0.kernel`); or a number
                of bytes is negative.
        """
        return largest_model(
            self, device_bytes, host_bytes, activation_bytes, layer_activation_bytes
        )


def make_report(
    params: TreeLayout,
    gradients: TreeLayout,
    state: TreeLayout | None,
    plan: Plan | None,
    mesh: AnyMesh,
    axes: dict[str, tuple[str, ...]],
) -> Report:
    """Make a report from the layouts of a training job's state and the plan of its step.

    Args:
        params: layouts of the parameters.
        gradients: layouts of the gradients. Parameters that are stored encoded have no gradients,
            so the report leaves these out.
        state: layouts of the optimizer state; None: the report has none.
        plan: plan of the training step; None: the report has none.
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
    pieces = math.prod(mesh.shape[axis] for axis in axes_of(leaf.spec(axes)))
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
        padding_layers=leaf.stages.padded - leaf.stages.size if leaf.stages else 0,
    )


def summary_lines(report: ReportData, details: Sequence[str]) -> tuple[str, ...]:
    """Return the five lines of a report, of at most 80 columns.

    A name of a leaf that does not fit is left out, never cut.

    Args:
        report: the report to sum up.
        details: names of the tables that the report can print.
    """
    return (
        _fitting("Per device", *_held(report)),
        _fitting(*_sent(report.traffic)),
        _fitting("Whole", *_whole(report)),
        _fitting("Largest wait", *_largest_wait(report)),
        _fitting("Details", " ".join(details)),
    )


def _fitting(label: str, *texts: str) -> str:
    """Return a line: `label`, and the first of `texts` with which it fits, else the last one."""
    lines = [f"{label:<12}  {text}" for text in texts]
    return next((line for line in lines if len(line) <= WIDTH), lines[-1])


def _held(report: ReportData) -> list[str]:
    named_kinds = ("parameters", "gradients", "optimizer state")
    kinds = [kind for kind in named_kinds if kind in report.kinds]
    offloaded = sum(map(report.host_bytes, kinds))
    host = f"; {readable_bytes(offloaded)} on host" if offloaded else ""
    held = [readable_bytes(report.device_bytes(kind)) for kind in kinds]
    total = [readable_bytes(report.total_bytes(kind)) for kind in kinds]
    named = zip(held, total, kinds, strict=True)
    everything = readable_bytes(sum(report.total_bytes(kind) for kind in kinds))
    mine = readable_bytes(sum(report.device_bytes(kind) for kind in kinds))
    return [
        ", ".join(f"{_without_unit(one, of)} of {of} {kind}" for one, of, kind in named) + host,
        ", ".join(map(" ".join, zip(held, kinds, strict=True))) + host,
        f"{mine} of {everything}{host}",
    ]


def _without_unit(size: str, total: str) -> str:
    """Return `size` without its unit if `total` has the same unit, as in "1.50 of 6.00 GiB"."""
    number, unit = size.split(" ")
    return number if total.endswith(f" {unit}") else size


def _sent(traffic: Traffic | None) -> list[str]:
    if traffic is None:
        return ["Into a node", _NO_PLAN]
    purposes = ("weights", "gradients", "activations", "tangents", "other")
    if traffic.node_bytes:
        label, total = "Into a node", traffic.node_bytes
        amounts = [traffic.node_bytes_for(purpose) for purpose in purposes]
    else:  # one node
        label, total = "Into device", traffic.amount().device_bytes
        amounts = [
            traffic.amount(lambda t, purpose=purpose: t.purpose == purpose).device_bytes
            for purpose in purposes
        ]
    weights, gradients, activations, tangents, other = map(readable_bytes, amounts)
    text = f"{readable_bytes(total)} per step: {weights} weights, {gradients} gradients"
    text += f", {activations} activations" if amounts[2] else ""
    text += f", {tangents} tangents" if amounts[3] else ""
    return [label, f"{text}, {other} other", text]


def _whole(report: ReportData) -> list[str]:
    """Return texts on the weights that a device holds in full, the longest text first.

    They give the peak of bytes, the largest bucket, and the leaves that are not split.
    """
    kept = [row for row in report.rows if row.kind == "parameters" and row.dim is None]
    kept_text = f"{readable_bytes(sum(row.device_bytes for row in kept))} always"
    kept_text = f"{kept_text} ({len(kept)} {'leaf' if len(kept) == 1 else 'leaves'})"
    gathers = [x for x in spans(report.plan) if x.action == "gather"] if report.plan else []
    if not gathers:
        return [kept_text if kept or report.plan else f"{kept_text}; of a step {_NO_PLAN}"]
    assert report.plan is not None
    live = live_bytes(report.plan)
    peak = f"{readable_bytes(int(live[0].max()))} at most"
    largest = max(gathers, key=lambda span: span.num_bytes)
    end = f"; {kept_text}" if kept else ""
    size = readable_bytes(largest.num_bytes)
    held = f"{largest.alive} of {live.shape[1]}"  # operations of the program
    names = _names(largest.names)
    return [
        *(f"{peak}; largest {name}, for {held} operations{end}" for name in names),
        *(f"{peak}; largest {name}, for {held} ops{end}" for name in names),
        *(f"{peak}; largest {name}, {held} ops" for name in names),
        f"{peak}; largest bucket {size}, for {held} ops{end}",
        f"{peak}; largest bucket {size}, for {held} ops",
        peak,
    ]


def _names(names: Sequence[str]) -> tuple[str, str]:
    """Return a long and a short name of a bucket: its leaves summarized, and "first leaf +7"."""
    num = len(set(names)) - 1
    return summarized(names), f"{names[0]} +{num}" if num else names[0]


def _largest_wait(report: ReportData) -> list[str]:
    if report.plan is None:
        return [_NO_PLAN]
    exposed = waits(report.plan)
    if not exposed:
        return ["none: every collective has computation to overlap with"]
    first = exposed[0]
    action, names = first.action, _names(first.names)
    size = f", {readable_bytes(first.num_bytes)}" if first.num_bytes else ""
    size += f" x{first.trips}" if first.trips > 1 else ""
    more = f"; {len(exposed) - 1} more" if len(exposed) > 1 else ""
    return [
        *(f"{action} of {name}{size}, nothing to overlap with{more}" for name in names),
        *(f"{action} of {name}{size}, exposed{more}" for name in names),
        *(f"{action} of {name}{size}{more}" for name in names),
        f"{action} in {first.region}{size}, nothing to overlap with{more}",
        f"{action}{size}, exposed{more}",
    ]
