"""Encode and decode messages that consist of whole tiles, for TPUs.

The operations are those of `_reference`, on pieces that keep their shape. A TPU keeps the last two
dims of an array in tiles of 8 x 128. Cutting codes out of rows of bytes `[messages, m]` moves every
byte between tiles, and XLA compiles that for minutes. So the messages of a matrix whose rows are
whole blocks are columns (`_columns`). Other arrays are flattened, and their messages are
`[messages, t, 128]`: the codes of a message begin at a tile, and so do its scales; the last tiles
of both are filled up with zeros. Byte 0 of all scales precedes byte 1 of all, and so on. Decoded
numbers equal those of `_reference`.

Legend: n = messages, one for each piece of an array; t = rows of a message.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Integer, Shaped, UInt8

from . import _column_choice, _columns, _reference
from ._column_walk import LANES
from ._config import Implementation
from ._dispatch import as_uint32
from ._format import Format

_TILE = 8 * LANES  # numbers of 32 bits in a register, and in a tile of an array


def quantize_tiled(
    pieces: Float[Array, "n ..."],
    format: Format,
    *,
    seed: Integer[Array, ""] | int | None = None,
    divisor: int = 1,
    implementation: Implementation | None = None,
) -> UInt8[Array, "n t _"]:
    """Encode each piece, divided by `divisor`, as a message of whole tiles; see `quantize`.

    Args:
        pieces: the pieces of an array, each in its own shape.
        format: format of the codes and scales.
        seed: seed of stochastic rounding; None means 0.
        divisor: number that the array is divided by.
        implementation: "xla"; None uses a kernel in programs for TPUs, if one can do it.
    """
    seed = as_uint32(seed)
    if _columns.num_parts(pieces.shape[1:], format):
        options = {"divisor": divisor, "implementation": implementation}
        return _column_choice.quantize(pieces, format, seed, **options)
    rows, width = pieces.reshape(len(pieces), math.prod(pieces.shape[1:])), _width(format)
    codes, scales = _reference.encode(rows, format, seed, divisor=divisor, width=width)
    planes = jnp.moveaxis(scales.reshape(len(scales), -1, format.scale_bytes), 2, 1)
    return jnp.concatenate((_tiles(codes), _tiles(planes.reshape(scales.shape))), axis=1)


def dequantize_tiled(
    message: UInt8[Array, "n t _"],
    format: Format,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    implementation: Implementation | None = None,
) -> Float[Array, "n ..."]:
    """Decode messages that `quantize_tiled` made, into pieces of `shape`."""
    if _columns.num_parts(shape, format):
        options = {"shape": shape, "dtype": dtype, "implementation": implementation}
        return _column_choice.dequantize(message, format, **options)
    num = math.prod(shape)
    codes, scales = _parts(message, format, num)
    rows = _reference.decode(codes, scales, format, num, dtype, _width(format))
    return rows.reshape(len(message), *shape)


def dequantize_sum_tiled(
    message: UInt8[Array, "n t _"],
    format: Format,
    *,
    shape: tuple[int, ...],
    implementation: Implementation | None = None,
) -> Float32[Array, ...]:
    """Decode messages that `quantize_tiled` made of pieces of `shape`; sum them in float32."""
    if _columns.num_parts(shape, format):
        options = {"shape": shape, "implementation": implementation}
        return _column_choice.dequantize_sum(message, format, **options)[0]
    num = math.prod(shape)
    codes, scales = _parts(message, format, num)
    return _reference.decode_sum(codes, scales, format, num, _width(format)).reshape(shape)


def dequantize_sum_requantize_tiled(
    message: UInt8[Array, "n t _"],
    source: Format,
    target: Format,
    *,
    shape: tuple[int, ...],
    dim: int,
    num: int,
    seed: Integer[Array, ""] | int | None = None,
    divisor: int = 1,
    implementation: Implementation | None = None,
) -> UInt8[Array, "num r _"]:
    """Sum messages of `quantize_tiled`, and encode `num` pieces of the sum as such messages.

    The sum, of `shape`, is divided by `divisor` and cut along `dim`.
    """
    piece = (*shape[:dim], shape[dim] // num, *shape[dim + 1 :])
    parts = _columns.num_parts(shape, source), _columns.num_parts(piece, target)
    if parts == (1, 1) and source.block == target.block:
        return _column_choice.dequantize_sum_requantize(
            message,
            source,
            target,
            as_uint32(seed),
            shape=shape,
            dim=dim,
            num=num,
            divisor=divisor,
            implementation=implementation,
        )
    named: dict[str, Any] = {"implementation": implementation}
    pieces = pieces_of(dequantize_sum_tiled(message, source, shape=shape, **named), dim, num)
    return quantize_tiled(pieces, target, seed=seed, divisor=divisor, **named)


def pieces_of(x: Shaped[Array, "*shape"], dim: int, num: int) -> Shaped[Array, "num ..."]:
    """Cut an array into `num` pieces along `dim`."""
    pieces = x.reshape(*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    return jnp.moveaxis(pieces, dim, 0)


def _width(format: Format) -> int:
    """Return the width of a rotation's matrix: 128, to fill the lanes, or a block if smaller."""
    return min(format.block, LANES)


def _tiles(rows: UInt8[Array, "n m"]) -> UInt8[Array, "n t 128"]:
    """Return each row of bytes as tiles, of which the last is filled up with zeros."""
    num, size = rows.shape
    padded = jnp.pad(rows, ((0, 0), (0, -size % _TILE)))
    return padded.reshape(num, padded.shape[1] // LANES, LANES)


def _parts(
    message: UInt8[Array, "n t 128"], format: Format, num: int
) -> tuple[UInt8[Array, "n _"], UInt8[Array, "n _"]]:
    """Return the bytes of codes and of scales in messages, as `_reference.encode` returns them."""
    code_bytes = format.code_bytes(num)
    scale_bytes = format.num_bytes(num) - code_bytes
    tiles = math.ceil(code_bytes / _TILE) * (_TILE // LANES)
    codes = _rows(lax.slice_in_dim(message, 0, tiles, axis=1), code_bytes)
    planes = _rows(lax.slice_in_dim(message, tiles, message.shape[1], axis=1), scale_bytes)
    scales = jnp.moveaxis(planes.reshape(len(message), format.scale_bytes, -1), 1, 2)
    return codes, scales.reshape(planes.shape)


def _rows(tiles: UInt8[Array, "n t 128"], size: int) -> Shaped[Array, "n _"]:
    return tiles.reshape(len(tiles), tiles.shape[1] * LANES)[:, :size]
