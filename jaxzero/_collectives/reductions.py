"""Reduce-scatter gradients in buckets, one mesh axis at a time, with a codec for each axis.

The axes run in the reverse order of a gather: `local` first, then `node`, so that only the smallest
array, a sum over the node, crosses between nodes. With a codec, each axis is one round of qgZ
(ZeRO++, https://arxiv.org/abs/2306.10209): encode the shards of all receivers, exchange them
all-to-all, decode and sum in float32. Gradients without a codec are reduce-scattered in
`accumulator_dtype`. A bucket whose gradients have one cast is reduced as one gradient
([Note: a bucket as one gradient]).

Legend: `full` is a full gradient on one device; `rows` are its shards for all receivers, flattened
to one row each.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._codecs import (
    Codec,
    can_join,
    column_bytes,
    columns_in_place,
    join_columns,
    rows_of,
    split_columns,
)
from .._sharding import pad
from .comm_spec import CommSpec, ReduceSpec, accumulator_dtype, as_one, reduce_axes
from .kernel_hop import scatter
from .ledger import picked
from .partial_sums import (
    HalfBatchSum,
    PartialSums,
    Sum,
    decoded_together,
    sum_of,
    summed_by_kernel,
    total_of,
)
from .primitives import all_to_all, reduce_scatter
from .reduce_hop import encoded, reduce_to_shard, rounding_seed, sum_over
from .tree_sums import scatter_in_tree

_FEW = 2**18  # elements; most matrices have more


@dataclasses.dataclass(frozen=True)
class ReduceBucket:
    """A bucket of gradients, encoded for the next axis of their reduction, or fully reduced.

    Attributes:
        coded: the messages of the gradients with a codec, each `[receivers, bytes]` of one or
            several gradients (`_messages_of`), or tiled (`MessageForm`). For one kernel, which
            encodes them itself, a gradient, or rows `[receivers, m]` of several.
        summed: for each dtype, the gradients without a codec; several of one dtype are joined
            as `[receivers, m]`.
        rest: gradients that the next axis does not scatter, by index in the bucket; after the last
            axis all gradients, reduced.
    """

    coded: Any  # a list of arrays, or of their shapes
    summed: dict[str, Any]
    rest: dict[int, Any]


jax.tree_util.register_dataclass(ReduceBucket, ["coded", "summed", "rest"], [])


def start_reduction(
    fulls: Sequence[Shaped[Array, ...]], specs: Sequence[ReduceSpec], comm: CommSpec
) -> ReduceBucket:
    """Pad full gradients, and encode them into a bucket for the first axis."""
    axes = reduce_axes(specs, comm)
    if comm.sums_in_tree:
        # XLA could fuse a product with these sums and add it unrounded. What it fuses depends on
        # the mesh, and so would the bits of the result.
        fulls = lax.optimization_barrier(list(fulls))
    if not comm.form.tiled:
        fulls = _behind_barrier(fulls)
    arrays = [pad(x, spec.layout) for x, spec in zip(fulls, specs, strict=True)]
    if (one := as_one(specs, comm)) is not None:
        pairs = zip(arrays, specs, strict=True)
        rows = [rows_of(x.astype(s.dtype), s.layout.dim, one.layout.size) for x, s in pairs]
        arrays, specs = [join_columns(rows)], [one]
    return _encode_bucket(arrays, specs, axes[0], 1, comm)


def reduce_next_axis(
    bucket: ReduceBucket,
    specs: Sequence[ReduceSpec],
    number: int,
    comm: CommSpec,
    divisor: int | float = 1,
) -> ReduceBucket:
    """Reduce a bucket over the axis at index `number` of `reduce_axes`; encode it for the next.

    Args:
        bucket: the bucket that `start_reduction`, or the reduction over the axis before, returned.
        specs: how each gradient in the bucket is reduced.
        number: the index of the axis.
        comm: codecs and sizes of the axes.
        divisor: the number by which sums are divided after the last axis.

    Returns:
        The bucket for the next axis. After the last axis, `rest` holds this device's shard of each
        sum in `accumulator_dtype`; with half-batch sums, as a `HalfBatchSum`.
    """
    axes = reduce_axes(specs, comm)
    num_summed = math.prod(comm.sizes[axis] for axis in axes[:number])
    one = as_one(specs, comm)
    if one is None:
        sent, arrays = specs, _reduce_over(bucket, specs, axes[number], num_summed, comm)
    else:
        sent, arrays = [one], [_reduce_one(bucket, one, specs, axes[number], num_summed, comm)]
    if number + 1 < len(axes):
        num_summed *= comm.sizes[axes[number]]
        return _encode_bucket(arrays, sent, axes[number + 1], num_summed, comm)
    half = comm.first_half_size(axes[number])

    def finished(x: Any, spec: ReduceSpec) -> Any:
        x = x.astype(accumulator_dtype(spec.dtype))
        return x if divisor == 1 else x / jnp.asarray(divisor, x.dtype)

    done = [
        jax.tree.map(functools.partial(finished, spec=spec), sum_of(x, half))
        for x, spec in zip(arrays, sent, strict=True)
    ]
    if one is not None:
        done = _cut(done[0], [spec.shard_shape(axes[number], comm) for spec in specs])
    return ReduceBucket([], {}, dict(enumerate(done)))


def reduce_gradient(full: Shaped[Array, ...], spec: ReduceSpec, comm: CommSpec) -> Sum:
    """Reduce-scatter one gradient over all its axes; return this device's shard of the sum."""
    specs = [dataclasses.replace(spec, shape=tuple(full.shape), dtype=full.dtype)]
    bucket = start_reduction([full], specs, comm)
    for number in range(len(reduce_axes(specs, comm))):
        bucket = reduce_next_axis(bucket, specs, number, comm)
    return bucket.rest[0]


