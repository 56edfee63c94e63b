"""A plan to print: every all-gather, drop, reduce-scatter and host copy of a program, in order."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from .._collectives import HostTransfer, ReduceSpec, Transfer, readable_bytes
from .._program import Loop, Value
from .block_plan import BlockPlan, ReduceGroup
from .emit import instructions_of
from .emit_loop import pipeline_of
from .held_whole import HeldWhole, find_held_whole
from .host_steps import HostSteps
from .instructions import Instruction, Reduce, Send
from .pipeline import Pipeline
from .plan_step import Hop, PlanStep, operation_names, region_name, tied_to


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that one training step gathers, reduces and copies, in program order.

    With several micro-batches, `top` and `steps` are those of one of them.
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
    # With hpZ and several micro-batches, `top` and `steps` are those of the first, which keeps node
    # slices. This is the plan of the others, which gather from the slices.
    later: BlockPlan | None = None

    @property
    def steps(self) -> tuple[PlanStep, ...]:
        host = HostSteps(self.host_transfers)
        steps = _Steps(host, bool(self.slice_bytes)).of_block(self.top)
        return (
            *host.whole("device", 0),
            *steps,
            *host.whole("host", len(self.top.block.operations)),
        )

    def with_tangents(self, tangents: Plan) -> Plan:
        """This plan, with what a program of tangents sends among the transfers."""
        sent = (
            x if x.purpose == "other" else dataclasses.replace(x, purpose="tangents")
            for x in tangents.transfers
        )
        return dataclasses.replace(self, transfers=(*self.transfers, *sent))

    @property
    def held_whole(self) -> tuple[HeldWhole, ...]:
        """What is held for all layers, or for a whole loop, and why."""
        return tuple(find_held_whole(self.top))

    @property
    def loops(self) -> dict[str, Pipeline]:
        """The list of instructions of one turn of each loop, by the loop's name in `steps`.

        Printed, each has its lag: in turn `t` it works on layer `t - lag`.
        """
        return dict(_pipelines(self.top, ()))

    @property
    def described_combined(self) -> tuple[str, ...]:
        """What `combined` is, one line for each kind of reduction."""
        leaves: dict[str, list[str]] = {}
        for path, how in self.combined:
            leaves.setdefault(how, []).append(path)
        return tuple(f"{_COMBINED[how]} of {', '.join(x)}" for how, x in leaves.items())

    def __str__(self) -> str:
        lines = _lines(self.steps)
        if self.later is not None:
            lines.append("in each later micro-batch, which gathers from node slices (hpZ):")
            later = _Steps(HostSteps(()), bool(self.slice_bytes)).of_block(self.later)
            lines += _lines(tuple(later))
        lines += map(str, self.held_whole)
        if self.at_end:
            lines.append(f"at the end: all-reduce {', '.join(self.at_end)}")
        lines += [f"at the end: {x}" for x in self.described_combined]
        lines += self.codecs
        return "\n".join(line.rstrip() for line in lines)


def _lines(steps: tuple[PlanStep, ...]) -> list[str]:
    """A line for each step, and below a bucket one for each hop, in aligned columns."""
    first: dict[tuple, int] = {}  # the operation that first needs an array of a bucket
    for step in steps:
        place = (step.path, step.action, step.group)
        first[place] = min(step.needed, first.get(place, step.needed))
    rows = []
    for i, step in enumerate(steps):
        rows.append(_row(step, first[step.path, step.action, step.group]))
        following = steps[i + 1] if i + 1 < len(steps) else None
        bucket = step.path, step.action, step.group
        if following is None or (following.path, following.action, following.group) != bucket:
            rows += [_hop_row(step, hop) for hop in step.hops]
    columns = [column for column in zip(*rows, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    ]


_COMBINED = {
    "max": "maximum over devices and micro-batches",
    "sum": "sum over devices and micro-batches",
    "first": "value of the first device and micro-batch",
}
_ACTIONS = {
    "gather": "all-gather bucket",
    "reduce": "reduce-scatter bucket",
    "fetch": "copy to device",
    "offload": "copy to host",
}


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
    action = _ACTIONS[step.action] if is_copy else f"{_ACTIONS[step.action]} {step.group}"
    array = f"{step.dtype}{list(step.shape)}"
    return step.region, action, step.name, array, size, when, early, end


def _hop_row(step: PlanStep, hop: Hop) -> tuple[str, ...]:
    """The cells of the line of one hop of a bucket."""
    lag = ""
    if hop.lag:
        layers = f"{abs(hop.lag)} {'layer' if abs(hop.lag) == 1 else 'layers'}"
        lag = f"{layers} {'later' if hop.lag > 0 else 'ahead'}"
    when = f"before {hop.at} {hop.before}" if hop.before else "at the end"
    return step.region, f"  over {hop.axis}", "", "", "", when, lag, ""


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Makes the steps of blocks.

    Attributes:
        host: the copies from and to host memory.
        has_slices: whether weights are gathered from node slices (hpZ), except by the gathers that
            make these.
    """

    host: HostSteps
    has_slices: bool

    def of_block(
        self,
        plan: BlockPlan,
        path: tuple[int, ...] = (),
        trips: int = 1,
        listed: Sequence[Instruction] | None = None,
    ) -> Iterator[PlanStep]:
        """The steps of a block, whose instructions are `listed`, and of the loops in it, in order.

        None: it is no loop's body.
        """
        host, groups = self.host, plan.gather_groups
        events: list[tuple[float, int]] = []
        events += [(x.fetch - 0.25, i) for i, x in enumerate(groups) if x.fetch is not None]
        events += [(group.at, i) for i, group in enumerate(groups)]
        reduces = [*plan.reduce_groups, *_at_end(plan)]
        events += [(group.at + 0.5, i) for i, group in enumerate(reduces)]
        events += [(index + 0.25, index) for index in plan.loops]
        hops = _hops(plan, instructions_of(plan) if listed is None else listed)
        for place, number in sorted(events):
            match place % 1:
                case 0.0:
                    sent = hops.get((Send, number), ())
                    yield from self._gather(plan, number, path, trips, sent)
                case 0.75:
                    yield from host.of_group(plan, number, path, trips)
                case 0.5:
                    sent = hops.get((Reduce, number), ())
                    yield from _reduce_steps(plan, number, reduces[number], path, trips, sent)
                    yield from host.of_reduced(plan, reduces[number], path, trips)
                case _:
                    loop = plan.block.operations[number]
                    assert isinstance(loop, Loop)
                    body, inside = plan.loops[number].body, (*path, number)
                    times = trips * loop.length
                    yield from host.of_loop(plan, number, inside, times)
                    loops = pipeline_of(plan.loops[number], loop, plan.uses.loops[number])
                    yield from self.of_block(body, inside, times, loops.instructions)
                    yield from host.gradients(plan, number, inside, times)

    def _gather(
        self,
        plan: BlockPlan,
        number: int,
        path: tuple[int, ...],
        trips: int,
        hops: tuple[Hop, ...],
    ) -> Iterator[PlanStep]:
        names, group = operation_names(plan), plan.gather_groups[number]
        if self.has_slices and not any(one.keeps for one in group.gathers):
            hops = hops[-1:]
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
                tied=tied_to(plan, group.ties[-1]),
                trips=trips,
                start=group.issues[-1],
                needed=one.at,
                stop=one.until,
                path=path,
                hops=hops,
            )


