"""Gather the weights of one run of a block, bucket by bucket, one mesh axis at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from .._collectives import CommSpec, EncodedShards, GatherBucket
from .._mesh import in_host
from .._plan import BlockPlan, ShardedParam
from .._program import movable_ops
from .gathers import (
    Bind,
    GatherSources,
    decode_bucket,
    encode_bucket,
    gather_next_axis,
    with_barrier,
)

InFlight = dict[int, list[list[GatherBucket]]]  # [group][axis]: buckets gathered over that axis


class WeightBuckets:
    """The weights of one run of a block: shards, buckets in flight, and full weights.

    A group is one of `plan.gather_groups`, and `number` is its index there.

    Attributes:
        sources: the gather source of each weight: its shard, or its node slice once the program
            keeps one (hpZ).
        next_sources: in a pipelined loop, the shards of the layer whose gather starts in this
            iteration.
        in_flight: for each group, its buckets after each axis. In a pipelined loop a prefetched
            group has this layer's buckets after the last axis, and a later layer's after each
            axis before.
        next_in_flight: `in_flight` for the next iteration.

    Args:
        starts_gathers: in a pipelined loop, whether this iteration gathers a later layer over the
            first axis. If not, `next_in_flight` has the buckets of `in_flight` there.
    """

    def __init__(
        self,
        plan: BlockPlan,
        comm: CommSpec,
        sources: Mapping[ShardedParam, EncodedShards],
        in_flight: InFlight | None = None,
        next_sources: Mapping[ShardedParam, EncodedShards] | None = None,
        starts_gathers: bool = True,
    ):
        self.plan = plan
        self.comm = comm
        self.sources: GatherSources = dict(sources)
        self.next_sources: GatherSources = dict(next_sources or {})
        self.in_flight: InFlight = dict(in_flight or {})
        self.next_in_flight: InFlight = {}
        self._starts_gathers = starts_gathers
        self._fetched: dict[int, GatherSources] = {}  # by group, shards copied from host memory
        self._full: dict[tuple[ShardedParam, tuple[movable_ops.Op, ...]], Any] = {}
        self._encoded: list[GatherBucket] = []  # of the group that is sent next

    def fetch(self, number: int, tie: Bind) -> None:
        """Copy the shards of a group from host memory to the device."""
        sources = {x: self.sources[x] for x in self.plan.fetched(number)}
        shards = {x: shard for x, shard in sources.items() if in_host(shard.data)}
        data = tie([x.data for x in shards.values()])
        self._fetched[number] = {
            weight: dataclasses.replace(x, data=d).on_device(weight.name, windowed=True)
            for (weight, x), d in zip(shards.items(), data, strict=True)
        }

    def encode(self, number: int, tie: Bind, pin: Bind) -> None:
        """Encode the shards of a group for its first axis.

        Args:
            number: of the group.
            tie: passes the shards through a barrier, as in `encode_bucket`.
            pin: likewise the encoded buckets.
        """
        group = self.plan.gather_groups[number]
        if group.prefetched and not self._starts_gathers:
            # The same barriers: see [Note: same bits] in `pipelined_loop`.
            self._encoded = with_barrier(with_barrier(self.in_flight[number][0], tie), pin)
            return
        sources = self.next_sources if group.prefetched else self.sources
        fetched = self._fetched.pop(number, {})
        self._encoded = encode_bucket(group, sources, self.comm, tie, pin, fetched)

    def send(self, number: int, axis: int, pin: Bind) -> None:
        """Gather a group over one axis; in a pipelined loop, each axis for another layer."""
        group = self.plan.gather_groups[number]
        sent = self.next_in_flight if group.prefetched else self.in_flight
        buckets = with_barrier(self.in_flight[number][axis - 1], pin) if axis else self._encoded
        if axis or not group.prefetched or self._starts_gathers:
            buckets = gather_next_axis(group, buckets, self.comm, self.plan.num_hops - axis)
        sent.setdefault(number, []).append(buckets)

    def decode(self, number: int) -> None:
        """Decode the full weights of a group."""
        group = self.plan.gather_groups[number]
        arrays = decode_bucket(group, self.in_flight[number][-1], self.sources, self.comm)
        for gather, x in zip(group.gathers, arrays, strict=True):
            self._full[gather.weight, gather.ops] = x

    def drop(self, weights: Iterable[tuple[ShardedParam, tuple[movable_ops.Op, ...]]]) -> None:
        """Drop full weights, each named by the weight and the operations of its gather."""
        for key in weights:
            del self._full[key]

    def full(self, weight: ShardedParam, ops: tuple[movable_ops.Op, ...]) -> Any:
        """The full weight, with the operations `ops` applied."""
        x, after = self.gathered(weight, ops)
        for op in after:
            x = op.apply(x)
        return x

    def gathered(
        self, weight: ShardedParam, ops: tuple[movable_ops.Op, ...]
    ) -> tuple[Any, tuple[movable_ops.Op, ...]]:
        """The full weight as it was gathered, and those of `ops` that were not applied before."""
        before, after = movable_ops.before_gather(ops, weight.layout, weight.shape)
        return self._full[weight, before], after
