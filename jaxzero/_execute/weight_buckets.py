"""Gather the weights of one run of a block, bucket by bucket, one mesh axis at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from .._collectives import CommSpec, EncodedShards, GatherBucket
from .._plan import BlockPlan, Gather, GatherGroup, ShardedParam
from .._program import Value, movable_ops
from .gathers import Held, decode_bucket, encode_bucket, gather_next_axis, with_barrier

Tie = Callable[[Value | None, list[Any]], list[Any]]  # arrays, with a barrier on a value
InFlight = dict[int, list[list[GatherBucket]]]  # by number of the group, after each axis


class WeightBuckets:
    """The weights of one run of a block: shards, buckets in flight, and full weights.

    Attributes:
        held: the shard of each weight; a node's slice replaces it once that is kept (hpZ).
        next_held: in a loop, the same of the layer whose first axis is gathered now.
        in_flight: the buckets of each group, after each axis. In a pipelined loop, after the
            first axes they are those of layers that come next, after the last of this layer.
        next_in_flight: the same for the next iteration.
    """

    def __init__(
        self,
        plan: BlockPlan,
        comm: CommSpec,
        held: Mapping[ShardedParam, EncodedShards],
        in_flight: InFlight | None = None,
        next_held: Mapping[ShardedParam, EncodedShards] | None = None,
    ):
        self.plan = plan
        self.comm = comm
        self.held: Held = dict(held)
        self.next_held: Held = dict(next_held or {})
        self.in_flight: InFlight = dict(in_flight or {})
        self.next_in_flight: InFlight = {}
        self._full: dict[tuple, tuple[Gather, Any]] = {}
        self._sends: dict[int, list[tuple[int, int]]] = {}  # (group, axis) by operation
        self._needs: dict[int, list[int]] = {}
        for number, group in enumerate(plan.gather_groups):
            self._needs.setdefault(group.at, []).append(number)
            for axis, issue in enumerate(group.issues):
                self._sends.setdefault(issue, []).append((number, axis))

    def send(self, index: int, tie: Tie, pin: Tie) -> None:
        """Gather over an axis what is due before operation `index`.

        Args:
            index: of the operation.
            tie: binds shards to a value, so that they are not gathered before it exists.
            pin: binds messages to it, so that they are not encoded after it is used.
        """
        for number, axis in self._sends.get(index, ()):
            group = self.plan.gather_groups[number]
            sent = self.next_in_flight if group.prefetched else self.in_flight
            buckets = self._send_axis(number, group, axis, tie, pin)
            sent.setdefault(number, []).append(buckets)

    def _send_axis(
        self, number: int, group: GatherGroup, axis: int, tie: Tie, pin: Tie
    ) -> list[GatherBucket]:
        """Gather a group over one axis; in a loop each axis is that of another layer."""
        pinned = functools.partial(pin, group.ties[axis])
        if axis:
            buckets = with_barrier(self.in_flight[number][axis - 1], pinned)
        else:
            held = self.next_held if group.prefetched else self.held
            tied = functools.partial(tie, group.ties[axis])
            buckets = encode_bucket(group, held, self.comm, tied, pinned)
        return gather_next_axis(group, buckets, self.comm, self.plan.num_hops - axis)

    def receive(self, index: int) -> None:
        """Decode the full weights that operation `index` is the first to need."""
        for number in self._needs.get(index, ()):
            group = self.plan.gather_groups[number]
            arrays = decode_bucket(group, self.in_flight[number][-1], self.held, self.comm)
            for one, x in zip(group.gathers, arrays, strict=True):
                self._full[one.weight, one.ops] = one, x

    def drop(self, index: int) -> None:
        """Drop full weights that operation `index` was the last to need.

        A later group may have gathered the same weight again by then: that one stays.
        """
        over = [key for key, (one, _) in self._full.items() if one.until == index]
        for key in over:
            del self._full[key]

    def full(self, weight: ShardedParam, ops: tuple[movable_ops.Op, ...]) -> Any:
        """The full weight, with `ops` done to it."""
        before, after = movable_ops.before_gather(ops, weight.layout, weight.shape)
        _, x = self._full[weight, before]
        for op in after:
            x = op.apply(x)
        return x
