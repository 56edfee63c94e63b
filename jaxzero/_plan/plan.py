"""A plan to print: every all-gather, drop, reduce-scatter and host copy of a program, in order."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp

from .._activations import Chosen, Residual, by_kind, described, described_total
from .._codecs import Codec
from .._collectives import CommSpec, HostTransfer, Transfer, readable_bytes
from .._mesh import AXES, LOCAL
from .._program import Fork, Loop, Operation, kept_values
from .._sharding import GradientHop, WeightHop
from .block_plan import BlockPlan
from .emit_loop import pipeline_of
from .gathered_experts import GatheredExperts, find_gathered_experts
from .pipeline import Pipeline
from .plan_step import ACTIONS, Hop, PlanStep, region_name, steps_of

_CALLS = {"cond", "while"}


@dataclasses.dataclass(frozen=True)
class HeldWhole:
    """An array that a device holds in full for longer than one layer, and the reason.

    Attributes:
        name: the name of the leaf; "" for a value that is made of weights.
        shape, dtype: of the full array.
        why: which operation needs it, and where that is in the user's program.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    why: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the full array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        array = f"{self.dtype}{list(self.shape)}"
        name = f"{self.name} " if self.name else ""
        return f"held whole: {name}{array}, {readable_bytes(self.num_bytes)}: {self.why}"


@dataclasses.dataclass(frozen=True)
class MovedRows:
    """A table, such as an embedding, of which looked-up rows are sent instead of the whole table.

    Attributes:
        name: the name of the leaf.
        shape, dtype: of the full table.
        num: rows that a device reads in a micro-batch.
        rows: bytes that enter a device over each axis in a micro-batch, ids included.
        weight: bytes that would enter if the table were gathered and its gradient reduced.
        is_mean: whether the program returns the mean over devices of the table's gradient;
            otherwise it returns the sum.
        is_alone: whether the table is looked up only, and not gathered for other uses too.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    num: int
    rows: Mapping[str, int]
    weight: Mapping[str, int]
    is_mean: bool
    is_alone: bool = True

    def __str__(self) -> str:
        axes = [axis for axis in self.weight if self.weight[axis]]
        sent = ", ".join(
            f"{readable_bytes(self.rows[axis])} over {axis} (the table: "
            f"{readable_bytes(self.weight[axis])})"
            for axis in axes
        )
        array = f"{self.dtype}{list(self.shape)}"
        return f"rows move: {self.name} {array}, {self.num} rows of a device: {sent}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that one training step gathers, reduces and copies, in program order.

    `top` is the plan of the program, with the plans of its loops inside; `steps` lists its messages
    and copies, as they are printed. With several micro-batches, both are for one of them.
    """

    top: BlockPlan
    at_end: tuple[str, ...] = ()  # leaves that are stored in full: all-reduced last, together
    # Leaves whose gradients are combined last and never encoded, and how: "sum", "max", "first".
    combined: tuple[tuple[str, str], ...] = ()
    transfers: tuple[Transfer, ...] = ()  # every collective, in the order it was issued
    slice_bytes: int = 0  # bytes of the node slices that one device keeps for the step (hpZ)
    host_transfers: tuple[HostTransfer, ...] = ()  # every copy from or to host memory
    codecs: tuple[str, ...] = ()  # a line for each axis with a codec: what arrays are sent as
    microbatches: int = 1  # in a step
    rows: tuple[MovedRows, ...] = ()  # tables that are not gathered for lookups
    stages: tuple[str, ...] = ()  # lines about pipeline stages, if there are any
    # With hpZ and several micro-batches, `top` and `steps` are for the first one, which keeps node
    # slices. `later` is the plan of each of the others, which gather from the slices.
    later: BlockPlan | None = None
    # What forward keeps for backward.
    activations: Chosen | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """The values of forward that backward reads, each kept or recomputed; may be empty."""
        return self.activations.residuals if self.activations else ()

    @property
    def steps(self) -> tuple[PlanStep, ...]:
        return tuple(steps_of(self.top, self.host_transfers))

    def with_tangents(self, tangents: Plan) -> Plan:
        """Return this plan with the transfers of `tangents`, the plan of a `jax.jvp`, added."""
        sent = (
            x if x.purpose == "other" else dataclasses.replace(x, purpose="tangents")
            for x in tangents.transfers
        )
        return dataclasses.replace(self, transfers=(*self.transfers, *sent))

    @property
    def held_whole(self) -> tuple[HeldWhole, ...]:
        """The arrays that a device holds in full for all layers or a whole loop, with reasons."""
        return tuple(find_held_whole(self.top))

    @property
    def gathered_experts(self) -> tuple[GatheredExperts, ...]:
        """Experts that are gathered where sending tokens takes fewer bytes; see `jz.Ungathered`."""
        return tuple(find_gathered_experts(self.top, self.transfers, self.microbatches))

    @property
    def loops(self) -> dict[str, Pipeline]:
        """For each loop, by its name in `steps`, its pipeline: the instructions of one turn.

        A pipeline is printed as one line for each instruction, with its lag: in turn `t` the
        instruction works on layer `t - lag`. If micro-batches after the first have a program of
        their own (`later`), the loops of that program are listed too.
        """
        later = _pipelines(self.later, ()) if self.later else ()
        named = {f"{name}, later micro-batches": pipeline for name, pipeline in later}
        return dict(_pipelines(self.top, ())) | named

    @property
    def described_combined(self) -> tuple[str, ...]:
        """For gradients combined at the end of the step: a line for each reduction, with leaves."""
        leaves: dict[str, list[str]] = {}
        for path, how in self.combined:
            leaves.setdefault(how, []).append(path)
        return tuple(f"{_COMBINED[how]} of {', '.join(x)}" for how, x in leaves.items())

    def __str__(self) -> str:
        lines = [*self.stages, *_lines(self.steps)]
        if self.later is not None:
            lines.append("in each later micro-batch, which gathers from node slices (hpZ):")
            lines += _lines(tuple(steps_of(self.later, ())))
        lines += map(str, self.rows)
        lines += map(str, self.gathered_experts)
        lines += map(str, self.held_whole)
        if self.residuals:
            lines += _in_columns([*map(described, by_kind(self.residuals))])
            lines.append(described_total(self.residuals))
        if self.at_end:
            lines.append(f"at the end: all-reduce {', '.join(self.at_end)}")
        lines += [f"at the end: {x}" for x in self.described_combined]
        lines += self.codecs
        return "\n".join(line.rstrip() for line in lines)


