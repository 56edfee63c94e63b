"""Gather and reduce one array over the two axes, hop by hop, with a codec for each.

Gathers go over `node` first and `local` second, reductions the other way round: what
crosses between nodes is then the smallest piece, and arrives in order (`_partition`).
Legend: `shard` is what one device owns, `full` the whole array in its own shape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike, Shaped

from ._codecs import from_bits, is_narrow_float, to_bits
from ._config import Hops, ZeroConfig
from ._mesh import AXES
from ._partition import Layout


@dataclasses.dataclass(frozen=True)
class Wire:
    """The links that values travel over: axes, their sizes, and the codecs on them."""

    axes: tuple[str, ...]  # that split a leaf, major first
    sizes: Mapping[str, int]  # of both axes
    weights: Hops
    gradients: Hops

    @classmethod
    def of(cls, mesh: Mesh, config: ZeroConfig) -> Wire:
        sizes = {axis: mesh.shape[axis] for axis in AXES}
        return cls(config.axes, sizes, config.weights, config.gradients)

    @property
    def pieces(self) -> int:
        """How many devices share a leaf."""
        return math.prod(self.sizes[axis] for axis in self.axes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes over which a leaf is replicated."""
        return tuple(axis for axis in AXES if axis not in self.axes)


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


def gather(shard: Shaped[Array, ...], layout: Layout, wire: Wire) -> Shaped[Array, ...]:
    """All-gather the full array from every device's shard, over `node`, then `local`."""
    x = shard
    for axis in reversed(wire.axes):
        if wire.sizes[axis] == 1:
            continue
        codec = getattr(wire.weights, axis)
        sent = codec.encode(x) if codec else x
        bits = lax.all_gather(to_bits(sent), axis, axis=layout.dim, tiled=True)
        x = from_bits(bits, sent.dtype).astype(shard.dtype)
    return unpad(x, layout)


def reduce(full: Shaped[Array, ...], layout: Layout, wire: Wire) -> Shaped[Array, ...]:
    """Sum over all devices, and keep this device's shard: over `local`, then `node`.

    Returns:
        The sum, not the mean, in `accumulator_dtype(full.dtype)`.
    """
    x, summed = pad(full, layout), 1
    for axis in wire.axes:
        x = _reduce_hop(x, axis, layout.dim, full.dtype, wire, summed)
        summed *= wire.sizes[axis]
    for axis in wire.replica_axes:
        x = _sum_over(x, axis, wire, summed)
    return x.astype(accumulator_dtype(full.dtype))


def accumulator_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The type that sums are taken in: float32 for narrower floats, else the same."""
    return jnp.dtype(jnp.float32) if is_narrow_float(dtype) else jnp.dtype(dtype)


def _reduce_hop(
    x: Shaped[Array, ...], axis: str, dim: int, dtype: DTypeLike, wire: Wire, summed: int
) -> Shaped[Array, ...]:
    """Sum over one axis and keep one piece of `dim`.

    Values that travel in 16 bits are exchanged all-to-all and summed in float32, once.
    A reduce-scatter of the same bytes would round after each of its steps. What is sent is
    the mean of the devices `summed` so far: a sum could overflow where the mean does not.
    """
    num = wire.sizes[axis]
    if num == 1:
        return x
    codec = getattr(wire.gradients, axis)
    wire_dtype = codec.wire_dtype(dtype) if codec else jnp.dtype(dtype)
    if not is_narrow_float(wire_dtype):
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    sent = (x if summed == 1 else x / jnp.asarray(summed, x.dtype)).astype(dtype)
    sent = codec.encode(sent) if codec else sent
    shape = (*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    pieces = jnp.moveaxis(to_bits(sent).reshape(shape), dim, 0)
    pieces = lax.all_to_all(pieces, axis, split_axis=0, concat_axis=0, tiled=True)
    total = jnp.sum(from_bits(pieces, sent.dtype), axis=0, dtype=jnp.float32)
    return total if summed == 1 else total * jnp.float32(summed)


def _sum_over(x: Shaped[Array, ...], axis: str, wire: Wire, summed: int) -> Shaped[Array, ...]:
    """All-reduce over one axis, in the codec's type, as a reduce and a gather."""
    num = wire.sizes[axis]
    if num == 1:
        return x
    codec = getattr(wire.gradients, axis)
    if codec is None or codec.wire_dtype(x.dtype) == x.dtype:
        return lax.psum(x.astype(accumulator_dtype(x.dtype)), axis)
    layout = Layout(0, x.size, num)
    piece = _reduce_hop(pad(x.reshape(-1), layout), axis, 0, x.dtype, wire, summed)
    scale = jnp.asarray(summed * num, x.dtype)
    sent = codec.encode(piece.astype(x.dtype) / scale)
    bits = lax.all_gather(to_bits(sent), axis, axis=0, tiled=True)
    total = from_bits(bits, sent.dtype).astype(x.dtype) * scale
    return unpad(total, layout).reshape(x.shape)


def all_reduce(arrays: list[Array], wire: Wire) -> list[Array]:
    """Sum whole arrays over every device, in one collective for each hop and type."""
    if not arrays:
        return []
    arrays = [x.astype(accumulator_dtype(x.dtype)) for x in arrays]
    summed = 1
    for axis in reversed(AXES):
        if getattr(wire.gradients, axis) is not None:
            arrays = [_sum_over(x, axis, wire, summed) for x in arrays]
        elif wire.sizes[axis] > 1:
            arrays = list(lax.psum(arrays, axis))
        summed *= wire.sizes[axis]
    return arrays


def move_split(
    shard: Shaped[Array, ...], shape: tuple[int, ...], old: Layout, new: Layout, wire: Wire
) -> Shaped[Array, ...]:
    """Cut a split array along another dim, by one all-to-all of the shards.

    Args:
        shard: this device's piece along `old`.
        shape: the full array's true shape.
        old: how it is cut.
        new: how it is wanted, on another dim.
        wire: gives the axes.
    """
    assert old.dim != new.dim and shape[new.dim] == new.size
    axes = tuple(axis for axis in wire.axes if wire.sizes[axis] > 1)
    x = to_bits(pad(shard, new))
    x = lax.all_to_all(x, axes, split_axis=new.dim, concat_axis=old.dim, tiled=True)
    return unpad(from_bits(x, shard.dtype), old)


def gathered_aval(shard: Shaped[Array, ...], layout: Layout, wire: Wire) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of `gather(shard)`, as seen inside the `shard_map`."""
    return jax.eval_shape(lambda x: gather(x, layout, wire), shard)
