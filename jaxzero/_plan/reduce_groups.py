"""Decide which gradients of a block are reduced together, and which in the next iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from .._collectives import ReduceSpec
from .._program import Block, Value
from .._sharding import CommSchedule
from .block_plan import ReduceGroup
from .bucketing import split_into_groups
from .gradient_reductions import BlockGradients

ReduceAxes = Callable[[Sequence[ReduceSpec]], tuple[str, ...]]  # the axes of a bucket, in order


def find_reduce_groups(
    block: Block,
    gradients: BlockGradients,
    zeros: frozenset[Value],
    schedule: CommSchedule,
    axes: ReduceAxes,
    in_loop: bool,
) -> list[ReduceGroup]:
    """Cut the reduced gradients of a block into groups, in the order in which they are made."""
    makers = {value: i for i, op in enumerate(block.operations) for value in op.outputs}
    reduced = sorted(
        (value for value in gradients.reduces if value not in zeros),
        key=lambda value: makers.get(value, -1),
    )

    def signature(value: Value) -> tuple:
        reduce_spec = gradients.reduces[value]
        return value.shape, value.dtype, reduce_spec.layout.dim, reduce_spec.hops

    is_layer = in_loop and not gradients.sums
    groups = split_into_groups(
        reduced, signature, lambda x: x.num_bytes, schedule.bucket_bytes, is_layer
    )
    found = [
        ReduceGroup(
            tuple(values),
            makers.get(values[-1], -1),
            axes=axes([gradients.reduces[x] for x in values]),
        )
        for values in groups
    ]
    return _last_deferred(block, gradients, found) if in_loop and schedule.prefetch else found


def _last_deferred(
    block: Block, gradients: BlockGradients, reduces: list[ReduceGroup]
) -> list[ReduceGroup]:
    """Defer the last group of gradients in a loop's body to the next iteration.

    Nothing is deferred if an operation combines gradients of that group with others, since these
    would be reduced in different iterations.
    """
    if not reduces:
        return reduces
    deferred = set(reduces[-1].values)
    for index in sorted(gradients.on_shards):
        operation = block.operations[index]
        inputs = {x for x in operation.inputs if isinstance(x, Value)}
        if deferred & inputs:
            if not inputs <= deferred:
                return reduces
            deferred.update(operation.outputs)
    return [*reduces[:-1], dataclasses.replace(reduces[-1], deferred=True)]
