"""Reduce the gradients of one run of a block, bucket by bucket, one mesh axis at a time."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .._collectives import (
    CommSpec,
    HalfBatchSum,
    ReduceBucket,
    ReduceSpec,
    Sum,
    accumulator_dtype,
    labelled,
    reduce_axes,
    reduce_next_axis,
    start_reduction,
)
from .._mesh import NODE
from .._plan import BlockPlan
from .._program import Value
from .gathers import Bind
from .mean_gradients import rounded_mean
from .ties import tied

Reduced = list[tuple[Value, Any]]  # gradients, each with this device's shard of its sum


class GradientBuckets:
    """The gradient buckets of one run of a block, from the first gradient to the last reduction.

    A group is one of `plan.reduce_groups`, and `number` is its index there.

    Attributes:
        in_flight: `(number of the group, number of axes done, bucket)` for each bucket that is not
            fully reduced yet, or was not when `take_reduced` was last called.
        deferred: in a loop, buckets that the next iteration reduces, by number of the group.
    """

    def __init__(self, plan: BlockPlan, comm: CommSpec):
        self.plan = plan
        self.comm = comm
        self.in_flight: list[tuple[int, int, ReduceBucket]] = []
        self.deferred: dict[int, ReduceBucket] = {}
        # Gradients of groups that are not complete yet.
        self._unsent: dict[int, dict[Value, Any]] = {}
        self._reduced: Reduced = []
        self._group_of = {x: i for i, group in enumerate(plan.reduce_groups) for x in group.values}

    def holds(self, value: Value) -> bool:
        """Whether the plan reduces `value` as soon as it is made."""
        return value in self._group_of

    def add(self, value: Value, x: Any) -> None:
        """Add a gradient to its group; a complete group is encoded as a bucket for the first axis.

        The bucket is then put in flight, deferred or, without overlap, reduced at once.
        """
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
        """Reduce every bucket in flight over its next axis, once the arrays `ties` exist."""
        in_flight, self.in_flight = self.in_flight, []
        for number, done, bucket in in_flight:
            if done < self.num_axes(number):
                if done and ties:  # over the first axis a bucket is sent as soon as it is encoded
                    bucket, _ = tied(bucket, ties)
                bucket = self.reduce_next(number, done, bucket)
                done += 1
            self.in_flight.append((number, done, bucket))

    def reduce_first_axis(self, bind: Bind) -> None:
        """Reduce every bucket in flight over its first axis, and pass it through a barrier.

        Args:
            bind: passes the buckets that are reduced over one axis through a barrier.
        """
        for i, (number, done, bucket) in enumerate(self.in_flight):
            if not done:
                self.in_flight[i] = number, 1, self.reduce_next(number, 0, bucket)
        first = [i for i, (_, done, _) in enumerate(self.in_flight) if done == 1]
        bound = bind([self.in_flight[i][-1] for i in first])
        for i, bucket in zip(first, bound, strict=True):
            self.in_flight[i] = *self.in_flight[i][:-1], bucket

    def reduce_rest_in_flight(self) -> None:
        """Reduce every bucket in flight over all remaining axes."""
        while any(done < self.num_axes(number) for number, done, _ in self.in_flight):
            self.reduce_in_flight()

    def num_axes(self, number: int, *, past_nodes: bool = True) -> int:
        """The number of mesh axes that a group is reduced over; or of those before `node`."""
        axes = reduce_axes(self.specs(number), self.comm)
        return len(axes) if past_nodes or NODE not in axes else axes.index(NODE)

    def reduce_next(self, number: int, done: int, bucket: ReduceBucket) -> ReduceBucket:
        """Reduce a group's bucket over one more axis, after `done` axes."""
        specs = self.specs(number)
        is_mean = self.plan.reduce_groups[number].values[0] in self.plan.means
        divisor = self.comm.divisor if is_mean else 1
        with labelled("gradients", *(spec.name for spec in specs)):
            return reduce_next_axis(bucket, specs, done, self.comm, divisor)

    def reduce_rest(self, number: int, done: int, bucket: ReduceBucket) -> ReduceBucket:
        """Reduce a group's bucket over all remaining axes, after `done` axes."""
        for i in range(done, self.num_axes(number)):
            bucket = self.reduce_next(number, i, bucket)
        return bucket

    def finish(self, number: int, bucket: ReduceBucket) -> None:
        """Record the gradients of a fully reduced bucket, for `take_reduced`."""
        for i, value in enumerate(self.plan.reduce_groups[number].values):
            x = bucket.rest[i]
            if value in self.plan.means:
                x = rounded_mean(x, self.plan.means[value].dtype)
            self._reduced.append((value, x))

    def take_reduced(self) -> Reduced:
        """Return the gradients whose reduction has finished since the last call."""
        in_flight, self.in_flight = self.in_flight, []
        for number, done, bucket in in_flight:
            if done == self.num_axes(number):
                self.finish(number, bucket)
            else:
                self.in_flight.append((number, done, bucket))
        reduced, self._reduced = self._reduced, []
        return reduced

    def zeros(self, value: Value, spec: ReduceSpec) -> Sum:
        """The reduced shard of a gradient that is zero, for which nothing is sent."""
        shape = list(spec.layout.pad_shape(value.shape))
        for axis in spec.hops:
            if axis in self.comm.axes:
                shape[spec.layout.dim] //= self.comm.sizes[axis]
        zeros = jnp.zeros(shape, accumulator_dtype(value.dtype))
        is_halved = self.comm.halves and self.comm.halves_axis in spec.hops
        return HalfBatchSum(zeros, zeros) if is_halved else zeros

    def specs(self, number: int) -> list[ReduceSpec]:
        """The reduction of each gradient of a group."""
        return [self.plan.gradients.reduces[x] for x in self.plan.reduce_groups[number].values]
