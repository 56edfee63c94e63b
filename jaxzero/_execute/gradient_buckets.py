"""Reduce the gradients of one run of a block, bucket by bucket, one mesh axis at a time."""

from __future__ import annotations

from typing import Any

from jax import lax

from .._collectives import (
    CommSpec,
    ReduceBucket,
    ReduceSpec,
    labelled,
    reduce_axes,
    reduce_next_axis,
    start_reduction,
)
from .._plan import BlockPlan
from .._program import Value

Reduced = list[tuple[Value, Any]]  # gradients, each with this device's shard of its sum


class GradientBuckets:
    """The buckets of one run of a block, before and between the axes they are reduced over.

    Attributes:
        in_flight: (number of the group, axes done, bucket) of what is still to be reduced.
        deferred: in a loop, the buckets that the next iteration sends, by number of the group.
    """

    def __init__(self, plan: BlockPlan, comm: CommSpec):
        self.plan = plan
        self.comm = comm
        self.in_flight: list[tuple[int, int, ReduceBucket]] = []
        self.deferred: dict[int, ReduceBucket] = {}
        self._unsent: dict[int, dict[Value, Any]] = {}  # of groups that are not complete
        self._reduced: Reduced = []
        self._group_of = {x: i for i, group in enumerate(plan.reduce_groups) for x in group.values}

    def holds(self, value: Value) -> bool:
        """Whether a value is a gradient that is reduced as soon as it is made."""
        return value in self._group_of

    def add(self, value: Value, x: Any) -> None:
        """Take a gradient; with the last one of its group, encode the bucket for the first axis."""
        number = self._group_of[value]
        group, unsent = self.plan.reduce_groups[number], self._unsent.setdefault(number, {})
        unsent[value] = x
        if len(unsent) < len(group.values):
            return
        values = self._unsent.pop(number)
        with labelled("gradients", *(spec.name for spec in self.specs(number))):
            gradients = [values[x] for x in group.values]
            bucket = start_reduction(gradients, self.specs(number), self.comm)
        if group.deferred:
            self.deferred[number] = bucket
        elif self.plan.overlaps:
            self.in_flight.append((number, 0, bucket))
        else:
            self.finish(number, self.reduce_rest(number, 0, bucket))

    def reduce_in_flight(self, ties: tuple[Any, ...] = ()) -> None:
        """Reduce every bucket in flight over its next axis, but not before `ties` exist."""
        in_flight, self.in_flight = self.in_flight, []
        for number, done, bucket in in_flight:
            if done and ties:  # the first axis is sent as soon as the bucket is encoded
                bucket, _ = lax.optimization_barrier((bucket, ties))
            bucket = self.reduce_next(number, done, bucket)
            if done + 1 == self.num_axes(number):
                self.finish(number, bucket)
            else:
                self.in_flight.append((number, done + 1, bucket))

    def num_axes(self, number: int) -> int:
        """How many mesh axes a group is reduced over."""
        return len(reduce_axes(self.specs(number), self.comm))

    def reduce_next(self, number: int, done: int, bucket: ReduceBucket) -> ReduceBucket:
        """Reduce a group's bucket over one more axis; `done` says how many came before."""
        specs = self.specs(number)
        with labelled("gradients", *(spec.name for spec in specs)):
            return reduce_next_axis(bucket, specs, done, self.comm)

    def reduce_rest(self, number: int, done: int, bucket: ReduceBucket) -> ReduceBucket:
        """Reduce a group's bucket over all axes that are left."""
        for i in range(done, self.num_axes(number)):
            bucket = self.reduce_next(number, i, bucket)
        return bucket

    def finish(self, number: int, bucket: ReduceBucket) -> None:
        """Note the gradients of a bucket that is reduced over all axes."""
        values = self.plan.reduce_groups[number].values
        self._reduced += [(value, bucket.rest[i]) for i, value in enumerate(values)]

    def take_reduced(self) -> Reduced:
        """The gradients that were reduced since the last call."""
        reduced, self._reduced = self._reduced, []
        return reduced

    def specs(self, number: int) -> list[ReduceSpec]:
        """How each gradient of a group is reduced."""
        return [self.plan.gradients.reduces[x] for x in self.plan.reduce_groups[number].values]