def _behind_barrier(fulls: Sequence[Shaped[Array, ...]]) -> list[Array]:
    """Return the same gradients, of which small ones have passed a barrier as flat arrays.

    Most of the small ones are sums over rows (gradients of scales and biases). XLA:GPU derives the
    layout of a message's inputs from that of the message, and for such a sum chooses rows as the
    minor dim. This layout spread to the activations of whole models, and their transposed layouts
    made each norm a sum over the major dim, in two kernels (Llama-70B, JAX 0.12.0). It does not
    spread past a flat array.
    """
    few = [i for i, x in enumerate(fulls) if x.size < _FEW]
    flat = lax.optimization_barrier([fulls[i].reshape(-1) for i in few]) if few else []
    behind = {i: x.reshape(fulls[i].shape) for i, x in zip(few, flat, strict=True)}
    return [behind.get(i, x) for i, x in enumerate(fulls)]


def _reduce_one(
    bucket: ReduceBucket,
    one: ReduceSpec,
    specs: Sequence[ReduceSpec],
    axis: str,
    num_summed: int,
    comm: CommSpec,
) -> PartialSums:
    """Exchange over `axis` a bucket whose gradients `specs` are sent as one gradient, `one`."""
    codec = one.codec(axis, comm)
    assert codec is not None
    shares = column_bytes([spec.message_column(axis, comm) for spec in specs])
    received = all_to_all(bucket.coded[0], axis, shares=shares, forms=(codec,))
    return PartialSums(received, codec, one.shard_shape(axis, comm), num_summed)


def _cut(x: Sum, shapes: Sequence[tuple[int, ...]]) -> list[Sum]:
    """Cut `x`, the shard of a bucket that was reduced as one gradient, into shards of `shapes`."""
    parts, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        cut = functools.partial(lax.slice_in_dim, start_index=start, limit_index=end)
        parts.append(jax.tree.map(lambda x, cut=cut, s=shape: cut(x.reshape(-1)).reshape(s), x))
        start = end
    return parts


def _split_by_codec(
    specs: Sequence[ReduceSpec], axis: str, comm: CommSpec
) -> tuple[list[int], dict[str, list[int]]]:
    """Return the indices of gradients that `axis` scatters: `coded` with, `summed` without codec.

    `summed` groups indices by message: a message for each dtype, or for a single gradient.
    """
    coded: list[int] = []
    summed: dict[str, list[int]] = {}
    for i, spec in enumerate(specs):
        if not spec.scatters(axis, comm):
            continue
        if spec.codec(axis, comm) is not None:
            coded.append(i)
        else:
            dtype = spec.dtype_at(axis, comm)
            joins = comm.form.joins(math.prod(spec.shape) * jnp.dtype(dtype).itemsize)
            joins = joins and spec.is_joined(axis, comm)
            name = str(dtype) if can_join(dtype) and joins else f"{dtype} {i}"
            summed.setdefault(name, []).append(i)
    return coded, summed


