"""Gather weights and reduce gradients, bucket by bucket, one mesh axis at a time.

    encode_bucket  ->  gather_next_axis (once for each mesh axis)  ->  decode_bucket

A group of weights becomes one bucket where its weights can share a message, and several where
they cannot (`_collectives.encoded_shards`). Gradients go the other way (`GradientBuckets`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._collectives import (
    CommSpec,
    EncodedShards,
    GatherBucket,
    HalfBatchSum,
    ReduceBucket,
    ReduceSpec,
    Sum,
    accumulator_dtype,
    for_alike,
    labelled,
    node_slices,
    picked,
)
from .._mesh import in_host
from .._plan import BlockPlan, Gather, GatherGroup, ShardedParam, View
from .._program import Value, movable_ops
from .._sharding import DimSharding
from .mean_gradients import rounded_mean
from .token_parts import (
    decoded_parts,
    gather_hop_of_parts,
    joined_gradient,
    part_dim,
    reduce_next_axis_of_parts,
    start_gather_of_parts,
    start_reduction_of_parts,
)

GatherSources = dict[ShardedParam, EncodedShards]
Bind = Callable[[list[Any]], list[Any]]


def encode_bucket(
    group: GatherGroup,
    sources: GatherSources,
    comm: CommSpec,
    tie: Bind,
    pin: Bind,
    fetched: Mapping[ShardedParam, EncodedShards] | None = None,
) -> list[GatherBucket]:
    """Encode the shards of a group of weights into buckets.

    Args:
        group: the weights that are gathered together.
        sources: this device's shard or node slice of each weight. If a gather is to keep the node
            slice (hpZ), the slice is gathered here over `node` and replaces the shard in `sources`.
        comm: axes and codecs.
        tie: passes the shards through a barrier with a value, so that XLA does not gather before
            the value exists.
        pin: passes the encoded buckets through a barrier with that value, so that XLA encodes
            before the value is used.
        fetched: shards that have been copied from host memory already; other shards in host memory
            are copied now. If a node slice has been kept since then, it is used instead.

    Returns:
        The buckets, for `gather_next_axis`, and after the last axis for `decode_bucket`.
    """
    weights = list(dict.fromkeys(gather.weight for gather in group.gathers))
    given = dict(sources)
    given.update((x, shards) for x, shards in (fetched or {}).items() if in_host(given[x].data))
    data = tie([given[x].data for x in weights])
    tied = {
        x: dataclasses.replace(given[x], data=d).on_device(x.name, windowed=True)
        for x, d in zip(weights, data, strict=True)
    }
    with _labelled(group):
        kept = [i for i, gather in enumerate(group.gathers) if gather.keeps]
        if kept:
            layers = [group.gathers[i].weight for i in kept]
            with picked(kept):
                sizes = [math.prod(x.shape) for x in layers]
                slices = node_slices(
                    [tied[x] for x in layers],
                    sizes,
                    comm,
                    lambda buckets: with_barrier(buckets, pin),
                )
            tied.update(zip(layers, slices, strict=True))
            sources.update(zip(layers, slices, strict=True))
        shards = []
        for gather in group.gathers:
            shard = tied[gather.weight]
            assert shard.kept is None, f"{gather.weight.name} has no node slice yet"
            ops, rest = _split_ops(gather, shard, comm)
            shard = on_shard(shard, ops, gather.weight)[0] if ops else shard
            if comm.gathers_by_kernel:
                shard = dataclasses.replace(shard, read_as=_leading_cast(rest))
            shards.append(shard)
        buckets = for_alike(start_gather_of_parts, shards, _sizes(group), comm)
        # The messages of kept slices were pinned above; what is encoded here depends on them.
        return buckets if kept else with_barrier(buckets, pin)


def gather_next_axis(
    group: GatherGroup, buckets: Sequence[GatherBucket], comm: CommSpec, axis: str
) -> list[GatherBucket]:
    """All-gather the buckets whose next axis is `axis`; return the other buckets unchanged.

    Node slices are not gathered over `node`, and leaves of `Ungathered` not over `local`.
    """
    ready, others = [], []
    for bucket in buckets:
        axes = comm.axes_with_peers(bucket.parts[0].axes)
        (ready if axes[:1] == (axis,) else others).append(bucket)
    if not ready:
        return list(buckets)
    with _labelled(group):
        return [*for_alike(gather_hop_of_parts, ready, _sizes(group), comm), *others]


def with_barrier(buckets: Sequence[GatherBucket], bind: Bind) -> list[GatherBucket]:
    """Return buckets whose data have passed the barrier `bind`, and so wait for its value."""
    data = bind([x.data for x in buckets])
    return [dataclasses.replace(x, data=d) for x, d in zip(buckets, data, strict=True)]


def after_decode(
    group: GatherGroup, buckets: Sequence[GatherBucket], full: dict[Any, Any]
) -> list[GatherBucket]:
    """Make messages for a later iteration of a loop wait until this iteration's are decoded.

    A loop has one place for each array that it carries from one iteration to the next. If the next
    message could arrive while the last one is read, XLA would copy it. XLA reads small leaves, such
    as the gains of norms, from the message where they are used: until the end of a layer's backward
    pass. A leaf that is sent alone needs no such wait.

    Args:
        group: the weights that are sent together.
        buckets: their messages for a later iteration.
        full: the full weights of this iteration, by weight and operations. Weights that come in a
            message with others are replaced by outputs of the barrier.

    Returns:
        The buckets, with messages that wait.
    """
    joined = [x for x in buckets if len(x.parts) > 1]
    gathers = [group.gathers[i] for x in joined for i in x.positions]
    keys = [(x.weight, x.ops) for x in gathers if (x.weight, x.ops) in full]
    if not keys:
        return list(buckets)
    operands = [x.data for x in joined], [full[x] for x in keys]
    messages, weights = lax.optimization_barrier(operands)
    full.update(zip(keys, weights, strict=True))
    waiting = iter(messages)
    return [x if len(x.parts) == 1 else dataclasses.replace(x, data=next(waiting)) for x in buckets]


def tied(arrays: Any, value: Any) -> tuple[Any, Any]:
    """Return `arrays` and `value`, each available only once both are ([Note: ties]).

    XLA drops an operand of a barrier if nothing but the barrier reads it and nothing reads its
    output. That can happen to `value` when XLA rewrites its readers. An example: if each device has
    one row, the readers of a matrix product `[1, s, d]` are made to read `[s, d]`, and only the
    barrier is left to read the reshaped product. Two barriers are two readers, so both stay.
    """
    arrays, after = lax.optimization_barrier((arrays, value))
    return lax.optimization_barrier((arrays, value))[0], after


def number_after(number: jax.Array | int, x: jax.Array) -> jax.Array:
    """Return the integer `number`, but make XLA wait for the floats `x` before it knows the number.

    XLA drops barriers before it schedules, so this adds a zero that is computed from an element of
    `x`. The bits of the element's absolute value are no negative integer, also for NaN, so their
    minimum with 0 is 0, but XLA does not know this. The barrier, while it exists, keeps the sum
    apart from other uses of `number`, such as the indices of writes: fused with the sum into one
    kernel, they would wait for `x` too.
    """
    count, element = lax.optimization_barrier((jnp.asarray(number), x[(0,) * x.ndim]))
    element = jnp.abs(element.astype(jnp.float32))
    zero = jnp.minimum(lax.bitcast_convert_type(element, jnp.int32), 0)
    return count + zero.astype(count.dtype)


def decode_bucket(
    group: GatherGroup, buckets: Sequence[GatherBucket], sources: GatherSources, comm: CommSpec
) -> list[jax.Array]:
    """Decode gathered buckets into the full weights of `group`, one array for each gather.

    Operations of a weight that run after its gather (`movable_ops.before_gather`) are applied.
    `sources` are the shards that were gathered; they say which operations those are.
    """
    splits = [_split_ops(gather, sources[gather.weight], comm) for gather in group.gathers]
    layouts, dims = [], []
    for gather, (before, _) in zip(group.gathers, splits, strict=True):
        pushed = movable_ops.push(before, gather.weight.layout, gather.weight.shape)
        assert pushed is not None
        layouts.append(pushed[0])
        dims.append(part_dim(sources[gather.weight], pushed[1], pushed[0].dim))
    with _labelled(group):
        return for_alike(_decoded, list(buckets), layouts, dims, [after for _, after in splits])


def _decoded(
    buckets: Sequence[GatherBucket],
    layouts: Sequence[DimSharding],
    dims: Sequence[int | None],
    ops: Sequence[tuple[movable_ops.Op, ...]],
) -> list[jax.Array]:
    """Decode gathered buckets, remove the padding of each weight, and apply its operations.

    Args:
        buckets: the buckets, gathered over all axes.
        layouts: the layout of each weight.
        dims: for each weight, the dim that is split over the mesh axis `tokens`, or None.
        ops: for each weight, the operations to apply.
    """
    full_weights = []
    gathered = decoded_parts(buckets, [_leading_cast(x) for x in ops], layouts, dims)
    for x, after in zip(gathered, ops, strict=True):
        for op in after:
            x = op.apply(x)
        full_weights.append(x)
    return full_weights


def _labelled(group: GatherGroup) -> contextlib.AbstractContextManager[None]:
    return labelled("weights", *(gather.weight.name for gather in group.gathers))


def _leading_cast(ops: tuple[movable_ops.Op, ...]) -> Any:
    """Return the dtype of a cast that comes first in `ops`, to decode to; None without a cast."""
    return ops[0].dtype if ops and isinstance(ops[0], movable_ops.ConvertDtype) else None


def on_shard(
    shard: EncodedShards, ops: tuple[movable_ops.Op, ...], weight: ShardedParam
) -> tuple[EncodedShards, DimSharding]:
    """Apply `ops` to this device's shard of a weight; return the result and its layout."""
    pushed = movable_ops.push(ops, weight.layout, weight.shape)
    assert pushed is not None and shard.kept is None
    x = movable_ops.apply_on_shard(ops, shard.join(), weight.layout, weight.shape)
    plain = EncodedShards.plain(x, pushed[0].dim)
    is_exact = shard.pinned and shard.codec is None
    return dataclasses.replace(plain, axes=shard.axes, pinned=is_exact), pushed[0]


