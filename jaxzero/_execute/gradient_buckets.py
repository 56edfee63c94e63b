"""Reduce the gradients of one run of a block, bucket by bucket, one mesh axis at a time."""

from __future__ import annotations

from collections.abc import Sequence
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
    reduce_next_axis,
    start_reduction,
)
from .._mesh import NODE
from .._plan import BlockPlan
from .._program import Value
from .mean_gradients import rounded_mean


class GradientBuckets:
    """The gradient buckets of one run of a block.

    A group is one of `plan.reduce_groups`, and `number` is its index there.

    Attributes:
        buckets: those that have been encoded and are not finished, by number of the group.
        reduced: finished gradients that have not taken their place yet: this device's shards.
    """

    def __init__(self, plan: BlockPlan, comm: CommSpec):
        self.plan = plan
        self.comm = comm
        self.buckets: dict[int, ReduceBucket] = {}
        self.reduced: dict[Value, Any] = {}

    @property
    def deferred(self) -> dict[int, ReduceBucket]:
        """In a loop, the buckets that the next iteration reduces, by number of the group."""
        groups = self.plan.reduce_groups
        return {number: x for number, x in self.buckets.items() if groups[number].deferred}

    def encode(self, number: int, gradients: Sequence[Any]) -> None:
        """Encode the gradients of a group as a bucket for the first axis."""
        with labelled("gradients", *(spec.name for spec in self.specs(number))):
            self.buckets[number] = start_reduction(gradients, self.specs(number), self.comm)

    def num_axes(self, number: int, *, past_nodes: bool = True) -> int:
        """The number of mesh axes that a group is reduced over; or of those before `node`."""
        axes = self.plan.reduce_groups[number].axes
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
        """Take the gradients out of a fully reduced bucket."""
        for i, value in enumerate(self.plan.reduce_groups[number].values):
            x = bucket.rest[i]
            if value in self.plan.means:
                x = rounded_mean(x, self.plan.means[value].dtype)
            self.reduced[value] = x

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
