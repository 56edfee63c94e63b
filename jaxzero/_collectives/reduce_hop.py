"""Sum over one mesh axis, by reduce-scatter or all-reduce, with or without a codec.

With a codec (ZeRO++, qgZ, https://arxiv.org/abs/2306.10209): encode the shards of all receivers,
exchange them all-to-all, then decode and sum in float32. Without one: call `psum_scatter`, or
`psum`.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Shaped

from .._codecs import (
    Codec,
    DeferredMessage,
    join_columns,
    joined_rows,
    rows_of,
    split_columns,
    written,
)
from .._mesh import AXES, LOCAL, NODE, REDUCTION_HOPS, device_index
from .._sharding import DimSharding, GradientHop, pad, unpad
from .comm_spec import CommSpec, MessageForm, accumulator_dtype
from .encoded_shards import EncodedShards
from .kernel_hop import scatter
from .partial_sums import (
    HalfBatchSum,
    PartialSums,
    Sum,
    as_pair,
    sum_of,
    summed_by_kernel,
    total_of,
)
from .primitives import all_gather, all_reduce, all_to_all, reduce_scatter
from .tree_sums import reduce_in_tree, scatter_in_tree


def reduce_over_node(
    x: Shaped[Array, ...],
    layout: DimSharding,
    size: int,
    dtype: DTypeLike,
    comm: CommSpec,
    error: Shaped[Array, ...] | None = None,
) -> tuple[Shaped[Array, ...], HalfBatchSum | None, Shaped[Array, ...] | None]:
    """Finish the reduction of a gradient that is reduced over `local` already: sum over `node`.

    Args:
        x: this device's node slice of the gradient, as the mean over its node.
        layout: split dim and padding of the full array.
        size: elements of the full array (of one layer, if it is a stack), compared with
            `min_quantized_size`.
        dtype: dtype of the gradient.
        comm: axes and codecs.
        error: the residual of the previous step, in the scale of `x`, which is added before
            encoding (error feedback); None without error feedback.

    Returns:
        This device's shard of the sum over nodes (the full slice, if `node` does not split the
        array); if requested, that shard as a `HalfBatchSum`, otherwise None; and the new residual.
    """
    codec = comm.gradient_codec(NODE, size, dtype)
    if NODE not in comm.axes:
        return *sum_over(x, NODE, size, comm, 1), error
    if comm.sizes[NODE] == 1:
        return x, None, error
    if codec is None:
        return *as_pair(reduce_to_shard(x, NODE, layout.dim, comm)), error
    half = comm.first_half_size(NODE)
    if error is None:
        partial = _coded_hop(x, NODE, layout.dim, codec, comm)
        return *as_pair(sum_of(partial, half)), None
    hop = comm.gradients.node
    assert isinstance(hop, GradientHop)
    rows = rows_of(hop.corrected(x, error.astype(x.dtype)), layout.dim, comm.sizes[NODE])
    with jax.named_scope("encode"):
        message = codec.encode_rows(rows, seed=rounding_seed(NODE))
        residual = hop.residual(rows, codec.decode_rows(message, rows.shape[1], x.dtype))
    # After a step that overflowed, NaN in the residual would spoil every later step too.
    residual = jnp.where(jnp.isfinite(residual), residual, 0)
    shape = shard_shape(x.shape, layout.dim, comm.sizes[NODE])
    shard = sum_of(PartialSums(_exchange(message, NODE, codec), codec, shape), half)
    return *as_pair(shard), joined_rows(residual, shape, layout.dim).astype(error.dtype)


def reduce_to_shard(x: Shaped[Array, ...], axis: str, dim: int, comm: CommSpec) -> Sum:
    """Reduce-scatter `x` along `dim` over one mesh axis, without a codec.

    If `comm` requests the half-batch sum on this axis, the shards are sent by an all-to-all and
    added here, so that the sum over the first half of the devices is returned too.
    """
    half, num = comm.first_half_size(axis), comm.sizes[axis]
    if comm.sums_in_tree:
        return scatter_in_tree(x, axis, dim, num)
    if not half:
        return reduce_scatter(x, axis, dim)
    received = all_to_all(rows_of(x, dim, num), axis)
    return HalfBatchSum.of(received.reshape(num, *shard_shape(x.shape, dim, num)), half)


def _coded_hop(
    x: Shaped[Array, ...],
    axis: str,
    dim: int,
    codec: Codec,
    comm: CommSpec,
    num_summed: int = 1,
) -> PartialSums:
    """Encode `x`, exchange its shards over one axis, and return the messages that are received.

    This is a reduce-scatter whose sum is still to be taken (`PartialSums`). `x` is already the sum
    over `num_summed` devices.
    """
    num = comm.sizes[axis]
    seed = rounding_seed(axis)
    if codec.exchange_format is not None:
        assert num_summed == 1  # `local` is the first axis
        return summed_by_kernel(scatter(x, dim, axis, codec, seed), codec)
    message = written(encoded(x, dim, num, codec, num_summed, comm.form, seed))
    shape = shard_shape(x.shape, dim, num)
    return PartialSums(_exchange(message, axis, codec), codec, shape, num_summed, comm.form.tiled)


def encoded(
    x: Array | PartialSums,
    dim: int,
    num: int,
    codec: Codec,
    num_summed: int,
    form: MessageForm,
    seed: Array | None,
) -> Shaped[Array, "num ..."] | DeferredMessage:
    """Encode a sum for the next axis: cut it along `dim` into one message for each receiver.

    The messages hold the mean, `x / num_summed`, because the sum could overflow the codec's range.

    Args:
        x: the sum over `num_summed` devices.
        dim: the dim that is cut.
        num: the number of receivers.
        codec: the codec of the messages.
        num_summed: the number of devices that are summed already.
        form: the form of messages on this platform.
        seed: a `rounding_seed`.
    """
    if isinstance(x, PartialSums) and x.message is None:  # rounded as `recode` does
        total, dtype = x.total(), jnp.float32
        assert x.num_summed == 1
        write = functools.partial(codec.encode_mean, total, dim, num, divisor=num_summed, seed=seed)
    elif isinstance(x, PartialSums) and x.num_summed == 1 and x.decoded is None:
        args = (x.message, x.codec, x.shape, dim, num)
        recode = codec.recode_tiled if form.tiled else codec.recode
        dtype, write = jnp.float32, functools.partial(recode, *args, divisor=num_summed, seed=seed)
    else:
        x = total_of(x)
        mean = x if num_summed == 1 else x / jnp.asarray(num_summed, x.dtype)
        encode = codec.encode_tiled if form.tiled else codec.encode_pieces
        dtype, write = mean.dtype, functools.partial(encode, mean, dim, num, seed=seed)
    write = jax.named_scope("encode")(write)
    if form.tiled or not codec.writes_in_place:
        return write()
    size = codec.message(math.prod(x.shape) // num, dtype).shape
    return DeferredMessage((num, *size), write)


def rounding_seed(axis: str) -> Array:
    """Return this device's seed of stochastic rounding for a sum over `axis`, equal in all steps.

    Random numbers are hashes of the seed and of what is rounded, so they differ between steps.
    """
    return device_index(_seed_axes(axis))


def _seed_axes(axis: str) -> tuple[str, ...]:
    """Return the mesh axes whose device index goes into the rounding seed of a sum over `axis`.

    In a sum over `node`, all devices of a node may hold the same array, the sum over their node.
    They must encode it alike so that their results stay equal, so seeds differ by node only.
    """
    return AXES if axis == LOCAL else (axis,)


def shard_shape(shape: tuple[int, ...], dim: int, num: int) -> tuple[int, ...]:
    """Return the shape of each of `num` shards along `dim`."""
    return (*shape[:dim], shape[dim] // num, *shape[dim + 1 :])


def _exchange(
    message: Shaped[Array, "num ..."], axis: str, codec: Codec
) -> Shaped[Array, "num ..."]:
    """Send row i of `message` to device i of `axis`; return the received rows.

    The barrier keeps XLA from moving casts of the decoding before the send.
    """
    return all_to_all(lax.optimization_barrier(message), axis, forms=(codec,))


def sum_over(
    x: Shaped[Array, ...], axis: str, size: int, comm: CommSpec, num_summed: int
) -> tuple[Shaped[Array, ...], HalfBatchSum | None]:
    """All-reduce over one axis; with a codec, as a reduce-scatter and an all-gather.

    `x` is already the sum over `num_summed` devices.

    Returns:
        The sum; and, if half-batch sums are requested on this axis, a shard of the flattened sum as
        a `HalfBatchSum`, otherwise None.
    """
    num, half = comm.sizes[axis], comm.first_half_size(axis)
    if num == 1:
        return x, None
    codec, x = comm.gradient_codec(axis, size, x.dtype), x.astype(accumulator_dtype(x.dtype))
    # A `Cast` that is there for narrow floats alone is no reason for two collectives.
    if codec is None or getattr(comm.gradients, axis) is None:
        (full,), (half_sum,) = _sum_plain([x], axis, comm)
        return full, half_sum
    layout = DimSharding(0, x.size, num)
    padded = pad(x.reshape(-1), layout)
    partial = _coded_hop(padded, axis, 0, codec, comm, num_summed)
    shard, half_sum = as_pair(sum_of(partial, half))
    # The mean is encoded, as in `encoded`: the sum could overflow the codec's range.
    scale = jnp.asarray(num_summed * num, x.dtype)
    mean = EncodedShards.plain(shard.astype(x.dtype) / scale, 0)
    mean = mean.encode(codec, _seed_axes(axis), tiled=comm.form.tiled).gather(axis)
    return unpad(mean.join() * scale, layout).reshape(x.shape), half_sum


def sum_full(
    arrays: list[Array], sizes: list[int], comm: CommSpec
) -> tuple[list[Array], list[HalfBatchSum | None]]:
    """All-reduce unsharded gradients over all devices; without codecs, in one collective per axis.

    Args:
        arrays: this device's gradients.
        sizes: for each gradient, the number of its elements (of one layer, if it is a stack),
            compared with `min_quantized_size`.
        comm: axes and codecs.

    Returns:
        The sums; and for each of them, if half-batch sums are requested, a shard of the flattened
        sum as a `HalfBatchSum`, otherwise None.
    """
    halves: list[HalfBatchSum | None] = [None] * len(arrays)
    arrays = [x.astype(accumulator_dtype(x.dtype)) for x in arrays]
    num_summed = 1
    for axis in comm.axes_with_peers(REDUCTION_HOPS) if arrays else ():
        if getattr(comm.gradients, axis) is not None:
            pairs = zip(arrays, sizes, strict=True)
            sums = [sum_over(x, axis, size, comm, num_summed) for x, size in pairs]
            arrays, halves = [x for x, _ in sums], [half_sum for _, half_sum in sums]
        else:
            arrays, halves = _sum_plain(arrays, axis, comm)
        num_summed *= comm.sizes[axis]
    return arrays, halves


def _sum_plain(
    arrays: list[Array], axis: str, comm: CommSpec
) -> tuple[list[Array], list[HalfBatchSum | None]]:
    """All-reduce arrays over one axis without a codec, in one collective.

    With half-batch sums the all-reduce is an all-to-all, a sum and an all-gather, because the sum
    over the first half needs the shards of each peer.

    Returns:
        The sums; and for each of them, if half-batch sums are requested, a shard of the flattened
        sum as a `HalfBatchSum`, otherwise None.
    """
    half, num = comm.first_half_size(axis), comm.sizes[axis]
    if comm.sums_in_tree:
        return reduce_in_tree(arrays, axis, num), [None] * len(arrays)
    if not half:
        return list(all_reduce(arrays, axis)), [None] * len(arrays)
    full: dict[int, Array] = {}
    halves: dict[int, HalfBatchSum | None] = {}
    layouts = [DimSharding(0, x.size, num) for x in arrays]
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        chosen = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        rows = [rows_of(pad(arrays[i].reshape(-1), layouts[i]), 0, num) for i in chosen]
        columns = [(x.shape[1], dtype) for x in rows]
        received = split_columns(all_to_all(join_columns(rows), axis), columns)
        sums = [HalfBatchSum.of(x, half) for x in received]
        gathered = all_gather(join_columns([x.total[None] for x in sums]), axis, 0)
        for i, half_sum, x in zip(chosen, sums, split_columns(gathered, columns), strict=True):
            halves[i] = half_sum
            full[i] = unpad(x.reshape(-1), layouts[i]).reshape(arrays[i].shape)
    return [full[i] for i in range(len(arrays))], [halves[i] for i in range(len(arrays))]
