"""A tile of blocks in registers: how it becomes codes and scales, and numbers again.

A tile is `rows` blocks, handled by one warpgroup. It is held as `parts`, arrays of the same
shape [rows, width], each with some columns of the blocks: element [r, c] of the part with
`offset` is number `offset + stride * c` of block r. Numbers that must meet lie in different
parts, in the same place: halves of a block that are packed into bytes, and what a rotation
adds. So nothing here moves data between lanes but the largest number of a block.

The functions take and give arrays in registers. They use only what Mosaic GPU lowers: no
`floor`, no `isfinite`, no reshape.

Legend: w = a part [rows, width], b = the same of bytes, r = [rows], or a scalar if that is 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _blockwise as blocks
from ._format import Format

WARPS = 4  # of a warpgroup
LANES = 32  # of a warp
_INFINITY = np.float32(np.inf)


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the arrays of a tile lie in registers.

    Attributes:
        rows: blocks of the tile.
        width: columns of a part.
        vector: neighbours that one lane holds: a power of two, and what it loads at once.
    """

    rows: int
    width: int
    vector: int

    @property
    def array(self) -> tuple[int, ...]:
        """The shape of a part, which has one dim if it has one column."""
        return (self.rows, self.width) if self.width > 1 else (self.rows,)

    @property
    def row_layout(self) -> Any:
        """Of one number for each row."""
        return self.layout.reduce(1) if self.width > 1 else self.layout

    @property
    def layout(self) -> Any:
        """Lanes lie along a row; those too many for one take the next; warps take others.

        Long rows are shared by the four warps: one warp has too few registers.
        """
        vector, width = self.vector, self.width
        if width == 1:
            return _tiled(((WARPS * LANES,), (LANES,), (1,)), (-3,), (-2,))
        warps = self._warps
        if warps == WARPS:
            tiles = ((1, WARPS * LANES * vector), (LANES * vector,), (vector,))
            return _tiled(tiles, (-3,), (-2,))
        if warps == 2:
            tiles = ((2, 2 * LANES * vector), (LANES * vector,), (vector,))
            return _tiled(tiles, (-4, -3), (-2,))
        lanes = min(LANES, width // vector)
        rows = LANES // lanes
        if rows == 1:
            return _tiled(((WARPS, LANES * vector), (vector,)), (-3,), (-2,))
        tiles = ((WARPS * rows, width), (rows, width), (vector,))
        return _tiled(tiles, (-5,), (-3, -2))

    @property
    def _warps(self) -> int:
        """How many warps share a row: one, unless that had too many numbers for each lane."""
        lanes = self.width // self.vector
        if self.vector > 1 and self.width < 1024:
            return 1
        return min(WARPS, max(1, lanes // LANES))

    @property
    def multiple(self) -> int:
        """What `rows` is a multiple of."""
        return WARPS // self._warps * max(1, LANES * self.vector // self.width)


def _tiled(tiles: tuple[tuple[int, ...], ...], warps: tuple[int, ...], lanes: Any) -> Any:
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warps, lane_dims=lanes, vector_dim=-1)


def fitting_vector(width: int, rows: int, vector: int) -> int:
    """The longest vector, at most `vector`, with which `rows` rows fill all lanes; or 0."""
    while vector and (width < vector or rows % Shape(rows, width, vector).multiple):
        vector //= 2
    return vector


def scales(parts_w: Sequence[Array], format: Format, divisor: int = 1) -> Array:
    """The scale of each row over `divisor`, as its receiver reads it; NaN if it is not finite."""
    amax_r = functools.reduce(jnp.maximum, [jnp.abs(x_w) for x_w in parts_w])
    if len(amax_r) == 1:
        amax_r = jnp.max(jnp.max(amax_r, axis=1), axis=0)
    elif amax_r.ndim > 1:
        amax_r = jnp.max(amax_r, axis=1)
    scale_r = jnp.maximum(amax_r * blocks.not_above(1 / (format.limit * divisor)), blocks.TINY)
    # The largest of nothing but NaN may be NaN, or minus infinity.
    is_finite = (amax_r >= 0) & (amax_r < _INFINITY)
    scale_r = jnp.where(is_finite, scale_r, jnp.nan)
    if format.scale_bytes == 4:
        return scale_r
    bits_r = lax.bitcast_convert_type(scale_r, jnp.uint32)
    bits_r = jnp.where(is_finite, bits_r + jnp.uint32(0xFFFF), bits_r)
    return lax.bitcast_convert_type(bits_r & jnp.uint32(0xFFFF0000), jnp.float32)


def scale_bytes(scale_r: Array, format: Format) -> list[Array]:
    """The bytes of scales, the lowest first: all four, or the upper two."""
    bits_r = lax.bitcast_convert_type(scale_r, jnp.uint32)
    shifts = range(32 - 8 * format.scale_bytes, 32, 8)
    return [((bits_r >> jnp.uint32(s)) & jnp.uint32(255)).astype(jnp.uint8) for s in shifts]


def read_scales(bytes_r: Sequence[Array], format: Format) -> Array:
    """Undo `scale_bytes`."""
    shifts = range(32 - 8 * format.scale_bytes, 32, 8)
    shifted = [
        x_r.astype(jnp.uint32) << jnp.uint32(s) for x_r, s in zip(bytes_r, shifts, strict=True)
    ]
    return lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, shifted), jnp.float32)


