"""Decide how early weights are gathered, by a simulation of the step.

With prefetch distance `n` a group of weights is sent `n` groups before its first use. Where layers
are alike that is always enough: either the messages arrive in time, or the link is busy all the
time and sending earlier would gain nothing. In an irregular network, such as a U-Net, the layers
with most weights compute least. Their weights arrive in time only if they are sent while layers far
before them compute.

So the step is simulated at assumed rates: a device that computes, and a link that sends one message
after the other. First, weights are sent as soon as the link is free, which gives the time of use of
each group. Then, from the last group to the first, each group is sent as late as possible without a
delay of any time of use.

Weights that wait take memory. A group is sent more than `n` groups ahead only where the program
then holds no more than at its peak (`Room`).

[Note: exchanges] A loss may have collectives of its own, such as exchanges of the tokens of
experts. A device waits for their results, and they wait for messages that were sent before them. So
in the body of a loop with exchanges, messages are sent right after an exchange has ended: the one
after which the device computes longest before the next exchange.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from .._mesh import AXES, NODE
from .._program import Block, Operation, Value, exchanges, flops_of
from .block_plan import BlockPlan, ReduceGroup
from .gradient_reductions import BlockGradients
from .held_by_loops import WORK_PER_BYTE
from .layer_memory import LayerMemory, work_needed
from .lifetimes import Gather, Live

# Multiplications that an H200 does while a byte of the full array is sent inside its node, and
# between nodes of 8 at 50 GB/s; and while a message is launched.
_WORK_INSIDE, _WORK_BETWEEN = 4 * WORK_PER_BYTE, 16 * WORK_PER_BYTE
_WORK_TO_LAUNCH = 3_500_000_000  # 10 us at 350e12 multiplications per second
# Only products are counted. Norms and activations may take as long, so groups are sent early enough
# for a device that computes at either speed.
_SLOWDOWNS = (1, 2)


def latest_issues(
    groups: Sequence[Sequence[Gather]],
    reduces: Sequence[ReduceGroup],
    starts: Sequence[int],
    work: np.ndarray,
    boundary: int,
    axes: Sequence[str],
) -> dict[int, tuple[int, ...]]:
    """Find how late each group may be sent over each axis without a delay of any group's use.

    Args:
        groups: the groups of weights.
        reduces: the reductions of gradients.
        starts: the operations where groups are first used, or where loops begin, in order.
        work: for each operation, the multiplications from the start to its end.
        boundary: the last operation of forward; weights of backward are not sent up to it.
        axes: the axes that weights are gathered over, in order.

    Returns:
        By the operation where a group is first used: for each axis, the entry of `starts` before
            which the group is sent.
    """
    rates = np.array([_WORK_BETWEEN if axis == NODE else _WORK_INSIDE for axis in axes])
    costs = np.zeros((len(starts), len(axes)), np.int64)  # of each gather, at its first use
    for group in groups:
        num_bytes = sum(gather.num_bytes for gather in group)
        costs[bisect.bisect_left(starts, group[0].at)] += num_bytes * rates + _WORK_TO_LAUNCH
    others = np.zeros(len(starts) + 1, np.int64)  # of reductions, sent before gathers
    for reduce in reduces:  # once made: not before the gathers of the next start
        num_bytes = sum(value.num_bytes for value in reduce.values)
        after = min(bisect.bisect_right(starts, reduce.at) + 1, len(starts))
        others[after] += num_bytes * rates.sum() + len(axes) * _WORK_TO_LAUNCH
    backward = bisect.bisect_right(starts, boundary)
    issues: dict[int, tuple[int, ...]] = {}
    for slow in _SLOWDOWNS:
        needed = [slow * int(work[start - 1]) if start else 0 for start in starts]
        used = _times_of_use(needed, costs.sum(1), others, backward)
        arrived = used[-1] if used else 0
        for i in reversed(range(len(starts))):
            arrived = min(arrived, used[i])
            if costs[i].any():
                left = np.cumsum(costs[i][::-1])[::-1]  # cost of the hops from each axis on
                sent = [bisect.bisect_right(used, time) - 1 for time in (arrived - left).tolist()]
                found = tuple(starts[max(x, 0)] for x in sent)
                issues[starts[i]] = tuple(map(min, issues.get(starts[i], found), found))
                arrived -= int(left[0])
            arrived -= int(others[i])
    return issues


def _times_of_use(
    needed: Sequence[int], costs: np.ndarray, others: np.ndarray, backward: int
) -> list[int]:
    """Return when the group of each start is used, in multiplications.

    Messages are sent one after the other. The link idles only before backward.

    Args:
        needed: the work that the device does before each start.
        costs: the time that the link takes for the gathers that each start needs.
        others: the time that the link takes for reductions that are sent before these gathers.
        backward: the number of the first start in backward.
    """
    used, link = [], 0
    for i, (done, more) in enumerate(itertools.pairwise((0, *needed))):
        if i == backward and used:
            link = max(link, used[-1])
        link += int(costs[i] + others[i])
        computed = (used[-1] if used else 0) + more - done
        used.append(max(computed, link) if costs[i] else computed)
    return used


def issued_early(
    groups: Sequence[Sequence[Gather]],
    issues: Sequence[tuple[int, ...]],
    wanted: Mapping[int, tuple[int, ...]],
    starts: Sequence[int],
    boundary: int,
    room: Room,
) -> list[tuple[int, ...]]:
    """Choose where groups are sent: as early as `wanted` asks, if memory has room for them.

    Groups of backward are sent only in backward.

    Args:
        groups: the groups of weights.
        issues: for each group and axis, the operation before which it is sent at the latest.
        wanted: the result of `latest_issues`.
        starts: the operations where groups are first used, or where loops begin, in order.
        boundary: the last operation of forward.
        room: the memory for weights that wait; it is reduced by what they take.

    Returns:
        For each group and axis, the operation before which it is sent.
    """
    backward = next((start for start in starts if start > boundary), 0)
    places = []
    for group, latest in zip(groups, issues, strict=True):
        first = backward if group[0].at > boundary else 0
        early: list[int] = []
        for x, y in zip(latest, wanted[group[0].at], strict=True):
            early.append(min(x, max(y, first)))
            # Over an axis it is sent once it has arrived over the one before, for which the device
            # would wait if both were sent at once.
            first = starts[min(bisect.bisect_right(starts, early[-1]), len(starts) - 1)]
        if early[-1] < latest[-1]:
            free = room.take(group, early[-1], latest[-1])
            early[-1] = min(latest[-1], starts[bisect.bisect_left(starts, free)])
        places.append(tuple(early))
    return places


def hops_in_turn(
    issues: tuple[int, ...], at: int, ties: Sequence[Value | None], block: Block
) -> tuple[int, ...]:
    """Delay the send of a group over its last axis until it has arrived over the axis before.

    A group is sent over each axis one group earlier than over the next axis. In a loop's body there
    is no group before the first one, so the second group would be sent over both axes where the
    body begins. With the delay, that group is sent over the last axis after about half of the work
    that the body does before it uses the group.

    Args:
        issues: for each axis, the operation before which the group is sent.
        at: the operation that first uses it.
        ties: for each operation, the value that a gather before it waits for.
        block: the body.

    Returns:
        `issues`, with the last one moved.
    """
    if len(issues) < 2 or issues[-1] > issues[-2]:
        return issues
    first, operations = issues[-1], block.operations[:at]
    before = sum(operation.products for operation in operations[:first])
    until = sum(operation.products for operation in operations)
    needed = work_needed(operations)  # and no more: XLA may do other operations later

    def least(place: int) -> int:
        """Return the least work that overlaps with a hop, if the last hop is sent at `place`."""
        return min(needed[place - 1] - before, until - needed[place - 1])

    places = (x for x in range(first + 1, at) if ties[x] is not ties[x - 1])
    best = max(places, key=least, default=None)
    return issues if best is None or least(best) <= 0 else (*issues[:-1], best)


def behind_exchanges(plan: BlockPlan) -> BlockPlan:
    """Return the plan of a body that sends messages after exchanges of the loss.

    See [Note: exchanges]. The messages are weights that are gathered for later iterations, and
    gradients that are reduced in the iteration that makes them.
    """
    if not plan.overlaps or not any(map(_exchanges, plan.block.operations)):
        return plan
    exchanged, reduces = _Exchanged(plan), []
    for group in plan.reduce_groups:
        num_bytes = sum(value.num_bytes for value in group.values)
        _, after = exchanged.behind(group.at + 1, _work_to_send(num_bytes, group.axes))
        reduces.append(group if group.deferred else dataclasses.replace(group, after=after))
    ahead = [x for x in plan.gather_groups if x.prefetched]
    num_bytes = sum(gather.num_bytes for group in ahead for gather in group.gathers)
    start = max((x.issues[0] for x in ahead), default=0)
    place, tie = exchanged.behind(start, _work_to_send(num_bytes, plan.gather_axes))
    gathers = []
    for group in plan.gather_groups:
        if group.prefetched and tie is not None:
            issues = tuple(max(x, place) for x in group.issues)
            ties = zip(issues, group.ties, strict=True)
            ties = tuple(tie if issue == place else value for issue, value in ties)
            group = dataclasses.replace(group, issues=issues, ties=ties)
        gathers.append(group)
    return dataclasses.replace(plan, gather_groups=tuple(gathers), reduce_groups=tuple(reduces))


def _work_to_send(num_bytes: int, axes: Sequence[str]) -> int:
    """Return the multiplications that a device does while `num_bytes` cross each of `axes`."""
    return num_bytes * sum(_WORK_BETWEEN if axis == NODE else _WORK_INSIDE for axis in axes)


class _Exchanged:
    """The places in a loop's body at which an exchange of the loss has ended.

    Attributes:
        places: for each run of exchanges without matrix products between them, the range of its
            operations, and the result of the exchange in it that depends on most of the body's
            work.
    """

    def __init__(self, plan: BlockPlan):
        operations, others = plan.block.operations, {*plan.uses.views, *plan.gradients.reduces}
        self._work = np.cumsum([0, *(flops_of(x) / 2 for x in operations)])
        results: dict[int, Value] = {}  # of each exchange the largest
        runs: list[list[int]] = []
        for i, operation in enumerate(operations):
            made = [x for x in operation.outputs if x.is_array and x not in others]
            if not made or not _exchanges(operation):
                continue
            results[i] = max(made, key=lambda x: x.num_bytes)
            if runs and self._work[runs[-1][-1] + 1] == self._work[i]:
                runs[-1].append(i)
            else:
                runs.append([i])
        needed = work_needed(operations)
        self.places: list[tuple[range, Value]] = []
        for run in runs:
            last = max(run, key=lambda i: (needed[i], i))
            self.places.append((range(run[0], run[-1] + 1), results[last]))

    def behind(self, start: int, needed: int) -> tuple[int, Value | None]:
        """Find where to send messages that could be sent before operation `start`.

        Args:
            start: the operation.
            needed: the multiplications that a device does while the messages are sent.

        Returns:
            The operation before which to send the messages, and the value that they then wait for.
            These are `start` and None, unless the loss's exchanges wait less for the messages if
            they are sent at a later place.
        """
        firsts = [x.start for x, _ in self.places] + [len(self._work) - 1]

        def waiting(place: int) -> float:
            following = next(i for i in firsts if i >= place)
            return max(0.0, needed - (self._work[following] - self._work[place]))

        later = [(x.stop, tie) for x, tie in self.places if x.start >= start]
        return min([(start, None), *later], key=lambda x: waiting(x[0]))


def _exchanges(operation: Operation) -> bool:
    """Return whether an operation of the loss is a collective over the axis `node` or `local`."""
    return any(not {*AXES}.isdisjoint(axes) for _, axes in exchanges(operation))


class Room:
    """Free memory at each operation of a program: its estimated peak, minus what is held there.

    Activations are estimated (`LayerMemory`). Gradients that are reduced do not count, since they
    exist only briefly.

    Args:
        block: the program.
        memory: the estimate of what its layers hold while they run.
        live: the weights that are in use or on their way.
        gradients: the gradients of the program.
    """

    def __init__(self, block: Block, memory: LayerMemory, live: Live, gradients: BlockGradients):
        operations = block.operations
        on_shards = (x for i in gradients.on_shards for x in operations[i].outputs)
        held = memory.held_bytes(range(len(operations)), {*gradients.reduces, *on_shards})
        held = np.append(held, 0) + live.num_bytes
        self._left = held.max(initial=0) - held

    def take(self, group: Sequence[Gather], issue: int, stop: int) -> int:
        """Reserve memory for a group of weights that waits on the device until operation `stop`.

        Returns:
            The operation at which the wait begins: the earliest one, from `issue` on, after which
            there is enough memory up to `stop`.
        """
        num_bytes = sum(gather.num_bytes for gather in group)
        full = np.flatnonzero(self._left[issue:stop] < num_bytes)
        first = issue + int(full[-1]) + 1 if full.size else issue
        self._left[first:stop] -= num_bytes
        return first
