"""Messages as whole tiles, for TPUs: the operations of `_reference`, on `[messages, tiles, 128]`.

A TPU keeps the last two dims of an array in tiles of 8 x 128. Cutting codes out of rows of bytes
`[messages, m]` moves every byte between tiles, and XLA compiles that for minutes. Here the codes of
a message begin at a tile, and so do its scales; what is left of the last tiles is zero. Byte `i` of
all scales precedes byte `i + 1` of all. The numbers are those of the messages in rows.

Legend: t = rows of 128 bytes in a message; o, n, i as in `_reference`.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Integer, Shaped, UInt8

from . import _reference
from ._blockwise import GROUP
from ._dispatch import as_uint32
from ._format import Format

_LANES = 128
_TILE = 8 * _LANES


def quantize_tiled(
    x_oni: Float[Array, "o n i"],
    format: Format,
    *,
    seed: Integer[Array, ""] | int | None = None,
    divisor: int = 1,
) -> UInt8[Array, "n t 128"]:
    """Encode each piece of `x / divisor` as a message of whole tiles; see `quantize`.

    Args:
        x_oni: an array that is cut into `n` pieces along its middle dim.
        format: format of the codes and scales.
        seed: seed of stochastic rounding; None means 0.
        divisor: number that the array is divided by.
    """
    rows, seed = _reference.to_rows(x_oni), as_uint32(seed)
    width = _width(format)
    codes, scales = _reference.encode(rows, format, seed, divisor=divisor, width=width)
    planes = jnp.moveaxis(scales.reshape(len(scales), -1, format.scale_bytes), 2, 1)
    return jnp.concatenate((_tiles(codes), _tiles(planes.reshape(scales.shape))), axis=1)


def dequantize_tiled(
    message: UInt8[Array, "n t 128"], format: Format, *, outer: int, inner: int, dtype: DTypeLike
) -> Float[Array, "o n i"]:
    """Decode messages of `quantize_tiled` into the array that they were made from.

    `outer` and `inner` are as in `dequantize`.
    """
    codes, scales = _parts(message, format, outer * inner)
    rows = _reference.decode(codes, scales, format, outer * inner, dtype, _width(format))
    return jnp.moveaxis(rows.reshape(len(message), outer, inner), 0, 1)


def dequantize_sum_tiled(
    message: UInt8[Array, "n t 128"], format: Format, *, num: int
) -> Float32[Array, " num"]:
    """Decode messages of `quantize_tiled`, of `num` numbers each, and add them up in float32."""
    codes, scales = _parts(message, format, num)
    return _reference.decode_sum(codes, scales, format, num, _width(format))


def dequantize_sum_requantize_tiled(
    message: UInt8[Array, "n t 128"],
    source: Format,
    target: Format,
    *,
    shape: tuple[int, int, int],
    seed: Integer[Array, ""] | int | None = None,
    divisor: int = 1,
) -> UInt8[Array, "k r 128"]:
    """Sum messages of `quantize_tiled`, divide, and encode the pieces of the quotient alike.

    `shape` is the shape `[o, k, i]` of the sum. As in `dequantize_sum_requantize`, the sum of
    rotated messages is not rotated back and again.
    """
    if source.hadamard and target.hadamard and shape[2] % GROUP == 0:
        source, target = source.unrotated, target.unrotated
    total = dequantize_sum_tiled(message, source, num=math.prod(shape))
    return quantize_tiled(total.reshape(shape), target, seed=seed, divisor=divisor)


def _width(format: Format) -> int:
    """The numbers that are multiplied by one matrix in a rotation: as many as a block allows."""
    return min(format.block, _LANES)


def _tiles(rows: UInt8[Array, "n m"]) -> UInt8[Array, "n t 128"]:
    """Rows of bytes as tiles, the last filled up with zeros."""
    num, size = rows.shape
    padded = jnp.pad(rows, ((0, 0), (0, -size % _TILE)))
    return padded.reshape(num, padded.shape[1] // _LANES, _LANES)


def _parts(
    message: UInt8[Array, "n t 128"], format: Format, num: int
) -> tuple[UInt8[Array, "n _"], UInt8[Array, "n _"]]:
    """The bytes of codes and of scales, as `_reference.encode` returns them."""
    code_bytes = format.code_bytes(num)
    scale_bytes = format.num_bytes(num) - code_bytes
    tiles = math.ceil(code_bytes / _TILE) * (_TILE // _LANES)
    codes = _rows(lax.slice_in_dim(message, 0, tiles, axis=1), code_bytes)
    planes = _rows(lax.slice_in_dim(message, tiles, message.shape[1], axis=1), scale_bytes)
    scales = jnp.moveaxis(planes.reshape(len(message), format.scale_bytes, -1), 1, 2)
    return codes, scales.reshape(planes.shape)


def _rows(tiles: UInt8[Array, "n t 128"], size: int) -> Shaped[Array, "n _"]:
    return tiles.reshape(len(tiles), tiles.shape[1] * _LANES)[:, :size]
