"""Sum one array, or several that stay whole, over one axis: a hop of a reduction.

With a codec: encode the pieces, exchange them all-to-all, decode and sum in float32. Where
sums are wanted in halves as well (`CommSpec.half`), what has no codec is exchanged and summed
likewise, which moves as many bytes as a reduce-scatter or an all-reduce.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Shaped

from .._codecs import Codec, DeferredMessage, written
from .._mesh import AXES, LOCAL, NODE, REDUCTION_HOPS, device_index
from .._sharding import DimSharding, GradientHop, pad, unpad
from .comm_spec import CommSpec, accumulator_dtype
from .encoded_shards import EncodedShards
from .packing import join, split
from .partial_sums import HalfBatchSum, PartialSums, Sum, as_pair, sum_of, total_of
from .primitives import all_gather, all_reduce, all_to_all, reduce_scatter


def reduce_over_node(
    x: Shaped[Array, ...],
    layout: DimSharding,
    size: int,
    dtype: DTypeLike,
    comm: CommSpec,
    error: Shaped[Array, ...] | None = None,
) -> tuple[Shaped[Array, ...], HalfBatchSum | None, Shaped[Array, ...] | None]:
    """The second half of a reduction, where the first was only over `local`.

    Args:
        x: the node's slice of the sum, divided by what makes it a mean.
        layout: how the full array is cut.
        size: of the full array, or of one layer of it, for `min_quantized_size`.
        dtype: that the gradient had.
        comm: how it travels.
        error: what rounding lost in the step before, in the units of `x`; None: not kept.

    Returns:
        This device's shard of the sum over nodes; a piece of it in halves, if wanted; and
        what rounding lost now.
    """
    codec = comm.gradient_codec(NODE, size, dtype)
    if NODE not in comm.axes:
        return *sum_over(x, NODE, size, comm, 1), error
    if comm.sizes[NODE] == 1:
        return x, None, error
    if codec is None:
        return *as_pair(reduce_to_piece(x, NODE, layout.dim, comm)), error
    half = comm.half(NODE)
    if error is None:
        piece = _coded_hop(x, NODE, layout.dim, dtype, codec, comm)
        return *as_pair(sum_of(piece, half)), None
    hop = comm.gradients.node
    assert isinstance(hop, GradientHop)
    rows = rows_of(hop.corrected(x, error.astype(x.dtype)), layout.dim, comm.sizes[NODE])
    with jax.named_scope("encode"):
        message = codec.encode_rows(rows, seed=device_index(_told_apart(NODE)))
        lost = hop.residual(rows, codec.decode_rows(message, rows.shape[1], x.dtype))
    lost = jnp.where(jnp.isfinite(lost), lost, 0)  # a step that overflowed must not be the last
    shape = piece_shape(x.shape, layout.dim, comm.sizes[NODE])
    piece = sum_of(PartialSums(_exchange(message, NODE), codec, shape), half)
    return *as_pair(piece), _from_rows(lost, x, layout.dim).astype(error.dtype)


def reduce_to_piece(x: Shaped[Array, ...], axis: str, dim: int, comm: CommSpec) -> Sum:
    """Sum over one axis, without a codec; a device keeps its piece of `dim`."""
    half, num = comm.half(axis), comm.sizes[axis]
    if not half:
        return reduce_scatter(x, axis, dim)
    arrived = all_to_all(rows_of(x, dim, num), axis)
    return HalfBatchSum.of(arrived.reshape(num, *piece_shape(x.shape, dim, num)), half)


def _coded_hop(
    x: Shaped[Array, ...],
    axis: str,
    dim: int,
    dtype: DTypeLike,
    codec: Codec,
    comm: CommSpec,
    summed: int = 1,
) -> PartialSums:
    """One hop of one array, in messages of `codec`; `summed` as in `reductions`."""
    num = comm.sizes[axis]
    message = written(encoded(x, dim, num, dtype, codec, axis, summed))
    return PartialSums(_exchange(message, axis), codec, piece_shape(x.shape, dim, num), summed)


def encoded(
    x: Array | PartialSums,
    dim: int,
    num: int,
    dtype: DTypeLike,
    codec: Codec,
    axis: str,
    summed: int,
) -> Shaped[Array, "num m"] | DeferredMessage:
    """The mean of the devices `summed` so far, in `num` pieces for those along `axis`."""
    seed = device_index(_told_apart(axis))
    if isinstance(x, PartialSums) and x.summed == 1:
        args = (x.message, x.codec, x.shape, dim, num)
        write = functools.partial(codec.recode, *args, divisor=summed, dtype=dtype, seed=seed)
    else:
        x = total_of(x)
        mean = x if summed == 1 else x / jnp.asarray(summed, x.dtype)
        write = functools.partial(codec.encode_pieces, mean.astype(dtype), dim, num, seed=seed)
    write = jax.named_scope("encode")(write)
    if not codec.writes_in_place:
        return write()
    size = codec.message(math.prod(x.shape) // num, dtype).shape
    return DeferredMessage((num, *size), write)


def _told_apart(axis: str) -> tuple[str, ...]:
    """The axes along which devices round differently in a sum over `axis`, if at random.

    What is summed over `node` may be a sum over the node already, the same on all of its
    devices, and must stay the same on all of them.
    """
    return AXES if axis == LOCAL else (axis,)


def rows_of(x: Shaped[Array, ...], dim: int, num: int) -> Shaped[Array, "num n"]:
    """The `num` pieces of `dim`, each as one row."""
    shape = (*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0).reshape(num, x.size // num)


def piece_shape(shape: tuple[int, ...], dim: int, num: int) -> tuple[int, ...]:
    """The shape of each of `num` pieces."""
    return (*shape[:dim], shape[dim] // num, *shape[dim + 1 :])


def _from_rows(rows: Shaped[Array, "num n"], like: Shaped[Array, ...], dim: int) -> Array:
    """Undo `rows_of`."""
    pieces = rows.reshape(len(rows), *piece_shape(like.shape, dim, len(rows)))
    return jnp.moveaxis(pieces, 0, dim).reshape(like.shape)


def _exchange(message: Shaped[Array, "num m"], axis: str) -> Shaped[Array, "num m"]:
    """Send row i to device i of the axis."""
    return all_to_all(lax.optimization_barrier(message), axis)


def sum_over(
    x: Shaped[Array, ...], axis: str, size: int, comm: CommSpec, summed: int
) -> tuple[Shaped[Array, ...], HalfBatchSum | None]:
    """All-reduce over one axis; with a codec as a reduction and a gather.

    Returns:
        The sum; and this device's piece of it in halves, if they are wanted on this axis.
    """
    num, half = comm.sizes[axis], comm.half(axis)
    if num == 1:
        return x, None
    codec = comm.gradient_codec(axis, size, x.dtype)
    if codec is None or getattr(comm.gradients, axis) is None:
        (whole,), (piece,) = _sum_plain([x.astype(accumulator_dtype(x.dtype))], axis, comm)
        return whole, piece
    layout = DimSharding(0, x.size, num)
    padded = pad(x.reshape(-1), layout)
    piece, halves = as_pair(sum_of(_coded_hop(padded, axis, 0, x.dtype, codec, comm, summed), half))
    scale = jnp.asarray(summed * num, x.dtype)
    mean = EncodedShards.plain(piece.astype(x.dtype) / scale, 0)
    mean = mean.encode(codec, _told_apart(axis)).gather(axis)
    return unpad(mean.join() * scale, layout).reshape(x.shape), halves


def sum_whole(
    arrays: list[Array], sizes: list[int], comm: CommSpec
) -> tuple[list[Array], list[HalfBatchSum | None]]:
    """Sum whole arrays over every device, in one collective for each hop and type.

    Args:
        arrays: of this device.
        sizes: of each, or of one layer of it, for `min_quantized_size`.
        comm: how they travel.

    Returns:
        The sums; and of each a piece in halves, if they are wanted.
    """
    halves: list[HalfBatchSum | None] = [None] * len(arrays)
    arrays = [x.astype(accumulator_dtype(x.dtype)) for x in arrays]
    summed = 1
    for axis in comm.long(REDUCTION_HOPS) if arrays else ():
        if getattr(comm.gradients, axis) is not None:
            pairs = zip(arrays, sizes, strict=True)
            both = [sum_over(x, axis, size, comm, summed) for x, size in pairs]
            arrays, halves = [x for x, _ in both], [piece for _, piece in both]
        else:
            arrays, halves = _sum_plain(arrays, axis, comm)
        summed *= comm.sizes[axis]
    return arrays, halves


def _sum_plain(
    arrays: list[Array], axis: str, comm: CommSpec
) -> tuple[list[Array], list[HalfBatchSum | None]]:
    """Sum over one axis without a codec; with halves as what an all-reduce is made of."""
    half, num = comm.half(axis), comm.sizes[axis]
    if not half:
        return list(all_reduce(arrays, axis)), [None] * len(arrays)
    wholes: dict[int, Array] = {}
    pieces: dict[int, HalfBatchSum | None] = {}
    layouts = [DimSharding(0, x.size, num) for x in arrays]
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        chosen = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        rows = [rows_of(pad(arrays[i].reshape(-1), layouts[i]), 0, num) for i in chosen]
        columns = [(x.shape[1], dtype) for x in rows]
        arrived = split(all_to_all(join(rows), axis), columns)
        sums = [HalfBatchSum.of(x, half) for x in arrived]
        gathered = all_gather(join([x.total[None] for x in sums]), axis, 0)
        for i, piece, x in zip(chosen, sums, split(gathered, columns), strict=True):
            pieces[i] = piece
            wholes[i] = unpad(x.reshape(-1), layouts[i]).reshape(arrays[i].shape)
    return [wholes[i] for i in range(len(arrays))], [pieces[i] for i in range(len(arrays))]
