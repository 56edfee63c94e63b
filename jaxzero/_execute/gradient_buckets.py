"""Reduce the gradients of a block, bucket by bucket, one mesh axis at a time."""

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
from .._plan import BlockPlan
from .._program import Value
from .mean_gradients import rounded_mean


class GradientBuckets:
    """The gradient buckets of a block.

    A group is one of `plan.reduce_groups`, and `number` is its index there.
    """

    def __init__(self, plan: BlockPlan, comm: CommSpec):
        self.plan = plan
        self.comm = comm

    def encode(self, number: int, gradients: Sequence[Any]) -> ReduceBucket:
        """Encode the gradients of a group as a bucket for the first axis."""
        with labelled("gradients", *(spec.name for spec in self.specs(number))):
            return start_reduction(gradients, self.specs(number), self.comm)

    def reduce_next(self, number: int, done: int, bucket: ReduceBucket) -> ReduceBucket:
        """Reduce a group's bucket over one more axis, after `done` axes."""
        specs = self.specs(number)
        is_mean = self.plan.reduce_groups[number].values[0] in self.plan.means
        divisor = self.comm.divisor if is_mean else 1
        with labelled("gradients", *(spec.name for spec in specs)):
            return reduce_next_axis(bucket, specs, done, self.comm, divisor)

    def finish(self, number: int, bucket: ReduceBucket) -> dict[Value, Any]:
        """Take the gradients, this device's shards, out of a fully reduced bucket."""
        gradients = {}
        for i, value in enumerate(self.plan.reduce_groups[number].values):
            x, is_mean = bucket.rest[i], value in self.plan.means
            gradients[value] = rounded_mean(x, self.plan.means[value].dtype) if is_mean else x
        return gradients

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
