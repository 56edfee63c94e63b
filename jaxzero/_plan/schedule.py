"""The plan of a block: which units are gathered before what, tied to what, reduced after what.

A plan is data. It is made from the two analyses (`_uses`, `_gradients`) and carried out,
without further decisions, by `_emit`; `_plan` prints it. Weights that are gathered are held
as `_regions` says, and sent in `_units`. The units of a block and its loops stand in a row,
in program order: what is prefetched `n` ahead is sent where the unit `n` places earlier begins.

[Note: ties] XLA would merge the gather of the backward region with that of the forward
region, because they read the same shard, and keep the weight alive between. So each
gather is tied: its shards pass an `optimization_barrier` together with a value that does
not exist earlier. That value is the last result of a costly operation, and not an operand
of the use itself, which may be a cheap expression that XLA fuses into the use and that a
tie would force into memory; nor is it a gradient that is about to be sent.

The shards also pass the gradients that were reduced before the gather before: without that,
XLA may put off all reductions to the end, and full gradients pile up. One gather late, so that
a reduction can overlap with one unit of compute. XLA takes out of a barrier what is read
neither before nor behind it by anything else, so gradients are used as they come out of it.

Each hop has the time of a unit: what goes over two axes is sent over the first one unit earlier,
so that no hop waits for another while nothing computes.

[Note: loops] A loop over stacked layers is pipelined: its carry holds the messages of the next
layer's first `n` units, and the last layer's last gradients, encoded but not yet sent; for a
second hop, those of the layer after next, and of the last but one. The first layers' messages
are sent before the loop, as if the loop were a unit; or they are those that the loop before it,
which runs the other way, sent last. Where there is no next layer the last is sent again.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

from .._collectives import ReduceSpec
from .._program import Block, Constant, Loop, Operation, Value
from .._sharding import CommSchedule
from .block_plan import BlockPlan, GatherGroup, LoopPlan, ReduceGroup
from .bucketing import group
from .gradient_reductions import BlockGradients, find_reduces
from .lifetimes import Gather, Live, find_gathers
from .param_uses import BlockUses

# Operations that take long enough for a collective to overlap with them.
COSTLY = {
    "dot_general",
    "ragged_dot",
    "conv_general_dilated",
    "gather",
    "scatter",
    "scatter-add",
    "scan",
    "while",
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
    "shard_map",
    "pallas_call",
    "sort",
    "fft",
}


def make_plan(
    block: Block,
    uses: BlockUses,
    reduce_specs: Sequence[ReduceSpec | None],
    loss: Value | None,
    schedule: CommSchedule,
    num_hops: int = 1,
) -> BlockPlan:
    """Decide when to gather and reduce.

    Args:
        block: the whole program.
        uses: where it needs weights.
        reduce_specs: for each output, whether and how it is to be reduced.
        loss: the value that ends the forward region; None: all is forward.
        schedule: what was asked for.
        num_hops: that a shard takes to become whole.
    """
    boundary = len(block.operations)
    for index, operation in enumerate(block.operations):
        if loss in operation.outputs:
            boundary = index
    gradients = find_reduces(block, uses, reduce_specs)
    return _plan_block(block, uses, gradients, boundary, schedule, num_hops)


def _plan_block(
    block: Block,
    uses: BlockUses,
    gradients: BlockGradients,
    boundary: int | None,
    schedule: CommSchedule,
    num_hops: int,
) -> BlockPlan:
    in_loop = boundary is None
    loops = {}
    for index, operation in enumerate(block.operations):
        if isinstance(operation, Loop):
            inner = gradients.loops.get(index) or BlockGradients({}, {}, {}, {})
            inside = schedule
            if operation.length < 2:
                inside = dataclasses.replace(schedule, prefetch=0)
            body = _plan_block(
                operation.body, uses.loops[index].body, inner, None, inside, num_hops
            )
            loops[index] = LoopPlan(body, index)
    zeros = _zeros(block, gradients)
    reduces = _reduce_groups(block, gradients, zeros, schedule, in_loop)
    if in_loop and schedule.prefetch:
        reduces = _last_deferred(block, gradients, reduces)
    gathers, live = find_gathers(len(block.operations), uses, boundary, schedule)
    groups = _grouped(gathers, loops, schedule, in_loop)
    ties = _ties(block, uses, gradients, boundary)
    starts = _starts(groups, loops)
    ahead = _num_ahead(groups, live, schedule) if in_loop else 0
    gather_groups = []
    for number, some in enumerate(groups):
        issues = _issues(some, starts, live, schedule, num_hops)
        if number < ahead:
            issues = (groups[len(groups) - ahead + number][0].at,) * num_hops
        after = (ties[issue] if not in_loop or issue else _largest(block, uses) for issue in issues)
        gather_groups.append(GatherGroup(tuple(some), issues, tuple(after), number < ahead))
    for index, loop in loops.items():
        issue = _place_before(index, starts, schedule.prefetch)
        continues = _continued(block, uses, loops, index, starts, schedule.prefetch)
        loops[index] = dataclasses.replace(loop, issue=issue, tie=ties[issue], continues=continues)
    overlaps = schedule.prefetch > 0
    return BlockPlan(
        block,
        uses,
        gradients,
        tuple(gather_groups),
        tuple(reduces),
        num_hops,
        overlaps,
        zeros,
        loops,
    )


def _grouped(
    gathers: list[Gather], loops: dict[int, LoopPlan], schedule: CommSchedule, in_loop: bool
) -> list[list[Gather]]:
    """The units of a block.

    A weight that would be sent for backward while it is still held for forward is held on:
    that takes no memory.
    """

    def gather_groups(some: list[Gather]) -> list[list[Gather]]:
        return group(some, _signature, lambda x: x.num_bytes, schedule.bucket_bytes, in_loop)

    groups = gather_groups(gathers)
    if not schedule.prefetch:
        return groups
    starts = _starts(groups, loops)
    held: dict[tuple, Gather] = {}
    for one in gathers:
        before = held.get((one.weight, one.ops))
        start = max(x for x in starts if x <= one.at)
        if before and _place_before(start, starts, schedule.prefetch) <= before.until:
            one = dataclasses.replace(before, until=one.until)
        held[one.weight, one.ops, one.at] = held[one.weight, one.ops] = one
    gathers = [one for key, one in held.items() if len(key) == 3]
    return gather_groups(sorted(gathers, key=lambda x: x.at))


def _signature(gather: Gather) -> tuple:
    return gather.shape, gather.dtype, gather.region, gather.weight.layout.dim


def _starts(groups: Sequence[Sequence[Gather]], loops: dict[int, LoopPlan]) -> list[int]:
    """Where units, and loops that gather, begin."""
    gathering = (
        i for i, loop in loops.items() if any(x.prefetched for x in loop.body.gather_groups)
    )
    return sorted({*(some[0].at for some in groups), *gathering})


def _place_before(start: int, starts: list[int], num: int) -> int:
    """The start of what stands `num` places before what begins at `start`."""
    return starts[max(0, bisect.bisect_left(starts, start) - num)] if num and starts else start


def _issues(
    some: Sequence[Gather], starts: list[int], live: Live, schedule: CommSchedule, num_hops: int
) -> tuple[int, ...]:
    """Where a unit is sent: as early as asked for, if there is room for it.

    Each hop has a unit's time; the last ends `prefetch` units ahead.
    """
    at = some[0].at
    for num in range(schedule.prefetch, 0, -1):
        last = _place_before(at, starts, num)
        if live.has_room(some, last, at):
            for one in some:
                live.add(one, last, at)
            before = (_place_before(last, starts, i) for i in range(num_hops - 1, 0, -1))
            return (*before, last)
    return (at,) * num_hops


def _num_ahead(groups: list[list[Gather]], live: Live, schedule: CommSchedule) -> int:
    """How many units of a loop's body are sent in the iteration before."""
    for num in range(min(schedule.prefetch, len(groups)), 0, -1):
        first = [one for some in groups[:num] for one in some]
        if live.has_room(first, 0, len(live.elements)):
            return num
    return 0


