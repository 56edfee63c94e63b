"""Decide how long a gathered weight is held, and where it is gathered again.

By default all uses in the forward region share one gather, and so do all uses in backward; the
body of a loop is one region. With `max_reuse_distance`, `max_live_parameters` or `live_bytes` a
weight is held between two of its uses wherever these limits allow it, the shortest intervals first,
because they occupy memory for the least time (DeepSpeed's `stage3_max_reuse_distance` and
`stage3_max_live_parameters`; selective unsharding).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._program import movable_ops
from .._sharding import CommSchedule
from .param_uses import BlockUses, ShardedParam, View


@dataclasses.dataclass(frozen=True)
class Gather:
    """A gather of a weight, and the range of operations during which the full weight is held."""

    weight: ShardedParam
    ops: tuple[movable_ops.Op, ...]  # operations that can run on the shard, before the gather
    region: str  # "forward", "backward" or "loop"
    at: int  # the operation that first needs the full weight
    until: int  # the operation after which it is dropped
    keeps: bool = False  # whether the node slice is kept for later gathers (hpZ)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The gathered array's full shape."""
        return View(self.weight, self.ops).shape

    @functools.cached_property
    def dtype(self) -> Any:
        """The gathered array's dtype."""
        return View(self.weight, self.ops).dtype

    @functools.cached_property
    def size(self) -> int:
        """Elements of the gathered array."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the gathered array."""
        return self.size * self.dtype.itemsize


class Live:
    """The elements and bytes of full weights that exist at each operation of a block."""

    def __init__(self, num_operations: int, schedule: CommSchedule):
        self.elements = np.zeros(num_operations + 1, np.int64)
        self.num_bytes = np.zeros(num_operations + 1, np.int64)
        self.schedule = schedule

    def add(self, gather: Gather, start: int, stop: int) -> None:
        """Count the weight of `gather` as live for the operations `start` to `stop - 1`."""
        self.elements[start:stop] += gather.size
        self.num_bytes[start:stop] += gather.num_bytes

    def has_room(self, gathers: Sequence[Gather], start: int, stop: int) -> bool:
        """Return whether the limits also allow `gathers` at operations `start` to `stop - 1`."""
        elements, num_bytes = sum(x.size for x in gathers), sum(x.num_bytes for x in gathers)
        most, budget = self.schedule.max_live_parameters, self.schedule.live_bytes
        if start >= stop:
            return True
        elements += int(self.elements[start:stop].max())
        num_bytes += int(self.num_bytes[start:stop].max())
        return (most is None or elements <= most) and (budget is None or num_bytes <= budget)


def find_gathers(
    num_operations: int,
    uses: BlockUses,
    boundary: int | None,
    schedule: CommSchedule,
    holding: CommSchedule,
) -> tuple[list[Gather], Live]:
    """Find the gathers of a block: one for each interval during which a weight is held.

    Args:
        num_operations: number of operations of the block.
        uses: the uses of weights in the block.
        boundary: the last operation of forward; None if the block is the body of a loop.
        schedule: the limits on live weights.
        holding: the limits on weights that are held from one use to another, which may be lower.

    Returns:
        The gathers in the order of their first uses; and the weights that are live at each
        operation, before any is prefetched.
    """

    def region(index: int) -> str:
        return "loop" if boundary is None else "forward" if index <= boundary else "backward"

    by_weight: dict[tuple, list[Gather]] = {}
    for use in uses.uses:
        weight = use.view.weight
        ops, _ = movable_ops.before_gather(use.view.ops, weight.layout, weight.shape)
        gather = Gather(weight, ops, region(use.index), use.index, use.index)
        gathers = by_weight.setdefault((weight, ops), [])
        if not gathers or gathers[-1].at != use.index:  # one operation may read several views
            gathers.append(gather)
    live = Live(num_operations, holding)
    if not holding.is_bounded:
        gathers = [_merged(run) for uses_of in by_weight.values() for run in _by_region(uses_of)]
        for gather in gathers:
            live.add(gather, gather.at, gather.until + 1)
    else:
        gathers = _held_within_limits(list(by_weight.values()), live)
    # Weights on their way are bounded by `schedule`; `holding` is for those that wait for a use.
    live.schedule = schedule
    return sorted(gathers, key=lambda gather: gather.at), live


def find_passes(gathers: Sequence[Gather]) -> dict[Gather, int]:
    """Count, for each gather in the body of a loop, the earlier gathers of the same array.

    The body is one region, so only this count tells gathers of forward from those of backward.
    """
    seen: Counter[tuple] = Counter()
    passes = {}
    for gather in (x for x in gathers if x.region == "loop"):
        passes[gather] = seen[gather.weight, gather.ops]
        seen[gather.weight, gather.ops] += 1
    return passes


def _by_region(gathers: list[Gather]) -> Iterator[list[Gather]]:
    return (list(run) for _, run in itertools.groupby(gathers, lambda x: x.region))


def _merged(gathers: Sequence[Gather]) -> Gather:
    """Merge gathers of a weight into one, which holds the weight from its first use to its last."""
    first, last = gathers[0], gathers[-1]
    return first if first is last else dataclasses.replace(first, until=last.until)


def _held_within_limits(found: list[list[Gather]], live: Live) -> list[Gather]:
    """Hold weights between uses, the shortest intervals first, while the limits allow it.

    Args:
        found: for each weight, a gather for each of its uses, in program order.
        live: counts the weights that are held; it is updated.

    Returns:
        The gathers that are left: one for each interval during which a weight is held.
    """
    # The reuse distance of DeepSpeed: how many elements of weights are used between two uses.
    used = np.zeros(len(live.elements) + 1, np.int64)  # elements used before each operation
    for uses in found:
        for use in uses:
            live.add(use, use.at, use.at + 1)
            used[use.at + 1] += use.size
    used = used.cumsum()
    intervals = []
    for number, uses in enumerate(found):
        for i, (use, following) in enumerate(itertools.pairwise(uses)):
            distance = int(used[following.at] - used[use.at + 1])
            intervals.append((distance, number, i))
    held: set[tuple[int, int]] = set()
    longest = live.schedule.max_reuse_distance
    for distance, number, i in sorted(intervals):
        use, following = found[number][i : i + 2]
        if longest is not None and distance > longest:
            break
        if live.has_room([use], use.at + 1, following.at):
            live.add(use, use.at + 1, following.at)
            held.add((number, i))
    gathers = []
    for number, uses in enumerate(found):
        run = [uses[0]]
        for i, following in enumerate(uses[1:]):
            if (number, i) not in held:
                gathers.append(_merged(run))
                run = []
            run.append(following)
        gathers.append(_merged(run))
    return gathers
