"""Gather and reduce one array over the two axes, hop by hop, with a codec for each.

Gathers go over `node` first and `local` second, reductions the other way round: what
crosses between nodes is then the smallest piece, and arrives in order (`_partition`).
Every codec is used hop by hop: a reduction encodes pieces, exchanges them all-to-all,
decodes and sums in float32, and starts again on the next axis (ZeRO++, qgZ).
Legend: `shard` is what one device owns, `slice` what the devices of one position in all
nodes own together, `full` the whole array in its own shape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Shaped

from ._codecs import Cast, Codec, from_bits, is_narrow_float, to_bits
from ._config import Difference, ErrorFeedback, Hops, HpZ, ZeroConfig
from ._mesh import AXES, LOCAL, NODE, REDUCTION_HOPS, device_index
from ._partition import Layout
from ._pieces import Pieces
from ._simulate import AnyMesh
from ._traffic import all_reduce, all_to_all, reduce_scatter


@dataclasses.dataclass(frozen=True)
class Wire:
    """The links that values travel over: axes, their sizes, and the codecs on them."""

    axes: tuple[str, ...]  # that split a leaf, major first
    sizes: Mapping[str, int]  # of both axes
    weights: Hops
    gradients: Hops
    hpz: HpZ | None
    min_quantized_size: int

    @classmethod
    def of(cls, mesh: AnyMesh, config: ZeroConfig) -> Wire:
        sizes = {axis: mesh.shape[axis] for axis in AXES}
        return cls(
            config.axes,
            sizes,
            config.weights,
            config.gradients,
            config.hpz,
            config.min_quantized_size,
        )

    @property
    def pieces(self) -> int:
        """How many devices share a leaf."""
        return math.prod(self.sizes[axis] for axis in self.axes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def gather_axes(self) -> tuple[str, ...]:
        """The axes that a weight is gathered over where it is used, in this order."""
        return (LOCAL,) if self.hpz else self.axes[::-1]

    def long(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `axes` that have more than one device."""
        return tuple(axis for axis in axes if self.sizes[axis] > 1)

    def weight_codec(self, axis: str, num: int, dtype: DTypeLike) -> Codec | None:
        """What a weight of `num` elements in full is written with on one axis."""
        codec = getattr(self.weights, axis)
        if isinstance(codec, Difference):  # where no wire state is at hand
            codec = self.hpz and self.hpz.codec
        return self.suitable(codec, num, dtype)

    def gradient_codec(self, axis: str, num: int, dtype: DTypeLike) -> Codec | None:
        """The same for a gradient; 16-bit floats always travel as a `Cast` would send them."""
        codec = getattr(self.gradients, axis)
        if isinstance(codec, ErrorFeedback):
            codec = codec.codec
        codec = self.suitable(codec, num, dtype)
        return Cast(dtype) if codec is None and is_narrow_float(dtype) else codec

    def suitable(self, codec: Codec | None, num: int, dtype: DTypeLike) -> Codec | None:
        """`codec`, unless an array of `num` elements travels as it is."""
        if codec is None or not jnp.issubdtype(dtype, jnp.floating) or num == 0:
            return None
        if isinstance(codec, Cast):
            return codec if codec.wire_dtype(dtype) != dtype else None
        return codec if num >= self.min_quantized_size else None


def pad(x: Shaped[Array, ...], layout: Layout) -> Shaped[Array, ...]:
    """Append the zeros that make `layout.dim` divisible."""
    if not layout.is_padded:
        return x
    widths = [(0, 0)] * x.ndim
    widths[layout.dim] = (0, layout.padded - layout.size)
    return jnp.pad(x, widths)


def unpad(x: Shaped[Array, ...], layout: Layout) -> Shaped[Array, ...]:
    """Drop the zeros that `pad` appended."""
    return lax.slice_in_dim(x, 0, layout.size, axis=layout.dim) if layout.is_padded else x


def gather(pieces: Pieces, axes: tuple[str, ...], size: int, wire: Wire) -> Pieces:
    """All-gather over `axes`, in this order.

    A message that arrived over one axis is passed on over the next, if that has the same
    codec; else it is decoded and encoded again.

    Args:
        pieces: this device's.
        axes: to gather over.
        size: of the whole array, or of one layer of it, for `min_quantized_size`.
        wire: how it travels.
    """
    for axis in axes:
        if wire.sizes[axis] > 1:
            if not pieces.pinned:
                codec = wire.weight_codec(axis, size, pieces.dtype)
                pieces = pieces.encode(codec, wire.axes[: wire.axes.index(axis) + 1])
            pieces = pieces.gather(axis)
    return pieces


