"""Plan a block: when each group of weights is gathered and each group of gradients reduced.

A plan is data. It is made from two analyses (`param_uses`, `gradient_reductions`) and carried out
by `_execute` without further decisions. `lifetimes` decides how long a gathered weight is held,
`bucketing` which weights are sent together. The groups of a block and its loops form a sequence in
program order. With prefetch distance `n`, a group is sent where the group `n` places before it is
first used, or earlier if it would arrive late (`lookahead`). The value that it waits for there is
explained in [Note: ties] in `ties`.

Each mesh axis gets the time of one group: a group that is gathered over two axes is sent over the
first of them one group earlier, so that no collective waits for another while nothing computes.

[Note: loops] A loop over stacked layers is pipelined. Its carry holds the messages of the next
layer's first `n` groups, and the previous layer's last gradients, encoded but not yet sent. With a
second axis, it also holds messages of the layer after next, and gradients of the layer before the
previous one. The messages of the first layers are sent before the loop, as if the loop were a
group. Or they are the last messages of the loop before it, if that runs in the other direction. The
last iteration has no next layer, and sends the last layer again; the first iteration reduces zeros.
Neither happens if the ends of the loop are cut off (`loop_ends`).

[Note: peaks] At the operation where a layer holds most memory (`layer_memory`), the previous
layer's gradients have been reduced over their first axis, and the next layer's weights are not yet
gathered over the last axis.

[Note: host memory] Shards in host memory are copied to the device before they are sent, which is
one more hop: `window` groups before the first send, or in a pipelined loop `window` layers before.
XLA would merge the copies of forward and backward too, so each copy is tied as a gather is. In a
loop the carry holds the shards that have been copied. A barrier joins newly copied shards with the
end of the iteration; without it, XLA waits for some of the copies before the layer computes.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .._collectives import ReduceSpec
from .._program import Block, Branch, Loop, Value, makes_zeros, movable_ops
from .._sharding import CommSchedule
from .block_plan import BlockPlan, GatherGroup, LoopPlan, ReduceGroup
from .bucketing import ReduceAxes, find_reduce_groups, layers_of_body, split_into_groups
from .gradient_reductions import BlockGradients, find_reduces
from .held_by_loops import limit_held, most_held, unchanged_inputs
from .layer_memory import NO_PEAK, LayerMemory, Peak, work_done
from .lifetimes import Gather, Live, find_gathers, find_passes
from .lookahead import Room, behind_exchanges, hops_in_turn, issued_early, latest_issues
from .param_uses import BlockUses, ShardedParam, View
from .ties import find_ties, largest_input, start_of_backward


def make_plan(
    block: Block,
    uses: BlockUses,
    reduce_specs: Sequence[ReduceSpec | None],
    loss: Value | None,
    schedule: CommSchedule,
    axes: ReduceAxes,
    gather_axes: tuple[str, ...],
    window: int = 1,
) -> BlockPlan:
    """Plan the gathers and reductions of a program.

    Args:
        block: the full program.
        uses: where the program needs weights in full.
        reduce_specs: for each output its reduction; None if it is not reduced.
        loss: the value whose operation ends the forward region; None if there is no backward.
        schedule: prefetch distance, bucket size and limits on live weights.
        axes: returns the mesh axes that some gradients are reduced over together, in order.
        gather_axes: the mesh axes that a weight is gathered over, in order.
        window: how many layers, or groups outside of loops, shards in host memory are copied ahead.
    """
    boundary = len(block.operations)
    for index, operation in enumerate(block.operations):
        if loss in operation.outputs:
            boundary = index
    gradients = find_reduces(block, uses, reduce_specs, schedule.loop_constant_bytes)
    return _plan_block(block, uses, gradients, boundary, schedule, axes, gather_axes, window)


def _plan_block(
    block: Block,
    uses: BlockUses,
    gradients: BlockGradients,
    boundary: int | None,
    schedule: CommSchedule,
    axes: ReduceAxes,
    gather_axes: tuple[str, ...],
    window: int,
    unchanged: frozenset[Value] = frozenset(),
    repeats: bool = False,
) -> BlockPlan:
    """Plan a block and its loops; `boundary` is the last operation of forward, None in a body.

    For a body that gathers constants of its loop, `unchanged` are the inputs that are the same in
    each iteration. `repeats`: whether a message may be sent in another iteration of the body.
    """
    in_loop = boundary is None
    loops = _plan_loops(block, uses, gradients, schedule, axes, gather_axes, window)
    zeros = _zeros(block, gradients)
    holding = limit_held(schedule) if unchanged else schedule
    gathers, live = find_gathers(len(block.operations), uses, boundary, schedule, holding)
    body = _body_of(gathers) if in_loop and not unchanged else _NO_BODY
    reduces = find_reduce_groups(block, gradients, zeros, schedule, axes, repeats, body.num_layers)
    groups = _grouped(gathers, loops, schedule, body)
    first_tie = largest_input(block, uses, unchanged | gradients.sums.keys()) if in_loop else None
    ties = find_ties(block, uses, gradients, boundary, first_tie if unchanged else None)
    starts = _starts(groups, loops)
    num_prefetched = _num_prefetched(groups, live, schedule) if repeats else 0
    memory, layers = LayerMemory(block, uses, gradients.reduces), None if in_loop else starts
    peaks = memory.find_peaks(reduces, layers) if repeats or not in_loop else {}
    every = [_issues(gathers, starts, live, schedule, len(gather_axes)) for gathers in groups]
    if boundary is not None and schedule.prefetch and not schedule.is_bounded:
        wanted = latest_issues(groups, reduces, starts, work_done(block), boundary, gather_axes)
        room = Room(block, memory, live, gradients)
        every = issued_early(groups, every, wanted, starts, boundary, room)
    gather_groups = []
    for number, (gathers, issues) in enumerate(zip(groups, every, strict=True)):
        issues = hops_in_turn(issues, gathers[0].at, ties, block) if in_loop else issues
        if is_prefetched := number < num_prefetched:  # sent for a later layer, beside the last
            at = groups[number - num_prefetched][0].at
            last = max(at, peaks.get(0, NO_PEAK).gather_after or 0)
            last = _behind_loops(gathers, last, starts, loops if unchanged else {}, schedule)
            issues = (*[at] * (len(gather_axes) - 1), last)
        fetched_at = _start_before(issues[0], starts, window if schedule.prefetch else 0)
        issues = _around_peaks(issues, gathers[0].at, {} if in_loop else peaks)
        after = (ties[issue] if not in_loop or issue else first_tie for issue in issues)
        group = GatherGroup(tuple(gathers), issues, tuple(after), is_prefetched)
        if not in_loop and any(gather.weight.in_host for gather in gathers):
            group = dataclasses.replace(group, fetch=fetched_at, fetch_tie=ties[fetched_at])
        gather_groups.append(group)
    return BlockPlan(
        block,
        uses,
        gradients,
        tuple(gather_groups),
        tuple(reduces if in_loop else _with_ties(reduces, ties)),
        gather_axes,
        schedule.prefetch > 0,
        zeros,
        _with_prologues(block, uses, loops, starts, ties, schedule.prefetch),
        last_forward=boundary,
        loss_before=start_of_backward(block, uses, gradients, boundary),
        reduce_early=dict(x.reduce_before for x in peaks.values() if x.reduce_before),
    )


def _with_ties(
    reduces: Sequence[ReduceGroup], ties: Sequence[Value | None]
) -> Iterator[ReduceGroup]:
    """Yield the groups of gradients, each with its tie.

    Once the tie of a group exists, earlier groups are sent over their next axis. A group of
    gradients that are inputs of the block has no tie.
    """
    return (dataclasses.replace(x, tie=ties[x.at]) if x.at >= 0 else x for x in reduces)


def _plan_loops(
    block: Block,
    uses: BlockUses,
    gradients: BlockGradients,
    schedule: CommSchedule,
    axes: ReduceAxes,
    gather_axes: tuple[str, ...],
    window: int,
) -> dict[int, LoopPlan]:
    """Plan the loops of a block; return the plans by index of the loop."""
    loops = {}
    for index, operation in enumerate(block.operations):
        if isinstance(operation, Loop):
            inner = gradients.loops.get(index) or BlockGradients({}, {}, {}, {})
            repeats = not isinstance(operation, Branch) and operation.length > 1
            used = uses.loops[index]
            same = unchanged_inputs(operation) if used.constants else frozenset()
            body = _plan_block(
                operation.body,
                used.body,
                inner,
                None,
                schedule,
                axes,
                gather_axes,
                window,
                same,
                repeats,
            )
            in_host = any(stack.in_host for stack in used.stacks)
            ahead = window if in_host and repeats and schedule.prefetch else 0
            loops[index] = LoopPlan(behind_exchanges(body), index, window=ahead)
    return loops


def _with_prologues(
    block: Block,
    uses: BlockUses,
    loops: dict[int, LoopPlan],
    starts: list[int],
    ties: list[Value | None],
    prefetch: int,
) -> dict[int, LoopPlan]:
    """Return the plans of loops, which say where the gathers of their first layers are sent."""
    placed = {}
    for index, loop in loops.items():
        # A loop that gathers nothing itself, but holds loops that do, is not among `starts`.
        issue = min(index, _start_before(index, starts, prefetch))
        continues = _continued(block, uses, loops, index, starts, prefetch)
        placed[index] = dataclasses.replace(loop, issue=issue, tie=ties[issue], continues=continues)
    return placed


def _grouped(
    gathers: list[Gather], loops: dict[int, LoopPlan], schedule: CommSchedule, body: _Body
) -> list[list[Gather]]:
    """Cut the gathers of a block into groups; `body` describes the layers of a loop's body.

    If a weight would be gathered for backward while it is still held for forward, it is held until
    backward instead: its buffer would exist all that time anyway.
    """

    def region(gather: Gather) -> tuple:
        return gather.region, sum(index < gather.at for index in loops)

    def split(gathers: list[Gather]) -> list[list[Gather]]:
        return split_into_groups(
            gathers,
            _signature_of(gathers, body.by_row),
            lambda x: x.num_bytes,
            schedule.bucket_bytes,
            body.num_layers,
            region,
        )

    groups = split(gathers)
    if not schedule.prefetch:
        return groups
    starts = _starts(groups, loops)
    latest: dict[tuple, Gather] = {}  # the last gather of each view
    merged: dict[tuple, Gather] = {}
    for gather in gathers:
        view = gather.weight, gather.ops
        previous = latest.get(view)
        start = starts[bisect.bisect_right(starts, gather.at) - 1]
        if previous and _start_before(start, starts, schedule.prefetch) <= previous.until:
            gather = dataclasses.replace(previous, until=gather.until)
        merged[*view, gather.at] = latest[view] = gather
    return split(sorted(merged.values(), key=lambda x: x.at))


class _Body(NamedTuple):
    """The layers in the body of a loop, and how their matrices are told apart."""

    num_layers: int  # 0: the block is no such body
    by_row: bool  # whether equal matrices of a layer are distinguished by their slice of a leaf


_NO_BODY = _Body(0, False)


def _body_of(gathers: Sequence[Gather]) -> _Body:
    """Find the layers in the body of a loop from the gathers of the body."""
    passes = find_passes(gathers)
    first = [x for x in gathers if not passes[x]]
    for by_row in (False, True):
        num = layers_of_body(first, _signature_of(first, by_row), lambda x: x.num_bytes)
        if num > 1:
            return _Body(num, by_row)
    return _Body(1, False)


def _signature_of(gathers: Sequence[Gather], by_row: bool) -> Callable[[Gather], tuple]:
    """Return a function whose keys are equal for gathers with the same role in different layers."""
    passes = find_passes(gathers)

    def signature(gather: Gather) -> tuple:
        rows = [x.start for x in gather.ops if isinstance(x, movable_ops.Slice)][-1:]
        role = gather.shape, gather.dtype, gather.region, gather.weight.layout.dim
        return (*role, passes.get(gather), *(rows if by_row else ()))

    return signature


def _starts(groups: Sequence[Sequence[Gather]], loops: dict[int, LoopPlan]) -> list[int]:
    """Return the *starts*, in order: operations that first need a group, and loops that gather."""
    gathering = (
        i for i, loop in loops.items() if any(x.prefetched for x in loop.body.gather_groups)
    )
    return sorted({*(gathers[0].at for gathers in groups), *gathering})


def _start_before(start: int, starts: list[int], num: int) -> int:
    """Return the start that is `num` places before `start`, or the first if there are fewer."""
    return starts[max(0, bisect.bisect_left(starts, start) - num)] if num and starts else start


def _issues(
    group: Sequence[Gather], starts: list[int], live: Live, schedule: CommSchedule, num_hops: int
) -> tuple[int, ...]:
    """Return, for each mesh axis, the operation before which a group is gathered over it.

    Over the last axis the group is gathered `prefetch` groups ahead of its use, or fewer if the
    limits on live weights require it. Over each other axis it is gathered one group earlier than
    over the axis that follows. The group is added to `live`.
    """
    at = group[0].at
    for num in range(schedule.prefetch, 0, -1):
        last = _start_before(at, starts, num)
        if live.has_room(group, last, at):
            for gather in group:
                live.add(gather, last, at)
            before = (_start_before(last, starts, i) for i in range(num_hops - 1, 0, -1))
            return (*before, last)
    return (at,) * num_hops


def _around_peaks(issues: tuple[int, ...], at: int, peaks: Mapping[int, Peak]) -> tuple[int, ...]:
    """Move gathers of a group that would be sent where a layer begins. See [Note: peaks].

    At that place, gathers would delay the first reduction of the previous layer's gradients, so
    they are sent after this reduction. The gather over the last axis is sent after the layer's
    peak, if there is one.

    Args:
        issues: for each axis, the operation before which the group would be sent.
        at: the operation that first needs it; a gather that is sent there is not moved.
        peaks: the peaks of the layers, by first operation.
    """
    found = [peaks.get(issue, NO_PEAK) if issue < at else NO_PEAK for issue in issues]
    before = (peak.reduce_before for peak in found)
    moved = [x[0] if x else issue for x, issue in zip(before, issues, strict=True)]
    return (*moved[:-1], max([*moved, found[-1].gather_after or 0]))


def _behind_loops(
    group: Sequence[Gather],
    issue: int,
    starts: list[int],
    loops: Mapping[int, LoopPlan],
    schedule: CommSchedule,
) -> int:
    """Return the operation before which a body gathers a group for the next iteration.

    That is `issue`, unless inner loops come after it and the group has more bytes than a loop may
    hold from its start to its end. Then the group is gathered after the last of these loops.
    """
    if sum(gather.num_bytes for gather in group) <= most_held(schedule):
        return issue
    return max((i + 1 for i in starts if i in loops and i >= issue), default=issue)


def _num_prefetched(groups: list[list[Gather]], live: Live, schedule: CommSchedule) -> int:
    """Return how many groups of a loop's body are sent an iteration ahead, within the limits."""
    for num in range(min(schedule.prefetch, len(groups)), 0, -1):
        first = [gather for group in groups[:num] for gather in group]
        if live.has_room(first, 0, len(live.elements)):
            return num
    return 0