def _messages_of(
    coded: Sequence[int], specs: Sequence[ReduceSpec], axis: str, comm: CommSpec
) -> list[list[int]]:
    """Group the indices `coded` of gradients with a codec by the message that they are sent in."""
    if comm.form.tiled:
        return [[i] for i in coded]
    by_kernel = [i for i in coded if specs[i].exchange(axis, comm) is not None]
    rest = [i for i in coded if i not in by_kernel]
    joined = [i for i in rest if specs[i].is_joined(axis, comm)]
    alone = [[i] for i in rest if i not in joined]
    shared: dict[Any, list[int]] = {}
    for i in by_kernel:
        dtype = jnp.dtype(specs[i].dtype_at(axis, comm))
        shares = comm.form.shares_kernel(math.prod(specs[i].shape) * dtype.itemsize)
        shared.setdefault(dtype if shares else i, []).append(i)
    return [*([joined] if joined else []), *alone, *shared.values()]


def _encode_bucket(
    arrays: Sequence[Array | PartialSums],
    specs: Sequence[ReduceSpec],
    axis: str,
    num_summed: int,
    comm: CommSpec,
) -> ReduceBucket:
    """Encode sums over `num_summed` devices into a bucket for the reduction over `axis`.

    Gradients that are sent in 16 bits or fewer are exchanged all-to-all and summed once in
    float32, because a reduce-scatter in that dtype would round after each of its steps. Messages
    are means over the `num_summed` devices, because a sum could overflow where a mean does not.
    """
    coded, summed = _split_by_codec(specs, axis, comm)
    messages = [
        _message(arrays, numbers, specs, axis, num_summed, comm)
        for numbers in _messages_of(coded, specs, axis, comm)
    ]
    sums = {i: total_of(x) for i, x in enumerate(arrays) if i not in coded}
    plain = {}
    for name, numbers in summed.items():
        if len(numbers) == 1:  # reduce-scattered along its own dim, without a copy to rows
            plain[name] = sums[numbers[0]]
        else:
            rows = [rows_of(sums[i], specs[i].layout.dim, comm.sizes[axis]) for i in numbers]
            plain[name] = join_columns(rows)
    rest = {i: sums[i] for i, s in enumerate(specs) if not s.scatters(axis, comm)}
    # Without the barrier XLA may move casts of the decoding before the exchange, and send floats.
    return ReduceBucket(lax.optimization_barrier(messages), plain, rest)


def _message(
    arrays: Sequence[Array | PartialSums],
    coded: Sequence[int],
    specs: Sequence[ReduceSpec],
    axis: str,
    num_summed: int,
    comm: CommSpec,
) -> Array:
    """Encode the gradients at indices `coded` as the one message that is sent over `axis`.

    If one kernel does the hop, they are only joined: the kernel encodes them.

    Neighbours with the same joinable codec are encoded as one array. The message is the same bit
    for bit, in fewer operations (see `decoded_together`).
    """
    num, messages = comm.sizes[axis], []
    if coded and specs[coded[0]].exchange(axis, comm) is not None:
        pairs = [(total_of(arrays[i]), specs[i].layout.dim) for i in coded]
        return join_columns([rows_of(*x, num) for x in pairs]) if len(pairs) > 1 else pairs[0][0]
    seed = rounding_seed(axis) if coded else None  # one for all; it takes several operations

    def kind(i: int) -> Any:
        array, codec = arrays[i], specs[i].codec(axis, comm)
        assert codec is not None
        is_sum = not isinstance(array, PartialSums) or array.decoded is not None
        joinable = codec.is_joinable and is_sum and not comm.form.tiled
        return codec, total_of(array).dtype if joinable else i

    for (codec, _), run in itertools.groupby(coded, kind):
        numbers = list(run)
        array, dim = arrays[numbers[0]], specs[numbers[0]].layout.dim
        if len(numbers) > 1:
            pairs = [(total_of(arrays[i]), specs[i].layout.dim) for i in numbers]
            array, dim = join_columns([rows_of(*pair, num) for pair in pairs]), 0
        messages.append(encoded(array, dim, num, codec, num_summed, comm.form, seed))
    return messages[0] if comm.form.tiled else join_columns(messages)