def node_slice(shard: Pieces, size: int, wire: Wire) -> Pieces:
    """What a node keeps of a weight for a whole step (hpZ): one gather between nodes."""
    kept = gather(shard, (NODE,), size, wire)
    return kept if kept.pinned else keep(kept, size, wire)


def keep(pieces: Pieces, size: int, wire: Wire) -> Pieces:
    """A node's slice as hpZ stores it; `size` as for `gather`."""
    assert wire.hpz is not None
    return pieces.encode(wire.suitable(wire.hpz.codec, size, pieces.dtype), (LOCAL,))


def reduce(
    full: Shaped[Array, ...],
    layout: Layout,
    wire: Wire,
    hops: tuple[str, ...] = REDUCTION_HOPS,
) -> Shaped[Array, ...]:
    """Sum over devices, and keep this device's piece: over `local`, then `node`.

    Args:
        full: this device's gradient.
        layout: how it is cut.
        wire: how it travels.
        hops: all of them, or only `local`, which leaves the node's slice of the sum.

    Returns:
        The sum, not the mean, in `accumulator_dtype(full.dtype)`.
    """
    x, summed = pad(full, layout), 1
    for axis in hops:
        if axis in wire.axes:
            x = _reduce_hop(x, axis, layout.dim, full.dtype, full.size, wire, summed)
        else:
            x = _sum_over(x, axis, full.size, wire, summed)
        summed *= wire.sizes[axis]
    return x.astype(accumulator_dtype(full.dtype))


def reduce_over_node(
    x: Shaped[Array, ...],
    layout: Layout,
    size: int,
    dtype: DTypeLike,
    wire: Wire,
    error: Shaped[Array, ...] | None = None,
) -> tuple[Shaped[Array, ...], Shaped[Array, ...] | None]:
    """The second half of `reduce`, where the first was only over `local`.

    Args:
        x: the node's slice of the sum, divided by what makes it a mean.
        layout: how the full array is cut.
        size: of the full array, or of one layer of it, for `min_quantized_size`.
        dtype: that the gradient had.
        wire: how it travels.
        error: what rounding lost in the step before, in the units of `x`; None: not kept.

    Returns:
        This device's shard of the sum over nodes, and what rounding lost now.
    """
    codec = wire.gradient_codec(NODE, size, dtype)
    if NODE not in wire.axes:
        return _sum_over(x, NODE, size, wire, 1), error
    if error is None or codec is None:
        return _reduce_hop(x, NODE, layout.dim, dtype, size, wire, 1), error
    rows = _rows(x + error.astype(x.dtype), layout.dim, wire.sizes[NODE])
    message = codec.encode(rows, seed=device_index(_told_apart(NODE)))
    lost = rows - codec.decode(message, rows.shape[1], x.dtype)
    lost = jnp.where(jnp.isfinite(lost), lost, 0)  # a step that overflowed must not be the last
    total = _exchange(message, rows.shape[1], codec, NODE)
    shape = _piece_shape(x, layout.dim, wire.sizes[NODE])
    return total.reshape(shape), _from_rows(lost, x, layout.dim).astype(error.dtype)


