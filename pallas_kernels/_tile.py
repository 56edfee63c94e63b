"""Encode and decode a tile of blocks in the registers of a GPU.

A tile is `rows` blocks of numbers, and one warpgroup handles it. Its registers hold the tile as a
list of arrays, the `parts`, which all have the shape [rows, width]. Each part has an `offset`, and
its element [r, c] is number `offset + stride * c` of block r. Two numbers whose 4-bit codes share a
byte are at the same index of different parts, and so are the 32 numbers that a Hadamard rotation
combines. So only the maximum over a block moves data between lanes.

The functions take and return arrays in registers. They use only operations that Mosaic GPU lowers:
no `floor`, no `isfinite`, no reshape.

Legend: w = a part [rows, width], b = a part of uint8, r = [rows], or a scalar if rows is 1.
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
from jaxtyping import DTypeLike

from . import _blockwise as blocks
from . import _reference as reference
from ._format import Format

WARPS = 4  # per warpgroup
LANES = 32  # per warp
_INFINITY = np.float32(np.inf)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape of one part of a tile, and its layout in the registers of a warpgroup.

    Attributes:
        rows: number of blocks in the tile.
        width: number of columns in a part.
        vector: consecutive elements that one lane holds and loads at once; a power of two.
    """

    rows: int
    width: int
    vector: int

    @property
    def array(self) -> tuple[int, ...]:
        """Array shape of a part: [rows, width], or [rows] if `width` is 1."""
        return (self.rows, self.width) if self.width > 1 else (self.rows,)

    @property
    def row_layout(self) -> Any:
        """Register layout of an array with one number per row."""
        return self.layout.reduce(1) if self.width > 1 else self.layout

    @property
    def layout(self) -> Any:
        """Register layout of a part.

        Consecutive lanes hold consecutive vectors of a row, and continue in the next row if one
        row does not fill a warp. Each warp has rows of its own, except that several warps share
        a long row, because one warp has too few registers for it.
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
        """Number of warps that share a row: 1, unless each lane would hold too many numbers."""
        lanes = self.width // self.vector
        if self.vector > 1 and self.width < 1024:
            return 1
        return min(WARPS, max(1, lanes // LANES))

    @property
    def multiple(self) -> int:
        """Smallest number of rows that fills all lanes; `rows` must be a multiple of it."""
        return WARPS // self._warps * max(1, LANES * self.vector // self.width)


def _tiled(tiles: tuple[tuple[int, ...], ...], warps: tuple[int, ...], lanes: Any) -> Any:
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warps, lane_dims=lanes, vector_dim=-1)


def fitting_vector(width: int, rows: int, vector: int) -> int:
    """Choose how many consecutive elements each lane loads at once (see `Shape.vector`).

    Args:
        width: number of columns in a part of the tile.
        rows: number of blocks in the tile.
        vector: the most elements to load at once; a power of two.

    Returns:
        The largest of `vector`, `vector / 2`, ..., 1 with which the tile occupies every lane of the
        warpgroup; 0 if there is none.
    """
    while vector and (width < vector or rows % Shape(rows, width, vector).multiple):
        vector //= 2
    return vector


def scales(parts_w: Sequence[Array], format: Format, divisor: int = 1) -> Array:
    """Return the scale of each row (block) of a tile whose numbers are divided by `divisor`.

    The scale is rounded up to the scale type of the format, so it equals the value that the
    receiver decodes. It is NaN where the row holds a NaN or an infinity.
    """
    amax_r = _largest([jnp.abs(x_w) for x_w in parts_w])
    scale_r = jnp.maximum(amax_r * blocks.not_above(1 / (format.limit * divisor)), blocks.TINY)
    # The maximum over a row of NaN may be NaN or minus infinity; the test must reject both.
    is_finite = (amax_r >= 0) & (amax_r < _INFINITY)
    scale_r = jnp.where(is_finite, scale_r, jnp.nan)
    if format.scale_bytes == 4:
        return scale_r
    # bfloat16 is the upper half of a float32. Rounding up keeps codes within the limit; adding to
    # the bits of a NaN could turn it into a number.
    bits_r = lax.bitcast_convert_type(scale_r, jnp.uint32)
    bits_r = jnp.where(is_finite, bits_r + jnp.uint32(0xFFFF), bits_r)
    return lax.bitcast_convert_type(bits_r & jnp.uint32(0xFFFF0000), jnp.float32)


def _largest(parts_w: Sequence[Array]) -> Array:
    """Return the largest number of each row."""
    amax_r = functools.reduce(jnp.maximum, parts_w)
    if len(amax_r) == 1:
        return jnp.max(jnp.max(amax_r, axis=1), axis=0)
    return jnp.max(amax_r, axis=1) if amax_r.ndim > 1 else amax_r


def keep_zeros(
    parts_w: Sequence[Array], rotated_w: Sequence[Array], shape: Shape
) -> tuple[list[Array], Array]:
    """Choose, for each row, the rotated numbers, or the unrotated ones if one is exactly zero.

    Returns:
        The chosen numbers, as parts; and whether each row is unrotated ([Note: exact zeros] in
        `_blockwise`).
    """
    negative_r = _largest([-jnp.abs(x_w) for x_w in parts_w])
    is_kept_w = along(negative_r, shape) >= 0
    pairs = zip(parts_w, rotated_w, strict=True)
    return [jnp.where(is_kept_w, x_w, y_w) for x_w, y_w in pairs], negative_r >= 0


def scale_bytes(scale_r: Array, format: Format) -> list[Array]:
    """Split scales into bytes, lowest first: four for float32, the upper two for bfloat16."""
    bits_r = lax.bitcast_convert_type(scale_r, jnp.uint32)
    shifts = range(32 - 8 * format.scale_bytes, 32, 8)
    return [((bits_r >> jnp.uint32(s)) & jnp.uint32(255)).astype(jnp.uint8) for s in shifts]


def read_scales(bytes_r: Sequence[Array], format: Format) -> Array:
    """Assemble scales (float32) from the bytes that `scale_bytes` returns."""
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
    """Quantize a tile of float32 numbers to codes (uint8).

    Args:
        parts_w: parts of the tile, float32. For 4-bit codes, the second half of the list holds
            the second halves of the blocks.
        scale_r: scale of each row, from `scales`.
        shape: shape of each part.
        format: wire format.
        indices: index of each number in its message (uint32), for stochastic rounding only.
        seed: seed (uint32), for stochastic rounding only.
        divisor: numbers are divided by this before they are quantized.

    Returns:
        One part of codes for each input part, or for each pair of them if codes have 4 bits.
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
    """Return the numbers of a tile, not yet scaled, as parts in the order that `encode` takes."""
    if format.codes_per_byte == 1:
        kind = jnp.int8 if format.is_integer else format.kind
        return [lax.bitcast_convert_type(x_b, kind).astype(jnp.float32) for x_b in codes_b]
    # Shift each 4-bit code to the top of an int32 and back: the arithmetic shift extends its sign.
    wide_b = [x_b.astype(jnp.int32) for x_b in codes_b]
    shift = jnp.int32(28)
    low = [lax.shift_right_arithmetic(x_b << 28, jnp.full_like(x_b, shift)) for x_b in wide_b]
    high = [lax.shift_right_arithmetic(x_b << 24, jnp.full_like(x_b, shift)) for x_b in wide_b]
    return [x_w.astype(jnp.float32) for x_w in (*low, *high)]