def described_codecs(comm: CommSpec, transfers: Sequence[Transfer]) -> tuple[str, ...]:
    """Return a line for each axis with a codec: "weights over node: int8/256, float32".

    The line of an axis over which all arrays are too small for the codec says so.
    """
    lines = []
    unused = f" (nothing is encoded; `min_quantized_size` is {comm.min_quantized_size})"
    for what, codecs in (("weights", comm.weights), ("gradients", comm.gradients)):
        for axis in comm.axes_with_peers(AXES):
            if (asked := getattr(codecs, axis)) is None:
                continue
            is_hop = isinstance(asked, GradientHop | WeightHop)
            codec = asked.codec if is_hop else asked
            names = {str(codec): str(asked)}
            sent = [names.get(form, form) for form in _forms(transfers, what, axis)]
            forms = sorted(sent, key=lambda form: form != str(asked))  # the codec first
            note = unused if _are_wider(forms, codec) else ""
            lines += [f"{what} over {axis}: {', '.join(forms)}{note}"] if forms else []
    if comm.hpz is not None and (codec := comm.hpz.codec) is not None:
        note = unused if _are_wider(_forms(transfers, "weights", LOCAL), codec) else ""
        lines.append(f"kept slices (hpZ): {codec}{note}")
    return tuple(lines)