def _ties(
    block: Block, uses: BlockUses, gradients: BlockGradients, boundary: int | None
) -> list[Value | None]:
    """For each operation, the value that a gather before it waits for. See [Note: ties].

    No gradient that is about to be sent: once it is, nothing is left to wait for; and if it is a
    product that is then transposed, XLA exchanges the factors instead, unless that is read too.
    """
    sent = set(gradients.reduces)
    for operation in reversed(block.operations):
        source = operation.source if operation.view() is not None else None
        if source is not None and not sent.isdisjoint(operation.outputs):
            sent.add(source)
    ties: list[Value | None] = []
    latest = None
    for index, operation in enumerate(block.operations):
        if boundary is not None and index == boundary + 1:
            latest = None
        arrays = [x for x in operation.inputs if isinstance(x, Value) and x.is_array]
        ready = [x for x in arrays if x not in uses.views]
        ties.append(latest or (ready[0] if ready else None))
        if operation.name in COSTLY:
            arrays = [x for x in operation.outputs if x.is_array]
            made = [x for x in arrays if x not in uses.views and x not in sent]
            latest = made[0] if made else latest
    return [*ties, latest]


def _largest(block: Block, uses: BlockUses) -> Value | None:
    """The largest input of a loop's body that is there from the start: the activations."""
    arrays = [x for x in block.inputs if x.is_array and x not in uses.views]
    return max(arrays, key=lambda x: math.prod(x.shape), default=None)