def along(x_r: Array, shape: Shape) -> Array:
    """Broadcast an array with one number per row to all columns of a part of `shape`."""
    if shape.width == 1:
        return x_r
    x_w = lax.broadcast_in_dim(x_r, shape.array, tuple(range(x_r.ndim)))
    return plgpu.layout_cast(x_w, shape.layout)


def clipped(x_w: Array, dtype: DTypeLike) -> Array:
    """Limit numbers to the finite range of `dtype`; NaN is kept.

    Decoded numbers may exceed the range by a rounding error, and a cast would make them infinite.
    """
    largest = jnp.float32(reference.largest(dtype))
    return jnp.minimum(jnp.maximum(x_w, -largest), largest)


def rotate(parts_w: Sequence[Array]) -> list[Array]:
    """Multiply each 32 consecutive parts by Hadamard's matrix of +1 and -1, by butterflies."""
    parts, distance = list(parts_w), 1
    while distance < blocks.GROUP:
        for i in range(len(parts)):
            if not i & distance:
                a, b = parts[i], parts[i + distance]
                parts[i], parts[i + distance] = a + b, a - b
        distance *= 2
    return parts


def _uniforms(x_w: Array, scale_r: Array, shape: Shape, index_w: Array, seed: Array) -> Array:
    """Return pseudo-random numbers in [0, 1), equal to those of `_blockwise.uniforms`."""
    key_r = blocks.mix(lax.bitcast_convert_type(scale_r, jnp.uint32) ^ blocks.mix(seed))
    h = index_w * jnp.uint32(0x9E3779B9) + along(key_r, shape)
    h = blocks.mix(h ^ lax.bitcast_convert_type(x_w, jnp.uint32))
    return (h >> jnp.uint32(8)).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)


def _rounded(x_w: Array, u_w: Array | None, format: Format) -> Array:
    """Round scaled numbers to codes: int8, a float8 type, or int32 for 4-bit codes.

    `u_w` are random numbers in [0, 1) for stochastic rounding; None rounds to nearest.
    """
    if format.is_integer:
        dtype = jnp.int8 if format.codes_per_byte == 1 else jnp.int32
        return _to_integer(x_w, u_w).astype(dtype)
    if u_w is None:
        return x_w.astype(format.kind)
    # The spacing of float8 numbers is a power of two for each binade. Dividing by it turns
    # rounding to float8 into rounding to an integer; all powers are formed in the exponent bits.
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
    # The floor, for which Mosaic GPU has no lowering.
    below_w = nearest_w - jnp.where(nearest_w > x_w, 1.0, 0.0).astype(jnp.float32)
    return below_w + jnp.where(u_w < x_w - below_w, 1.0, 0.0).astype(jnp.float32)