def _forms(transfers: Sequence[Transfer], purpose: str, axis: str) -> list[str]:
    """Return what is sent over an axis: the names of codecs and dtypes, each once."""
    here = [x for x in transfers if (x.purpose, x.axis) == (purpose, axis)]
    return [*dict.fromkeys(form for x in here for form in x.forms)]


def _are_wider(forms: Sequence[str], codec: Codec) -> bool:
    """Return whether all forms are dtypes, and one is a float of more bits than `codec` has."""
    dtypes = [jnp.dtype(form) for form in forms if hasattr(jnp, form)]
    floats = [x for x in dtypes if jnp.issubdtype(x, jnp.floating)]
    return len(dtypes) == len(forms) and any(8 * x.itemsize > codec.bits for x in floats)


def _lines(steps: tuple[PlanStep, ...]) -> list[str]:
    """Return the steps as lines in aligned columns; below a bucket stands a line for each hop.

    Where buckets repeat, as those of equal layers do, only the first of them are shown.
    """
    buckets = []
    for _, group in itertools.groupby(steps, lambda step: step.bucket):
        bucket = list(group)
        first_needed = min(step.needed for step in bucket)
        rows = [_row(step, first_needed) for step in bucket]
        buckets.append([*rows, *(_hop_row(bucket[-1], hop) for hop in bucket[-1].hops)])
    return _in_columns([*itertools.chain.from_iterable(_without_repeats(buckets))])


