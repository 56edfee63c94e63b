"""A plan to print: every all-gather, drop and reduce-scatter of one training step, in order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from .._collectives import ReduceSpec, Transfer, readable_bytes
from .._program import Loop, Value
from .block_plan import BlockPlan, GatherGroup, ReduceGroup


@dataclasses.dataclass(frozen=True)
class PlanStep:
    """The all-gather or reduce-scatter of one array, alone or in a bucket with others.

    Attributes:
        region: "forward", "backward", or the loop it is in.
        action: "gather" (all-gather) or "reduce" (reduce-scatter, or all-reduce).
        group: number of the bucket in its region; arrays with the same number share a message.
        name: name of the leaf.
        shape, dtype: shape and dtype of the full array.
        num_bytes: bytes of the full array, for one of its `trips`.
        sent: the operation before which a weight is sent, or "the iteration before".
        at: the operation that first needs a weight, or that makes a gradient.
        until: the operation after which a full weight is dropped; for a gradient "", or
            "the iteration after" if it is sent then.
        tied: the operation whose result the gather of a weight waits for; "" if there is none.
        trips: how often this happens in one execution of the program.
        start, needed, stop: indices in the block; for a weight of `sent`, `at` and `until`; for a
            gradient of `at`, of `at`, and of the operation that completes its bucket.
        path: indices of the loops that this step is in, the outermost first.
    """

    region: str
    action: str
    group: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    sent: str
    at: str
    until: str
    tied: str
    trips: int
    start: int
    needed: int
    stop: int
    path: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that one training step gathers and reduces, in program order."""

    top: BlockPlan
    at_end: tuple[str, ...] = ()  # leaves that are stored in full: all-reduced last, together
    transfers: tuple[Transfer, ...] = ()  # every collective, in the order it was issued
    slice_bytes: int = 0  # bytes of the node slices that one device keeps for the step (hpZ)
    codecs: tuple[str, ...] = ()  # a line for each codec: what it encodes, and over which axis

    @property
    def steps(self) -> tuple[PlanStep, ...]:
        return tuple(_steps(self.top, (), 1))

    def __str__(self) -> str:
        first: dict[tuple, int] = {}  # the operation that first needs an array of a bucket
        steps = self.steps
        for step in steps:
            place = (step.path, step.action, step.group)
            first[place] = min(step.needed, first.get(place, step.needed))
        rows = [_row(step, first[step.path, step.action, step.group]) for step in steps]
        columns = [column for column in zip(*rows, strict=True) if any(column)]
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in zip(*columns, strict=True)
        ]
        if self.at_end:
            lines.append(f"at the end: all-reduce {', '.join(self.at_end)}")
        lines += self.codecs
        return "\n".join(line.rstrip() for line in lines)


_ACTIONS = {"gather": "all-gather", "reduce": "reduce-scatter"}


def _row(step: PlanStep, first_needed: int) -> tuple[str, ...]:
    """The cells of one line of the printed plan.

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
    else:
        when = f"after {step.at}"
        early = f"deferred to {step.until}" if step.until else ""
    action = f"{_ACTIONS[step.action]} bucket {step.group}"
    array = f"{step.dtype}{list(step.shape)}"
    return step.region, action, step.name, array, size, when, early, end


def _steps(plan: BlockPlan, path: tuple[int, ...], trips: int) -> Iterator[PlanStep]:
    events: list[tuple[float, int]] = []
    events += [(group.at, i) for i, group in enumerate(plan.gather_groups)]
    reduces = [*plan.reduce_groups, *_at_end(plan)]
    events += [(group.at + 0.5, i) for i, group in enumerate(reduces)]
    events += [(index + 0.25, index) for index in plan.loops]
    for place, number in sorted(events):
        match place % 1:
            case 0.0:
                yield from _gather_steps(plan, number, plan.gather_groups[number], path, trips)
            case 0.5:
                yield from _reduce_steps(plan, number, reduces[number], path, trips)
            case _:
                loop = plan.block.operations[number]
                assert isinstance(loop, Loop)
                body = plan.loops[number].body
                yield from _steps(body, (*path, number), trips * loop.length)


def _names(plan: BlockPlan) -> list[str]:
    return [*(operation.name for operation in plan.block.operations), "the end"]


def _gather_steps(
    plan: BlockPlan, number: int, group: GatherGroup, path: tuple[int, ...], trips: int
) -> Iterator[PlanStep]:
    names = _names(plan)
    makers = {value: op.name for op in plan.block.operations for value in op.outputs}
    for one in group.gathers:
        yield PlanStep(
            region=region_name(path) or one.region,
            action="gather",
            group=number,
            name=one.weight.name,
            shape=one.shape,
            dtype=str(one.dtype),
            num_bytes=one.num_bytes,
            sent="the iteration before" if group.prefetched else names[group.issues[-1]],
            at=names[one.at],
            until=names[one.until],
            tied=_tied(group, makers),
            trips=trips,
            start=group.issues[-1],
            needed=one.at,
            stop=one.until,
            path=path,
        )


def _tied(group: GatherGroup, makers: dict[Value, str]) -> str:
    tie = group.ties[-1]
    return makers.get(tie, "an argument") if tie else ""


def _reduce_steps(
    plan: BlockPlan, number: int, group: ReduceGroup, path: tuple[int, ...], trips: int
) -> Iterator[PlanStep]:
    names = _names(plan)
    makers = {value: i for i, op in enumerate(plan.block.operations) for value in op.outputs}
    for value in group.values:
        at = makers.get(value, len(names) - 1)
        yield PlanStep(
            region=region_name(path) or "backward",
            action="reduce",
            group=number,
            name=_demand(plan, value).name,
            shape=value.shape,
            dtype=str(value.dtype),
            num_bytes=math.prod(value.shape) * value.dtype.itemsize,
            sent="",
            at=names[at],
            until="the iteration after" if group.deferred else "",
            tied="",
            trips=trips,
            start=at,
            needed=at,
            stop=group.at,
            path=path,
        )


def _at_end(plan: BlockPlan) -> list[ReduceGroup]:
    """Outputs that are reduced last, each by itself."""
    outputs = (plan.block.outputs[i] for i in plan.gradients.at_end)
    last = len(plan.block.operations)
    return [ReduceGroup((value,), last) for value in outputs if isinstance(value, Value)]


def _demand(plan: BlockPlan, value: Value) -> ReduceSpec:
    if value in plan.gradients.reduces:
        return plan.gradients.reduces[value]
    at_end = plan.gradients.at_end
    return next(at_end[i] for i in at_end if plan.block.outputs[i] is value)


def region_name(path: tuple[int, ...]) -> str:
    """Name the loops of `path`, innermost first ("loop 3 in loop 1"); "" at the top level."""
    return " in ".join(f"loop {index}" for index in reversed(path))