def _reduce_over(
    bucket: ReduceBucket, specs: Sequence[ReduceSpec], axis: str, num_summed: int, comm: CommSpec
) -> list[Any]:
    """Reduce a bucket over one axis.

    Returns:
        For each gradient, this device's shard of the sum: `PartialSums` if messages were exchanged;
        a `HalfBatchSum` if half-batch sums are requested on this axis; otherwise an array.
    """
    coded, summed = _split_by_codec(specs, axis, comm)
    arrays: dict[int, Any] = dict(bucket.rest)
    messages = _messages_of(coded, specs, axis, comm)
    for numbers, message in zip(messages, bucket.coded, strict=True):
        if (codec := specs[numbers[0]].exchange(axis, comm)) is not None:
            with picked(numbers):
                arrays.update(_by_kernel(message, numbers, specs, axis, codec, comm))
            continue
        columns = [specs[i].message_column(axis, comm) for i in numbers]
        forms = [specs[i].codec(axis, comm) for i in numbers]
        shares = () if comm.form.tiled else column_bytes(columns)
        with picked(numbers):
            received = all_to_all(message, axis, shares=shares, forms=forms)
        parts = [received] if comm.form.tiled else columns_in_place(received, columns)
        partial = []
        for i, part in zip(numbers, parts, strict=True):
            codec, shape = specs[i].codec(axis, comm), specs[i].shard_shape(axis, comm)
            assert codec is not None
            partial.append(PartialSums(part, codec, shape, num_summed, tiled=comm.form.tiled))
        arrays.update(zip(numbers, decoded_together(partial), strict=True))
    for name, numbers in summed.items():
        with picked(numbers):
            arrays.update(_scatter(bucket.summed[name], numbers, specs, axis, comm))
    for i in bucket.rest:
        if axis in specs[i].hops:
            size = math.prod(specs[i].shape)
            arrays[i], _ = sum_over(arrays[i], axis, size, comm, num_summed)
    return [arrays[i] for i in range(len(specs))]


def _by_kernel(
    x: Array,
    numbers: Sequence[int],
    specs: Sequence[ReduceSpec],
    axis: str,
    codec: Codec,
    comm: CommSpec,
) -> dict[int, PartialSums]:
    """Reduce-scatter the gradients at indices `numbers` by one kernel, which encodes with `codec`.

    With one gradient, `x` is that gradient; with several, rows `[receivers, m]` of all.

    Returns:
        This device's shard of each sum, by index.
    """
    seed = rounding_seed(axis)
    if len(numbers) == 1:
        total = scatter(x, specs[numbers[0]].layout.dim, axis, codec, seed)
        return {numbers[0]: summed_by_kernel(total, codec)}
    shapes = [specs[i].shard_shape(axis, comm) for i in numbers]
    sizes = [math.prod(shape) for shape in shapes]
    totals = split_columns(
        scatter(x, 0, axis, codec, seed, sizes), [(n, jnp.float32) for n in sizes]
    )
    return {
        i: summed_by_kernel(total.reshape(shape), codec)
        for i, total, shape in zip(numbers, totals, shapes, strict=True)
    }


def _scatter(
    x: Array, numbers: Sequence[int], specs: Sequence[ReduceSpec], axis: str, comm: CommSpec
) -> dict[int, Sum]:
    """Reduce-scatter the gradients at indices `numbers` without a codec.

    With one gradient, `x` is that gradient; with several, rows `[receivers, m]` of all.

    Returns:
        This device's shard of each sum, by index.
    """
    if len(numbers) == 1:
        i = numbers[0]
        return {i: reduce_to_shard(x, axis, specs[i].layout.dim, comm)}
    shapes = [specs[i].shard_shape(axis, comm) for i in numbers]
    columns = [(math.prod(shape), x.dtype) for shape in shapes]
    parts: Sequence[Sum]
    if half := comm.first_half_size(axis):
        received = split_columns(all_to_all(x, axis, shares=column_bytes(columns)), columns)
        parts = [HalfBatchSum.of(part, half) for part in received]
    elif comm.sums_in_tree:
        shard = scatter_in_tree(x, axis, 0, comm.sizes[axis], column_bytes(columns))
        parts = split_columns(shard, [(size, shard.dtype) for size, _ in columns])
    else:
        parts = split_columns(reduce_scatter(x, axis, 0, column_bytes(columns)), columns)
    return {
        i: jax.tree.map(lambda x, shape=shape: x.reshape(shape), part)
        for i, part, shape in zip(numbers, parts, shapes, strict=True)
    }