def _sizes(group: GatherGroup) -> list[int]:
    """Return, for each gather, the number of elements of the full array whose shards are sent."""
    slices = (movable_ops.up_to_last_slice(gather.ops)[0] for gather in group.gathers)
    pairs = zip(group.gathers, slices, strict=True)
    return [math.prod(View(gather.weight, ops).shape) for gather, ops in pairs]


def _split_ops(
    gather: Gather, shard: EncodedShards, comm: CommSpec
) -> tuple[tuple[movable_ops.Op, ...], tuple[movable_ops.Op, ...]]:
    """Split a gather's operations into those on the shard, before the gather, and those after it.

    If no codec quantizes the shard, all operations run before: a cast to 16 bits then halves the
    bytes. A quantized message is made from the stored values, and cast while it is decoded, so only
    slices run before the gather, which make the message smaller.
    """
    slices, rest = movable_ops.up_to_last_slice(gather.ops)
    size = math.prod(View(gather.weight, slices).shape)
    axes = () if shard.pinned else shard.axes
    codecs = [comm.weight_codec(axis, size, gather.weight.dtype) for axis in axes]
    if shard.codec is not None or any(codec and not codec.is_elementwise for codec in codecs):
        return slices, rest
    return gather.ops, ()


class GradientBuckets:
    """Encodes and reduces the gradients of a block, one bucket for each of `plan.reduce_groups`.

    In the methods, `number` (or `group`) is the index of a group in `plan.reduce_groups`.
    """

    def __init__(self, plan: BlockPlan, comm: CommSpec):
        self.plan = plan
        self.comm = comm

    def encode(self, number: int, gradients: Sequence[Any]) -> ReduceBucket:
        """Encode the gradients of a group as a bucket for the first axis."""
        with labelled("gradients", *(spec.name for spec in self.specs(number))):
            return for_alike(
                start_reduction_of_parts, list(gradients), self.specs(number), self.comm
            )

    def reduce_next(self, group: int, axis: int, bucket: ReduceBucket) -> ReduceBucket:
        """Reduce a group's bucket over its axis at index `axis` of `ReduceGroup.axes`."""
        specs = self.specs(group)
        # False in the body of a loop: there `Tick` divides the outputs.
        is_mean = self.plan.reduce_groups[group].values[0] in self.plan.means
        divisor = self.comm.divisor if is_mean else 1
        with labelled("gradients", *(spec.name for spec in specs)):
            return for_alike(reduce_next_axis_of_parts, bucket, specs, axis, self.comm, divisor)

    def finish(self, number: int, bucket: ReduceBucket) -> dict[Value, Any]:
        """Return this device's shard of each gradient of group `number`; nothing is reduced here.

        `bucket` is what `reduce_next` returned for the last of the group's axes. Means
        (`plan.means`) are cast to the dtype of their leaf; sums stay in the dtype of the addition.
        """
        gradients, specs = {}, self.specs(number)
        for i, value in enumerate(self.plan.reduce_groups[number].values):
            x, is_mean = joined_gradient(bucket.rest[i], specs[i]), value in self.plan.means
            gradients[value] = rounded_mean(x, self.plan.means[value].dtype) if is_mean else x
        return gradients

    def on_shards(self, index: int, arrays: Sequence[Any]) -> Any:
        """Run an operation on reduced shards, because the plan moved a reduction in front of it.

        Args:
            index: the index of the operation.
            arrays: reduced shards: of the operation's one input, or of the terms of a sum.
        """
        operation = self.plan.block.operations[index]
        op, source = operation.view(), operation.source
        if source is None:
            return functools.reduce(functools.partial(jax.tree.map, _add), arrays)
        (x,) = arrays
        if isinstance(op, movable_ops.ConvertDtype):
            # Sums stay in `accumulator_dtype`; the mean is cast at the end of the step.
            return x
        run, layout = movable_ops.apply_on_shard, self.plan.gradients.on_shards[index]
        assert op is not None and layout is not None
        return jax.tree.map(lambda x: run((op,), x, layout, source.shape), x)

    def zeros(self, value: Value, spec: ReduceSpec) -> Sum:
        """Return the reduced shard of a gradient known to be zero, for which nothing is sent."""
        shape = list(spec.layout.pad_shape(value.shape))
        for axis in spec.hops:
            if axis in self.comm.axes:
                shape[spec.layout.dim] //= self.comm.sizes[axis]
        zeros = jnp.zeros(shape, accumulator_dtype(value.dtype))
        is_halved = self.comm.halves and self.comm.halves_axis in spec.hops
        return HalfBatchSum(zeros, zeros) if is_halved else zeros

    def specs(self, number: int) -> list[ReduceSpec]:
        """Return how each gradient of a group is reduced."""
        return [self.plan.gradients.reduces[x] for x in self.plan.reduce_groups[number].values]


def _add(x: jax.Array, y: jax.Array) -> jax.Array:
    """Add in the wider of the two dtypes, since each term was reduced in a dtype of its own."""
    dtype = jnp.promote_types(x.dtype, y.dtype)
    return x.astype(dtype) + y.astype(dtype)
