"""The meaning of each operation in `jax.numpy`; as implementation `xla`, the default.

Legend: o, n, i = an array cut into n pieces along one dim: what lies before the cut, the
pieces, what is in one of them (`x.reshape(o, n, -1)`). A piece is the row `x[:, p, :]`,
flattened, and has the message p. m = bytes of a message.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Shaped, UInt8, UInt32

from . import _blockwise as blocks
from ._format import Format


def quantize(
    x_oni: Float[Array, "o n i"], format: Format, seed: UInt32[Array, ""], divisor: int = 1
) -> UInt8[Array, "n m"]:
    """The message of each piece of `x / divisor`."""
    codes, scales = encode(to_rows(x_oni), format, seed, divisor=divisor)
    return jnp.concatenate((codes, scales), axis=-1)


def dequantize(
    message: UInt8[Array, "n m"], format: Format, outer: int, inner: int, dtype: DTypeLike
) -> Float[Array, "o n i"]:
    """The pieces again, where they were in the array."""
    num = outer * inner
    size = format.code_bytes(num)
    rows = decode(message[:, :size], message[:, size:], format, num, dtype)
    return jnp.moveaxis(rows.reshape(len(message), outer, inner), 0, 1)


def dequantize_sum(
    message: UInt8[Array, "n m"], format: Format, num: int
) -> Float32[Array, " num"]:
    """The sum of all messages, each of `num` numbers."""
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
    """The sum, divided, as messages of its own pieces, `shape` = o, k, i."""
    total = dequantize_sum(message, source, shape[0] * shape[1] * shape[2])
    return quantize(total.reshape(shape), target, seed, divisor)


def to_rows(x_oni: Shaped[Array, "o n i"]) -> Shaped[Array, "n num"]:
    """Each piece as one row."""
    outer, num, inner = x_oni.shape
    return jnp.moveaxis(x_oni, 1, 0).reshape(num, outer * inner)


def encode(
    x: Float[Array, "rows num"],
    format: Format,
    seed: UInt32[Array, ""],
    start: int = 0,
    divisor: int = 1,
) -> tuple[UInt8[Array, "rows _"], UInt8[Array, "rows _"]]:
    """Codes and scales of rows that follow `start` numbers, whole blocks, encoded before.

    They are those of `x / divisor`, of which only stochastic rounding sees no more than `x`.
    """
    num = x.shape[-1]
    x_kb = blocks.split(blocks.to_float32(x), format.block)
    if format.hadamard:
        x_kb = blocks.rotate(x_kb, num)
    scale_k = blocks.scales(x_kb, format.limit, format.scale_dtype, divisor)
    is_random = format.rounding == "stochastic"
    u_kb = blocks.uniforms(x_kb, scale_k, seed, start) if is_random else None
    scaled_kb = blocks.divide(x_kb, scale_k, format.limit, format.scale_dtype, divisor)
    if format.is_integer:
        rounded_kb = blocks.round_to_integer(scaled_kb, u_kb).astype(jnp.int8)
    else:
        rounded_kb = blocks.round_to_float(scaled_kb, u_kb, format.kind)
    codes_kb = lax.bitcast_convert_type(rounded_kb, jnp.uint8)
    codes = blocks.pack(codes_kb, num, format.bits)
    return codes, blocks.write_scales(scale_k, format.scale_dtype)


def decode(
    codes: UInt8[Array, "rows _"],
    scales: UInt8[Array, "rows _"],
    format: Format,
    num: int,
    dtype: DTypeLike,
) -> Float[Array, "rows num"]:
    """Rows of `num` numbers again."""
    scale_k = blocks.read_scales(scales, format.scale_dtype)
    codes_kb = blocks.unpack(codes, num, format.block, format.bits)
    kind = jnp.int8 if format.is_integer else format.kind
    x_kb = lax.bitcast_convert_type(codes_kb, kind).astype(jnp.float32)
    if format.hadamard:  # before scales come in, so that sums are exact
        x_kb = blocks.unrotate(x_kb, num)
    x = blocks.join(x_kb * scale_k[..., None], num)
    # Half a step above the largest number of a type lies infinity. NaN stays.
    return jnp.clip(x, -largest(dtype), largest(dtype)).astype(dtype)


def decode_sum(
    codes: UInt8[Array, "rows _"], scales: UInt8[Array, "rows _"], format: Format, num: int
) -> Float32[Array, " num"]:
    """The sum of rows of `num` numbers, which is rotated back once."""
    total = blocks.add_up(decode(codes, scales, format.unrotated, num, jnp.float32))
    if not format.hadamard:
        return total
    return blocks.join(blocks.unrotate(blocks.split(total, blocks.GROUP), num), num)


def largest(dtype: DTypeLike) -> float:
    """The largest number of a type that a float32 can be."""
    return min(float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).max))
