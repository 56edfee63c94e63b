"""Gather the weights of one run of a block, bucket by bucket, one mesh axis at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from .._collectives import CommSpec, EncodedShards, GatherBucket
from .._mesh import in_host
from .._plan import BlockPlan, Gather, GatherGroup, ShardedParam
from .._program import Value, movable_ops
from .gathers import GatherSources, decode_bucket, encode_bucket, gather_next_axis, with_barrier

Tie = Callable[[Value | None, list[Any]], list[Any]]  # pass arrays through a barrier with a value
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
        self._full: dict[tuple, tuple[Gather, Any]] = {}
        # What happens before an operation: copies from host memory of groups, gathers of (group,
        # axis), and decoding of groups.
        self._fetches: dict[int, list[int]] = {}
        self._sends: dict[int, list[tuple[int, int]]] = {}
        self._needs: dict[int, list[int]] = {}
        for number, group in enumerate(plan.gather_groups):
            self._needs.setdefault(group.at, []).append(number)
            if group.fetch is not None:
                self._fetches.setdefault(group.fetch, []).append(number)
            for axis, issue in enumerate(group.issues):
                self._sends.setdefault(issue, []).append((number, axis))

    def fetch(self, index: int, tie: Tie) -> None:
        """Start the copies from host memory that the plan puts before operation `index`."""
        for number in self._fetches.get(index, ()):
            group = self.plan.gather_groups[number]
            sources = {x: self.sources[x] for x in self.plan.fetched(number)}
            shards = {x: shard for x, shard in sources.items() if in_host(shard.data)}
            data = tie(group.fetch_tie, [x.data for x in shards.values()])
            self._fetched[number] = {
                weight: dataclasses.replace(x, data=d).on_device(weight.name, windowed=True)
                for (weight, x), d in zip(shards.items(), data, strict=True)
            }

    def send(self, index: int, tie: Tie, pin: Tie) -> None:
        """Start the gathers that the plan puts before operation `index`.

        Args:
            index: the operation, as an index into those of the block.
            tie: passes shards through a barrier with a value, as in `encode_bucket`.
            pin: passes encoded buckets through a barrier with that value.
        """
        for number, axis in self._sends.get(index, ()):
            group = self.plan.gather_groups[number]
            sent = self.next_in_flight if group.prefetched else self.in_flight
            if group.prefetched and not axis and not self._starts_gathers:
                # The same barriers: see [Note: same bits] in `pipelined_loop`.
                buckets = with_barrier(
                    self.in_flight[number][0], functools.partial(tie, group.ties[0])
                )
                buckets = with_barrier(buckets, functools.partial(pin, group.ties[0]))
            else:
                buckets = self._send_axis(number, group, axis, tie, pin)
            sent.setdefault(number, []).append(buckets)

    def _send_axis(
        self, number: int, group: GatherGroup, axis: int, tie: Tie, pin: Tie
    ) -> list[GatherBucket]:
        """Gather a group over one axis; in a pipelined loop, each axis for another layer."""
        pinned = functools.partial(pin, group.ties[axis])
        if axis:
            buckets = with_barrier(self.in_flight[number][axis - 1], pinned)
        else:
            sources = self.next_sources if group.prefetched else self.sources
            tied = functools.partial(tie, group.ties[axis])
            fetched = self._fetched.pop(number, {})
            buckets = encode_bucket(group, sources, self.comm, tied, pinned, fetched)
        return gather_next_axis(group, buckets, self.comm, self.plan.num_hops - axis)

    def receive(self, index: int) -> None:
        """Decode the full weights that operation `index` is the first to need."""
        for number in self._needs.get(index, ()):
            group = self.plan.gather_groups[number]
            arrays = decode_bucket(group, self.in_flight[number][-1], self.sources, self.comm)
            for gather, x in zip(group.gathers, arrays, strict=True):
                self._full[gather.weight, gather.ops] = gather, x

    def drop(self, index: int) -> None:
        """Drop full weights that operation `index` was the last to need.

        A full weight that was gathered again by then, for a later use, stays.
        """
        dead = [key for key, (gather, _) in self._full.items() if gather.until == index]
        for key in dead:
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
        return self._full[weight, before][1], after
