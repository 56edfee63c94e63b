"""Quantize and dequantize in `jax.numpy`: the default, `xla`, with which kernels are compared.

Legend: an array that is cut into n pieces along one dim is `x.reshape(o, n, -1)`, `[o, n, i]`: o is
the product of the dims before that dim, i the number of elements of a piece for each of the o
indices. Piece p is `x[:, p, :]`, flattened to a row, and becomes message p. m = bytes of a message.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Shaped, UInt8, UInt32

from . import _blockwise as blocks
from ._format import Format


def quantize(
    x_oni: Float[Array, "o n i"], format: Format, seed: UInt32[Array, ""], divisor: int = 1
) -> UInt8[Array, "n m"]:
    """Encode each piece of `x / divisor` as a message: codes, then scales."""
    codes, scales = encode(to_rows(x_oni), format, seed, divisor=divisor)
    return jnp.concatenate((codes, scales), axis=-1)


def dequantize(
    message: UInt8[Array, "n m"], format: Format, outer: int, inner: int, dtype: DTypeLike
) -> Float[Array, "o n i"]:
    """Decode messages into the array that they were made from."""
    num = outer * inner
    size = format.code_bytes(num)
    rows = decode(message[:, :size], message[:, size:], format, num, dtype)
    return jnp.moveaxis(rows.reshape(len(message), outer, inner), 0, 1)


def dequantize_sum(
    message: UInt8[Array, "n m"], format: Format, num: int
) -> Float32[Array, " num"]:
    """Decode messages of `num` numbers each, and add them up."""
    size = format.code_bytes(num)
    return decode_sum(message[:, :size], message[:, size:], format, num)


def dequantize_sum_requantize(
    message: UInt8[Array, "n m"],
    source: Format,
    target: Format,
    shape: tuple[int, int, int],
    seed: UInt32[Array, ""],
    divisor: int,
) -> UInt8[Array, "k r"]:
    """Add up messages, and encode the pieces of the sum, divided by `divisor`, as new messages.

    `shape` is the shape (o, k, i) of the sum, which is cut into k pieces.
    """
    total = dequantize_sum(message, source, shape[0] * shape[1] * shape[2])
    return quantize(total.reshape(shape), target, seed, divisor)


def to_rows(x_oni: Shaped[Array, "o n i"]) -> Shaped[Array, "n num"]:
    """Flatten each piece to a row."""
    outer, num, inner = x_oni.shape
    return jnp.moveaxis(x_oni, 1, 0).reshape(num, outer * inner)


@functools.partial(jax.jit, static_argnames=("format", "start", "divisor", "width"), inline=True)
def encode(
    x: Float[Array, "rows num"],
    format: Format,
    seed: UInt32[Array, ""],
    start: int = 0,
    divisor: int = 1,
    width: int = blocks.GROUP,
) -> tuple[UInt8[Array, "rows _"], UInt8[Array, "rows _"]]:
    """Encode the rows of `x / divisor`; return the bytes of the codes, and those of the scales.

    Args:
        x: the rows.
        format: format of the codes and scales.
        seed: seed of stochastic rounding, whose random numbers are hashes of `x` (undivided).
        start: index in its message of a row's first number, for stochastic rounding. It is not 0
            where a row is the end of a message whose first blocks are encoded elsewhere.
        divisor: number that `x` is divided by.
        width: as in `blocks.rotate`.
    """
    num = x.shape[-1]
    x_kb = blocks.split(blocks.to_float32(x), format.block)
    is_kept_k = largest_k = None
    if format.hadamard:
        x_kb, is_kept_k, largest_k = blocks.rotate(x_kb, num, width)
    options = {"start": start, "divisor": divisor, "largest_k": largest_k}
    codes_kb, scale_k = round_blocks(x_kb, format, seed, **options)
    codes = blocks.pack(codes_kb, num, format.bits)
    scale_k = scale_k if is_kept_k is None else jnp.where(is_kept_k, -scale_k, scale_k)
    return codes, blocks.write_scales(scale_k, format.scale_dtype)


def round_blocks(
    x_kb: Float32[Array, "*rows k b"],
    format: Format,
    seed: UInt32[Array, ""],
    *,
    start: int = 0,
    divisor: int = 1,
    index_kb: UInt32[Array, "*rows k b"] | None = None,
    largest_k: Float32[Array, "*rows k"] | None = None,
) -> tuple[UInt8[Array, "*rows k b"], Float32[Array, "*rows k"]]:
    """Encode the blocks of `x / divisor`; if the format rotates, the caller has rotated `x`.

    `start` is as in `encode`; `index_kb` as in `blocks.uniforms`; `largest_k` is the largest
    magnitude of each block, if the caller knows it.

    Returns:
        The codes, one per byte, and the scales.
    """
    largest_k = jnp.max(jnp.abs(x_kb), axis=-1) if largest_k is None else largest_k
    scale_k = blocks.scales(largest_k, format.limit, format.scale_dtype, divisor)
    is_random = format.rounding == "stochastic"
    u_kb = blocks.uniforms(x_kb, scale_k, seed, start, index_kb) if is_random else None
    scaled_kb = blocks.divide(x_kb, scale_k, format.limit, format.scale_dtype, divisor)
    if format.is_integer:
        rounded_kb = blocks.round_to_integer(scaled_kb, u_kb).astype(jnp.int8)
    else:
        rounded_kb = blocks.round_to_float(scaled_kb, u_kb, format.kind)
    return lax.bitcast_convert_type(rounded_kb, jnp.uint8), scale_k


@functools.partial(jax.jit, static_argnames=("format", "num", "dtype", "width"), inline=True)
def decode(
    codes: UInt8[Array, "rows _"],
    scales: UInt8[Array, "rows _"],
    format: Format,
    num: int,
    dtype: DTypeLike,
    width: int = blocks.GROUP,
) -> Float[Array, "rows num"]:
    """Decode rows of `num` numbers from the bytes of codes and scales; the reverse of `encode`."""
    scale_k1 = blocks.read_scales(scales, format.scale_dtype)[..., None]
    x_kb = from_codes(blocks.unpack(codes, num, format.block, format.bits), format)
    if format.hadamard:  # rotated before the product with scales: sums of codes are exact
        x_kb = jnp.where(scale_k1 < 0, x_kb, blocks.unrotate(x_kb, num, width))
        scale_k1 = jnp.abs(scale_k1)
    return to_dtype(blocks.join(x_kb * scale_k1, num), dtype)


def from_codes(codes: UInt8[Array, "*dims"], format: Format) -> Float32[Array, "*dims"]:
    """Return the numbers that codes, one per byte, stand for before they are scaled."""
    kind = jnp.int8 if format.is_integer else format.kind
    return lax.bitcast_convert_type(codes, kind).astype(jnp.float32)


def to_dtype(x: Float32[Array, "*dims"], dtype: DTypeLike) -> Float[Array, "*dims"]:
    """Round to `dtype`; a number that is too large becomes the largest one of `dtype`."""
    # A cast rounds numbers from half a step above the largest number of a type on to infinity. The
    # clip keeps NaN.
    return jnp.clip(x, -largest(dtype), largest(dtype)).astype(dtype)


@functools.partial(jax.jit, static_argnames=("format", "num", "width"), inline=True)
def decode_sum(
    codes: UInt8[Array, "rows _"],
    scales: UInt8[Array, "rows _"],
    format: Format,
    num: int,
    width: int = blocks.GROUP,
) -> Float32[Array, " num"]:
    """Decode rows of `num` numbers and add them up; only the sum is rotated back."""
    if not format.hadamard:
        return blocks.add_up(decode(codes, scales, format, num, jnp.float32))
    scale_k1 = blocks.read_scales(scales, format.scale_dtype)[..., None]
    x_kb = from_codes(blocks.unpack(codes, num, format.block, format.bits), format)

    def total_kb(rotated: bool) -> Float32[Array, "k b"]:
        scaled_kb = x_kb * blocks.scales_of(scale_k1, rotated=rotated)
        return blocks.add_up(to_dtype(scaled_kb, jnp.float32))

    return blocks.join(blocks.unrotate(total_kb(True), num, width) + total_kb(False), num)


def largest(dtype: DTypeLike) -> float:
    """Return the largest finite number that both `dtype` and float32 can represent, as a float."""
    return min(float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).max))