def _in_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    columns = [column for column in zip(*rows, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    ]


_Rows = list[tuple[str, ...]]
_MOST_ALIKE = 4  # buckets of a layer that repeat together, such as a gather and a reduction


def _without_repeats(buckets: list[_Rows]) -> Iterator[_Rows]:
    """Yield the lines of buckets; show a sequence that repeats three times or more only once.

    A line after the sequence says how many more times the sequence occurs, and up to which bucket.
    """
    kinds = [[_numbers_left_out(row) for row in rows] for rows in buckets]
    start = 0
    while start < len(buckets):
        length, times = 1, 1
        for candidate in range(1, _MOST_ALIKE + 1):
            kind, repeats = kinds[start : start + candidate], 1
            while kinds[(at := start + repeats * candidate) : at + candidate] == kind:
                repeats += 1
            if repeats > 2 and repeats * candidate > times * length:
                length, times = candidate, repeats
        yield from buckets[start : start + length]
        start += length * times
        if times > 1:
            last = buckets[start - 1][0]
            yield [(last[0], f"  {times - 1} times more, up to", last[2], *[""] * (len(last) - 3))]


def _numbers_left_out(row: tuple[str, ...]) -> tuple[str, ...]:
    """Return a line without numbers of bucket, layer and operation, so that equal layers match."""
    region, action, name, array, size, when, early, end = row
    action, name, when = (re.sub(r"\d+", "#", cell) for cell in (action, name, when))
    return region, action, name, array, size, when, early, end


_COMBINED = {
    "max": "maximum over devices and micro-batches",
    "sum": "sum over devices and micro-batches",
    "first": "value of the first device and micro-batch",
}


def _row(step: PlanStep, first_needed: int) -> tuple[str, ...]:
    """Return the cells of one line of the printed plan.

    Args:
        step: a step of the plan.
        first_needed: index of the operation that first needs any array of the step's bucket.
    """
    size = readable_bytes(step.num_bytes) + (f" x{step.trips}" if step.trips > 1 else "")
    early, end = "", ""
    if step.action == "gather":
        when, end = f"before {step.at}", f"dropped after {step.until}"
        if step.sent == "the iteration before":
            early = f"prefetched in {step.sent}"
        elif step.start < first_needed:
            early = f"prefetched before {step.sent}"
        elif step.start < step.needed:  # an array of the bucket is needed earlier
            early = f"sent before {step.sent}"
    elif step.action == "reduce":
        when = f"after {step.at}"
        early = f"deferred to {step.until}" if step.until else ""
    elif not step.windowed:
        when = "in full"
    elif step.action == "offload":
        when = "once updated" if step.at else "once reduced"
    else:
        when = f"before {step.at}"
        if step.ahead:
            early = f"copied {step.ahead} {'layer' if step.ahead == 1 else 'layers'} ahead"
        elif step.start < step.needed:
            early = f"copied before {step.sent}"
    is_copy = step.action in ("fetch", "offload")
    action = ACTIONS[step.action]
    action = action if is_copy else f"{action} bucket {step.group}"
    array = f"{step.dtype}{list(step.shape)}"
    return step.region, action, step.name, array, size, when, early, end


def _hop_row(step: PlanStep, hop: Hop) -> tuple[str, ...]:
    """Return the cells of the line of one hop of a bucket."""
    lag = ""
    if hop.lag:
        layers = f"{abs(hop.lag)} {'layer' if abs(hop.lag) == 1 else 'layers'}"
        lag = f"{layers} {'later' if hop.lag > 0 else 'ahead'}"
    when = f"before op {hop.at}, {hop.before}" if hop.before else "at the end"
    return step.region, f"  over {hop.axis}", "", "", "", when, lag, ""


def _pipelines(plan: BlockPlan, path: tuple[int, ...]) -> Iterator[tuple[str, Pipeline]]:
    for index, loop in plan.loops.items():
        operation, inside = plan.block.operations[index], (*path, index)
        assert isinstance(operation, Loop)
        uses = plan.uses.loops[index]
        hosts = [stack.layer for stack in uses.stacks if stack.in_host]
        yield region_name(inside), pipeline_of(loop, operation, uses, in_host=hosts)
        yield from _pipelines(loop.body, inside)


def find_held_whole(plan: BlockPlan) -> Iterator[HeldWhole]:
    """Find the arrays that a block and its loops hold in full, each with its first reader."""
    block = plan.block
    scanned = {stack.view.weight for loop in plan.uses.loops.values() for stack in loop.stacks}
    seen = set()
    for use in plan.uses.uses:
        weight = use.view.weight
        if weight in seen or use.index == len(block.operations):
            continue
        why = _why(block.operations[use.index], weight in scanned)
        if why:
            seen.add(weight)
            yield HeldWhole(weight.name, use.view.shape, use.view.dtype, why)
    yield from _gradients(plan, {weight.name for weight in scanned})
    weights = [value for value in block.inputs if value in plan.uses.views]
    for value, operation in kept_values(block, weights, plan.last_forward):
        if value not in plan.uses.views:
            made = f"made of weights by `{operation.name}` and kept, {operation.where}"
            yield HeldWhole("", value.shape, value.dtype, made)
    for loop in plan.loops.values():
        yield from find_held_whole(loop.body)


def _gradients(plan: BlockPlan, scanned: Set[str]) -> Iterator[HeldWhole]:
    """Yield the full gradients of stacks in `scanned` that are reduced for all layers at once."""
    makers = {value: x for x in plan.block.operations for value in x.outputs}
    reduced = {**plan.gradients.reduces}
    reduced |= {plan.block.outputs[i]: spec for i, spec in plan.gradients.at_end.items()}
    seen = set()
    for value, spec in reduced.items():
        if spec.name in scanned - seen and value in makers and value not in plan.zeros:
            seen.add(spec.name)
            why = f"`{makers[value].name}` makes its gradient for all layers at once"
            why = f"{why}, {makers[value].where}"
            yield HeldWhole(spec.name, value.shape, value.dtype, why)


def _why(operation: Operation, is_scanned: bool) -> str:
    """Return why a weight that `operation` reads is held in full; "" if it is not held.

    `is_scanned`: whether the weight is a stack of layers that a loop scans.
    """
    if isinstance(operation, Loop) or operation.name in _CALLS:
        differ = ", and devices may take different branches" if isinstance(operation, Fork) else ""
        return f"`{operation.name}` reads it from its start to its end{differ}, {operation.where}"
    if is_scanned:
        return f"`{operation.name}` needs all layers at once, {operation.where}"
    return ""