def accumulator_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The type that sums are taken in: float32 for narrower floats, else the same."""
    return jnp.dtype(jnp.float32) if is_narrow_float(dtype) else jnp.dtype(dtype)


def _reduce_hop(
    x: Shaped[Array, ...],
    axis: str,
    dim: int,
    dtype: DTypeLike,
    size: int,
    wire: Wire,
    summed: int,
) -> Shaped[Array, ...]:
    """Sum over one axis and keep one piece of `dim`.

    Values that travel in 16 bits or fewer are exchanged all-to-all and summed in float32,
    once. A reduce-scatter of the same bytes would round after each of its steps. What is sent
    is the mean of the devices `summed` so far: a sum could overflow where the mean does not.
    """
    num = wire.sizes[axis]
    if num == 1:
        return x
    codec = wire.gradient_codec(axis, size, dtype)
    if codec is None:
        return reduce_scatter(x, axis, dim)
    mean = (x if summed == 1 else x / jnp.asarray(summed, x.dtype)).astype(dtype)
    rows = _rows(mean, dim, num)
    total = _exchange(
        codec.encode(rows, seed=device_index(_told_apart(axis))), rows.shape[1], codec, axis
    )
    total = total.reshape(_piece_shape(x, dim, num))
    return total if summed == 1 else total * jnp.float32(summed)


def _told_apart(axis: str) -> tuple[str, ...]:
    """The axes along which devices round differently in a sum over `axis`, if at random.

    What is summed over `node` may be a sum over the node already, the same on all of its
    devices, and must stay the same on all of them.
    """
    return AXES if axis == LOCAL else (axis,)


def _rows(x: Shaped[Array, ...], dim: int, num: int) -> Shaped[Array, "num n"]:
    """The `num` pieces of `dim`, each as one row."""
    shape = (*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0).reshape(num, x.size // num)


def _piece_shape(x: Shaped[Array, ...], dim: int, num: int) -> tuple[int, ...]:
    return (*x.shape[:dim], x.shape[dim] // num, *x.shape[dim + 1 :])


def _from_rows(rows: Shaped[Array, "num n"], like: Shaped[Array, ...], dim: int) -> Array:
    """Undo `_rows`."""
    pieces = rows.reshape(len(rows), *_piece_shape(like, dim, len(rows)))
    return jnp.moveaxis(pieces, 0, dim).reshape(like.shape)


def _exchange(
    message: Shaped[Array, "num m"], length: int, codec: Codec, axis: str
) -> Shaped[Array, " n"]:
    """Send row i to device i of the axis; decode what arrives and sum it in float32."""
    arrived = all_to_all(lax.optimization_barrier(message), axis)
    return jnp.sum(codec.decode(arrived, length, jnp.float32), axis=0)


def _sum_over(
    x: Shaped[Array, ...], axis: str, size: int, wire: Wire, summed: int
) -> Shaped[Array, ...]:
    """All-reduce over one axis; with a codec as a reduction and a gather."""
    num = wire.sizes[axis]
    if num == 1:
        return x
    codec = wire.gradient_codec(axis, size, x.dtype)
    if codec is None or getattr(wire.gradients, axis) is None:
        return all_reduce(x.astype(accumulator_dtype(x.dtype)), axis)
    layout = Layout(0, x.size, num)
    piece = _reduce_hop(pad(x.reshape(-1), layout), axis, 0, x.dtype, size, wire, summed)
    scale = jnp.asarray(summed * num, x.dtype)
    mean = Pieces.plain(piece.astype(x.dtype) / scale, 0)
    mean = mean.encode(codec, _told_apart(axis)).gather(axis)
    return unpad(mean.join() * scale, layout).reshape(x.shape)


def sum_whole(arrays: list[Array], sizes: list[int], wire: Wire) -> list[Array]:
    """Sum whole arrays over every device, in one collective for each hop and type.

    Args:
        arrays: of this device.
        sizes: of each, or of one layer of it, for `min_quantized_size`.
        wire: how they travel.
    """
    if not arrays:
        return []
    arrays = [x.astype(accumulator_dtype(x.dtype)) for x in arrays]
    summed = 1
    for axis in REDUCTION_HOPS:
        if getattr(wire.gradients, axis) is not None:
            pairs = zip(arrays, sizes, strict=True)
            arrays = [_sum_over(x, axis, size, wire, summed) for x, size in pairs]
        elif wire.sizes[axis] > 1:
            arrays = list(all_reduce(arrays, axis))
        summed *= wire.sizes[axis]
    return arrays


def move_split(
    x: Shaped[Array, ...],
    shape: tuple[int, ...],
    old: Layout,
    new: Layout,
    axes: tuple[str, ...],
) -> Shaped[Array, ...]:
    """Cut a split array along another dim, by one all-to-all.

    Args:
        x: this device's piece along `old`.
        shape: the full array's true shape.
        old: how it is cut.
        new: how it is wanted, on another dim.
        axes: that cut it, of more than one device each.
    """
    assert old.dim != new.dim and shape[new.dim] == new.size
    if not axes:
        return unpad(pad(x, new), old)
    bits = all_to_all(to_bits(pad(x, new)), axes, new.dim, old.dim)
    return unpad(from_bits(bits, x.dtype), old)


def gathered_aval(shard: Any, layout: Layout, wire: Wire) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of the full array, as seen inside the `shard_map`."""

    def full(x: Array) -> Array:
        for axis in reversed(wire.axes):
            x = lax.all_gather(x, axis, axis=layout.dim, tiled=True)
        return unpad(x, layout)

    return jax.eval_shape(full, shard)