def _hops(
    plan: BlockPlan, listed: Sequence[Instruction]
) -> dict[tuple[type[Instruction], int], tuple[Hop, ...]]:
    """The hops of each group of weights and of gradients, by kind of instruction and number."""
    names = [*operation_names(plan)[:-1], ""]
    found: dict[tuple[type[Instruction], int], list[Hop]] = {}
    for each in itertools.chain.from_iterable(x.parts for x in listed):
        if isinstance(each, (Send, Reduce)):
            is_send = isinstance(each, Send)
            axes = plan.gather_axes if is_send else plan.reduce_groups[each.group].axes
            hop = Hop(axes[each.axis], each.at, names[each.at], each.lag)
            found.setdefault((type(each), each.group), []).append(hop)
    return {key: tuple(hops) for key, hops in found.items()}


def _pipelines(plan: BlockPlan, path: tuple[int, ...]) -> Iterator[tuple[str, Pipeline]]:
    for index, loop in plan.loops.items():
        operation, inside = plan.block.operations[index], (*path, index)
        assert isinstance(operation, Loop)
        uses = plan.uses.loops[index]
        hosts = [stack.layer for stack in uses.stacks if stack.in_host]
        yield region_name(inside), pipeline_of(loop, operation, uses, in_host=hosts)
        yield from _pipelines(loop.body, inside)


def _reduce_steps(
    plan: BlockPlan,
    number: int,
    group: ReduceGroup,
    path: tuple[int, ...],
    trips: int,
    hops: tuple[Hop, ...],
) -> Iterator[PlanStep]:
    names = operation_names(plan)
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
            hops=hops,
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