def _continued(
    block: Block,
    uses: BlockUses,
    loops: dict[int, LoopPlan],
    index: int,
    starts: list[int],
    num: int,
) -> int | None:
    """The loop that ends with the layer that this one begins with, `num` units between."""

    def sent(i: int) -> list[tuple]:
        stacks = {stack.layer: stack.view for stack in uses.loops[i].stacks}
        ahead = (group for group in loops[i].body.gather_groups if group.prefetched)
        return [(stacks[one.weight], one.ops) for group in ahead for one in group.gathers]

    before = [i for i in starts if i < index]
    near = [i for i in before[-1 - num :] if i in loops]
    if not near or not sent(index):
        return None
    one, other = block.operations[near[-1]], block.operations[index]
    assert isinstance(one, Loop) and isinstance(other, Loop)
    turns = one.length == other.length and one.is_reversed != other.is_reversed
    return near[-1] if turns and sent(near[-1]) == sent(index) else None


def _zeros(block: Block, gradients: BlockGradients) -> frozenset[Value]:
    """The demanded values that are known to be zero."""

    def is_zero(operation: Operation) -> bool:
        if operation.name != "broadcast_in_dim":
            return False
        source = operation.inputs[0]
        return isinstance(source, Constant) and source.is_zero

    made = (op.outputs[0] for op in block.operations if is_zero(op))
    return frozenset(value for value in made if value in gradients.reduces)


def _reduce_groups(
    block: Block,
    gradients: BlockGradients,
    zeros: frozenset[Value],
    schedule: CommSchedule,
    in_loop: bool,
) -> list[ReduceGroup]:
    makers = {value: i for i, op in enumerate(block.operations) for value in op.outputs}
    wanted = sorted(
        (value for value in gradients.reduces if value not in zeros),
        key=lambda value: makers.get(value, -1),
    )

    def signature(value: Value) -> tuple:
        reduce_spec = gradients.reduces[value]
        return value.shape, value.dtype, reduce_spec.layout.dim, reduce_spec.hops

    def num_bytes(value: Value) -> int:
        return math.prod(value.shape) * value.dtype.itemsize

    groups = group(wanted, signature, num_bytes, schedule.bucket_bytes, in_loop)
    return [ReduceGroup(tuple(some), makers.get(some[-1], -1)) for some in groups]


def _last_deferred(
    block: Block, gradients: BlockGradients, reduces: list[ReduceGroup]
) -> list[ReduceGroup]:
    """Put off the last unit of a body, unless its gradients are added to others."""
    if not reduces:
        return reduces
    late = set(reduces[-1].values)
    for index in sorted(gradients.on_shards):
        operation = block.operations[index]
        inputs = {x for x in operation.inputs if isinstance(x, Value)}
        if late & inputs:
            if not inputs <= late:
                return reduces
            late.update(operation.outputs)
    return [*reduces[:-1], dataclasses.replace(reduces[-1], deferred=True)]
