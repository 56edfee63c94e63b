"""How long a gathered weight is held: from which use to which, and where it is gathered again.

By default the uses in forward share a gather, and so do those in backward; the body of a
loop is one region. With `max_reuse_distance`, `max_live_parameters` or `live_bytes` a weight
is held between two uses of it wherever that is allowed, the shortest waits first: what is
cheapest to keep is kept, as far as memory goes (DeepSpeed's `stage3_max_reuse_distance` and
`stage3_max_live_parameters`; selective unsharding).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._program import movable_ops
from .._sharding import CommSchedule
from .param_uses import BlockUses, ShardedParam, View


@dataclasses.dataclass(frozen=True)
class Gather:
    """One gather: of `weight`, after `ops` on its shard, held for the operations at..until."""

    weight: ShardedParam
    ops: tuple[movable_ops.Op, ...]
    region: str
    at: int
    until: int
    keeps: bool = False  # the node's slice of it, for later gathers (hpZ)

    @property
    def shape(self) -> tuple[int, ...]:
        """The gathered array's full shape."""
        return View(self.weight, self.ops).shape

    @property
    def dtype(self) -> Any:
        """The gathered array's type."""
        return View(self.weight, self.ops).dtype

    @property
    def size(self) -> int:
        """Elements of the gathered array."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the gathered array."""
        return self.size * self.dtype.itemsize


class Live:
    """How much of the weights exists whole, before each operation of a block."""

    def __init__(self, num_operations: int, schedule: CommSchedule):
        self.elements = np.zeros(num_operations + 1, np.int64)
        self.num_bytes = np.zeros(num_operations + 1, np.int64)
        self.schedule = schedule

    def add(self, gather: Gather, start: int, stop: int) -> None:
        """Count it for the operations `start` to `stop - 1`."""
        self.elements[start:stop] += gather.size
        self.num_bytes[start:stop] += gather.num_bytes

    def has_room(self, gathers: Sequence[Gather], start: int, stop: int) -> bool:
        """Whether these may be held there too."""
        elements, num_bytes = sum(x.size for x in gathers), sum(x.num_bytes for x in gathers)
        most, budget = self.schedule.max_live_parameters, self.schedule.live_bytes
        if start >= stop:
            return True
        elements += int(self.elements[start:stop].max())
        num_bytes += int(self.num_bytes[start:stop].max())
        return (most is None or elements <= most) and (budget is None or num_bytes <= budget)


def find_gathers(
    num_operations: int, uses: BlockUses, boundary: int | None, schedule: CommSchedule
) -> tuple[list[Gather], Live]:
    """One gather for each stretch that a weight is held.

    Args:
        num_operations: of the block.
        uses: of weights in it.
        boundary: the operation that ends forward; None: the body of a loop.
        schedule: what may be held.

    Returns:
        The gathers in the order of their first uses, and what is live then.
    """

    def region(index: int) -> str:
        return "loop" if boundary is None else "forward" if index <= boundary else "backward"

    found: dict[tuple, list[Gather]] = {}
    for use in uses.uses:
        weight = use.view.weight
        ops, _ = movable_ops.before_gather(use.view.ops, weight.layout, weight.shape)
        one = Gather(weight, ops, region(use.index), use.index, use.index)
        some = found.setdefault((weight, ops), [])
        if not some or some[-1].at != use.index:  # an operation may read several views of it
            some.append(one)
    live = Live(num_operations, schedule)
    if not schedule.is_bounded:
        gathers = [_joined(list(some)) for each in found.values() for some in _by_region(each)]
        for gather in gathers:
            live.add(gather, gather.at, gather.until + 1)
    else:
        gathers = _held_as_allowed(list(found.values()), live)
    return sorted(gathers, key=lambda gather: gather.at), live


def _by_region(gathers: list[Gather]):
    return (list(some) for _, some in itertools.groupby(gathers, lambda x: x.region))


def _joined(gathers: Sequence[Gather]) -> Gather:
    return dataclasses.replace(gathers[0], until=gathers[-1].until)


def _held_as_allowed(found: list[list[Gather]], live: Live) -> list[Gather]:
    """Hold weights between uses, the shortest waits first, while there is room."""
    used = np.zeros(len(live.elements) + 1, np.int64)  # elements used before each operation
    for each in found:
        for one in each:
            live.add(one, one.at, one.at + 1)
            used[one.at + 1] += one.size
    used = used.cumsum()
    waits = []
    for number, each in enumerate(found):
        for i, (one, other) in enumerate(itertools.pairwise(each)):
            distance = int(used[other.at] - used[one.at + 1])
            waits.append((distance, number, i))
    held: set[tuple[int, int]] = set()
    longest = live.schedule.max_reuse_distance
    for distance, number, i in sorted(waits):
        one, other = found[number][i : i + 2]
        if longest is not None and distance > longest:
            break
        if live.has_room([one], one.at + 1, other.at):
            live.add(one, one.at + 1, other.at)
            held.add((number, i))
    gathers = []
    for number, each in enumerate(found):
        stretch = [each[0]]
        for i, other in enumerate(each[1:]):
            if (number, i) not in held:
                gathers.append(_joined(stretch))
                stretch = []
            stretch.append(other)
        gathers.append(_joined(stretch))
    return gathers