def encode(
    parts_w: Sequence[Array],
    scale_r: Array,
    shape: Shape,
    format: Format,
    indices: Sequence[Array] | None = None,
    seed: Array | None = None,
    divisor: int = 1,
) -> list[Array]:
    """The codes of numbers in float32, as bytes; of 4 bits, of two halves of parts.

    Args:
        parts_w: of the tile. For codes of 4 bits, the second half of the list holds what is
            half a block behind the first.
        scale_r: from `scales`.
        shape: of each part.
        format: of the codes.
        indices: for stochastic rounding the place of each number in its row (uint32).
        seed: the same.
        divisor: of the numbers.
    """
    inverse_r = blocks.inverse(scale_r, format.scale_dtype, divisor)
    rounded = []
    for i, x_w in enumerate(parts_w):
        limit = jnp.float32(format.limit)
        scaled_w = jnp.minimum(jnp.maximum(x_w * along(inverse_r, shape), -limit), limit)
        u_w = None
        if format.rounding == "stochastic":
            assert indices is not None and seed is not None
            u_w = _uniforms(x_w, scale_r, shape, indices[i], seed)
        rounded.append(_rounded(scaled_w, u_w, format))
    if format.codes_per_byte == 1:
        return [lax.bitcast_convert_type(x_w, jnp.uint8) for x_w in rounded]
    half = len(rounded) // 2
    pairs = zip(rounded[:half], rounded[half:], strict=True)
    return [((a & 15) | ((b & 15) << 4)).astype(jnp.uint8) for a, b in pairs]


def decode(codes_b: Sequence[Array], format: Format) -> list[Array]:
    """The numbers, without their scale, in the order that `encode` takes them."""
    if format.codes_per_byte == 1:
        kind = jnp.int8 if format.is_integer else format.kind
        return [lax.bitcast_convert_type(x_b, kind).astype(jnp.float32) for x_b in codes_b]
    wide_b = [x_b.astype(jnp.int32) for x_b in codes_b]
    shift = jnp.int32(28)
    low = [lax.shift_right_arithmetic(x_b << 28, jnp.full_like(x_b, shift)) for x_b in wide_b]
    high = [lax.shift_right_arithmetic(x_b << 24, jnp.full_like(x_b, shift)) for x_b in wide_b]
    return [x_w.astype(jnp.float32) for x_w in (*low, *high)]


def along(x_r: Array, shape: Shape) -> Array:
    """One number for each row, in all of its columns."""
    if shape.width == 1:
        return x_r
    x_w = lax.broadcast_in_dim(x_r, shape.array, tuple(range(x_r.ndim)))
    return plgpu.layout_cast(x_w, shape.layout)


def rotate(parts_w: Sequence[Array]) -> list[Array]:
    """Multiply 32 parts by Hadamard's matrix: sums and differences at distance 1, 2, 4, 8, 16."""
    parts, distance = list(parts_w), 1
    while distance < blocks.GROUP:
        for i in range(blocks.GROUP):
            if not i & distance:
                a, b = parts[i], parts[i + distance]
                parts[i], parts[i + distance] = a + b, a - b
        distance *= 2
    return parts


def _uniforms(x_w: Array, scale_r: Array, shape: Shape, index_w: Array, seed: Array) -> Array:
    """As `_blocks.uniforms`."""
    key_r = blocks.mix(lax.bitcast_convert_type(scale_r, jnp.uint32) ^ blocks.mix(seed))
    h = index_w * jnp.uint32(0x9E3779B9) + along(key_r, shape)
    h = blocks.mix(h ^ lax.bitcast_convert_type(x_w, jnp.uint32))
    return (h >> jnp.uint32(8)).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)


def _rounded(x_w: Array, u_w: Array | None, format: Format) -> Array:
    """Codes as numbers of their own type; int32 for those of 4 bits."""
    if format.is_integer:
        dtype = jnp.int8 if format.codes_per_byte == 1 else jnp.int32
        return _to_integer(x_w, u_w).astype(dtype)
    if u_w is None:
        return x_w.astype(format.kind)
    info = jnp.finfo(format.kind)
    binade_w = lax.bitcast_convert_type(x_w, jnp.uint32) & jnp.uint32(0x7F800000)
    smallest = jnp.uint32(int(np.float32(info.smallest_normal).view(np.uint32)))
    step_w = jnp.maximum(binade_w, smallest) - jnp.uint32(info.nmant << 23)
    inverse_w = lax.bitcast_convert_type(jnp.uint32(0x7F000000) - step_w, jnp.float32)
    rounded_w = _to_integer(x_w * inverse_w, u_w)
    return (rounded_w * lax.bitcast_convert_type(step_w, jnp.float32)).astype(format.kind)


def _to_integer(x_w: Array, u_w: Array | None) -> Array:
    nearest_w = jnp.round(x_w)
    if u_w is None:
        return nearest_w
    below_w = nearest_w - jnp.where(nearest_w > x_w, 1.0, 0.0).astype(jnp.float32)
    return below_w + jnp.where(u_w < x_w - below_w, 1.0, 0.0).astype(jnp.float32)