def _continued(
    block: Block,
    uses: BlockUses,
    loops: dict[int, LoopPlan],
    index: int,
    starts: list[int],
    num: int,
) -> int | None:
    """Return the earlier loop that gathers the first weights of loop `index` at its end; or None.

    The earlier loop lies at most `num` groups before, has as many iterations in the other
    direction, and gathers the same views of the same stacks. Forward and backward are such a pair.
    """

    def sent(i: int) -> list[tuple]:
        stacks: dict[ShardedParam, View | ShardedParam]
        stacks = {stack.layer: stack.view for stack in uses.loops[i].stacks}
        stacks.update((weight, weight) for weight in uses.loops[i].constants)
        groups = (group for group in loops[i].body.gather_groups if group.prefetched)
        return [(stacks[x.weight], x.ops) for group in groups for x in group.gathers]

    before = [i for i in starts if i < index]
    near = [i for i in before[-1 - num :] if i in loops]
    if not near or not sent(index):
        return None
    previous, loop = block.operations[near[-1]], block.operations[index]
    assert isinstance(previous, Loop) and isinstance(loop, Loop)
    is_opposite = previous.length == loop.length and previous.is_reversed != loop.is_reversed
    return near[-1] if is_opposite and sent(near[-1]) == sent(index) else None


def _zeros(block: Block, gradients: BlockGradients) -> frozenset[Value]:
    """Return the reduced gradients that are known to be zero: broadcasts of the constant 0."""
    made = (op.outputs[0] for op in block.operations if makes_zeros(op))
    return frozenset(value for value in made if value in gradients.reduces)
