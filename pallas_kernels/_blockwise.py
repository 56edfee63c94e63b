"""Arithmetic of the block codecs: scales, rounding, rotation and packing, in float32.

A row of numbers is cut into blocks of `b` elements, the last filled up with zeros. Each has
a scale `s = max|x| / limit`, where `limit` is the largest code, so that nothing clips. What
is sent for `x` is the code nearest to `x / s`, or one of the two next to it at random.

Quotients are written as products with a reciprocal. XLA makes that of them anyway, but not
everywhere, and codes would then depend on what an encoder is compiled together with.

Legend: k = blocks of a row, b = elements of a block, m = bytes, `rows` = any leading dims.

References:
    ZeRO++ (https://arxiv.org/abs/2306.10209), blockwise quantization.
    SDP4Bit (https://arxiv.org/abs/2410.15526), Hadamard rotation of gradients.
"""

from __future__ import annotations

import functools
import math
import operator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Shaped, UInt8, UInt32

from ._format import check_packable

GROUP = 32  # elements that are rotated together
_ADDED = 16  # rows that are added one by one; each takes instructions of its own
_TAIL = 8.0  # near sqrt(GROUP), by which `rotate` makes typical numbers smaller
TINY = 2.0**-126  # the smallest normal float32 and bfloat16: XLA takes less for zero


def to_float32(x: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Convert to float32; a finite float64 beyond its range becomes the largest number."""
    if x.dtype.itemsize <= 4:
        return x.astype(jnp.float32)
    largest = float(jnp.finfo(jnp.float32).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(jnp.float32)


def split(x: Shaped[Array, "*rows n"], block: int) -> Shaped[Array, "*rows k b"]:
    """Cut each row into blocks, the last filled up with zeros."""
    blocks = math.ceil(x.shape[-1] / block)
    if missing := blocks * block - x.shape[-1]:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], blocks, block)


def join(x_kb: Shaped[Array, "*rows k b"], num: int) -> Shaped[Array, "*rows n"]:
    """The blocks of each row joined, without the padding after its `num` elements."""
    *rows, blocks, block = x_kb.shape
    return x_kb.reshape(*rows, blocks * block)[..., :num]


def add_up(rows: Shaped[Array, "num ..."]) -> Shaped[Array, ...]:
    """The sum over the leading dim, up to 16 of it one after the other, as the kernels add them.

    `jnp.sum` gives the same sum, but XLA:CPU makes it a pass of its own, which takes 5 times as
    long as additions fused with what makes the rows.
    """
    if len(rows) > _ADDED:
        return jnp.sum(rows, axis=0)
    return functools.reduce(operator.add, rows)


def _index(x_kb: Shaped[Array, "*rows k b"]) -> UInt32[Array, "*rows k b"]:
    """The position of each element in its row."""
    shape, dims = x_kb.shape, x_kb.ndim
    block = lax.broadcasted_iota(jnp.uint32, shape, dims - 2)
    return block * jnp.uint32(shape[-1]) + lax.broadcasted_iota(jnp.uint32, shape, dims - 1)


def scales(
    x_kb: Float32[Array, "*rows k b"], limit: float, dtype: DTypeLike, divisor: int = 1
) -> Float32[Array, "*rows k"]:
    """The scale of each block, as its receiver will read it; NaN if not all of it is finite.

    Of `x / divisor`, which itself is never made (`divide`).

    A bfloat16 scale is rounded up: one that is too small would clip the largest number. It
    is rounded on its bits, and stays a float32 here: XLA may drop a cast to bfloat16 and
    back, and the codes would then belong to another scale than the one sent.
    """
    amax = jnp.max(jnp.abs(x_kb), axis=-1)
    largest = jnp.maximum(amax * not_above(1 / (limit * divisor)), TINY)
    scale = jnp.where(jnp.isfinite(amax), largest, jnp.nan)
    if jnp.dtype(dtype).itemsize == 4:
        return scale
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    bits = jnp.where(jnp.isnan(scale), bits, bits + jnp.uint32(0xFFFF))
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)


def not_above(x: float) -> np.float32:
    """The largest float32 that is not above `x`.

    With it `limit * s` has the scale `s`, and not the next one, if that is a bfloat16.
    """
    nearest = np.float32(x)
    return nearest if float(nearest) <= x else np.nextafter(nearest, np.float32(0))


def write_scales(scale_k: Float32[Array, "*rows k"], dtype: DTypeLike) -> UInt8[Array, "*rows m"]:
    """The bytes of scales: all 4, or the upper 2, which are a bfloat16."""
    bits = lax.bitcast_convert_type(scale_k, jnp.uint32)
    if jnp.dtype(dtype).itemsize == 2:
        bits = (bits >> jnp.uint32(16)).astype(jnp.uint16)
    sent = lax.bitcast_convert_type(bits, jnp.uint8)
    return sent.reshape(*sent.shape[:-2], sent.shape[-2] * sent.shape[-1])


def read_scales(sent: UInt8[Array, "*rows m"], dtype: DTypeLike) -> Float32[Array, "*rows k"]:
    """The scales in the bytes `sent` by `write_scales`, as float32."""
    size = jnp.dtype(dtype).itemsize
    sent = sent.reshape(*sent.shape[:-1], sent.shape[-1] // size, size)
    if size == 4:
        return lax.bitcast_convert_type(sent, jnp.float32)
    bits = lax.bitcast_convert_type(sent, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << jnp.uint32(16), jnp.float32)


def divide(
    x_kb: Float32[Array, "*rows k b"],
    scale_k: Float32[Array, "*rows k"],
    limit: float,
    scale_dtype: DTypeLike,
    divisor: int = 1,
) -> Float32[Array, "*rows k b"]:
    """Each number over `divisor`, in units of its scale, without what rounding adds to the largest.

    Each is multiplied once: of two factors one after the other that many numbers
    share, some versions of XLA multiply the factors first, and others do not.
    """
    inverse_k = inverse(scale_k, scale_dtype, divisor)
    return jnp.clip(x_kb * inverse_k[..., None], -limit, limit)


def inverse(
    scale: Float32[Array, "*shape"], dtype: DTypeLike, divisor: int = 1
) -> Float32[Array, "*shape"]:
    """The factor `1 / (scale * divisor)`; if scales are bfloat16, equal on every device."""
    first = 1 / scale
    if jnp.dtype(dtype).itemsize == 2:
        first = refine(first, scale)
    return first if divisor == 1 else first * np.float32(1 / divisor)


def refine(
    first: Float32[Array, "*shape"], scale: Float32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """The reciprocal of bfloat16 scales correctly rounded, from one that is nearly so.

    That of a GPU is at times the float next to it (`rcp.approx`, which XLA takes as well as
    Mosaic). This is a step of Newton's method. A scale has 8 bits, so its products with the
    halves of the reciprocal's 24 are exact, and so is the error that they add up to. Where the
    lower half could be too small for a float, above 2**100, nothing is done.
    """
    bits = lax.bitcast_convert_type(first, jnp.uint32) & jnp.uint32(0xFFFFF000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    error = (1 - scale * high) - scale * (first - high)
    return first + jnp.where(scale < 2.0**100, first * error, 0)


def uniforms(
    x_kb: Float32[Array, "*rows k b"],
    scale_k: Float32[Array, "*rows k"],
    seed: UInt32[Array, ""],
    start: int = 0,
) -> Float32[Array, "*rows k b"]:
    """Numbers in [0, 1): a hash of the seed, the scale, the place in the row, and the number.

    Places count from `start`.
    """
    key_k = mix(lax.bitcast_convert_type(scale_k, jnp.uint32) ^ mix(seed))
    index_kb = _index(x_kb) + jnp.uint32(start)
    h = index_kb * jnp.uint32(0x9E3779B9) + key_k[..., None]
    h = mix(h ^ lax.bitcast_convert_type(x_kb, jnp.uint32))
    return (h >> jnp.uint32(8)).astype(jnp.int32).astype(jnp.float32) * 2.0**-24


def mix(h: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A bijection of 32 bits; each bit of its input changes half of its output (lowbias32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = (h ^ (h >> jnp.uint32(shift))) * jnp.uint32(factor)
    return h ^ (h >> jnp.uint32(16))


def round_to_integer(
    x: Float32[Array, "*shape"], u: Float32[Array, "*shape"] | None
) -> Float32[Array, "*shape"]:
    """The nearest integer (of two, the even one); with `u` the one above if `u < x - floor(x)`."""
    if u is None:
        return jnp.round(x)
    below = jnp.floor(x)
    return below + (u < x - below).astype(jnp.float32)


def round_to_float(
    x: Float32[Array, "*shape"], u: Float32[Array, "*shape"] | None, dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """Round to a float of 8 bits, whose range holds `x`; with `u` at random (`round_to_integer`).

    Its numbers around `x` are multiples of a power of two. By that, and by its reciprocal, it
    is exact to multiply.
    """
    if u is None:
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    binade = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    smallest = np.float32(info.smallest_normal).view(np.uint32)
    step = jnp.maximum(binade, smallest) - jnp.uint32(info.nmant << 23)
    inverse = lax.bitcast_convert_type(jnp.uint32(0x7F000000) - step, jnp.float32)
    step = lax.bitcast_convert_type(step, jnp.float32)
    return (round_to_integer(x * inverse, u) * step).astype(dtype)


def rotate(x_kb: Float32[Array, "*rows k b"], num: int) -> Float32[Array, "*rows k b"]:
    """Multiply each full group of 32 by H/32, where H is Hadamard's matrix of +1 and -1.

    An outlier is spread over its group, which needs a smaller scale. No sum overflows. What
    is left over at the end of the row is divided by 8, to be about as much smaller.
    """
    return _rotate(x_kb, num, 1 / GROUP, 1 / _TAIL)


def unrotate(x_kb: Float32[Array, "*rows k b"], num: int) -> Float32[Array, "*rows k b"]:
    """Multiply by H, the inverse of H/32. Codes are added exactly, in whatever order.

    The sum of several messages, codes times scales, is rounded 31 times here.
    """
    return _rotate(x_kb, num, 1.0, _TAIL)


def _rotate(
    x_kb: Float32[Array, "*rows k b"], num: int, factor: float, tail_factor: float
) -> Float32[Array, "*rows k b"]:
    # A product with a matrix is one pass. Sums and differences are five, which XLA does not
    # fuse into one (CPU: 8 times as long).
    signs = np.ones((1, 1), np.float32)
    while len(signs) < GROUP:
        signs = np.block([[signs, signs], [signs, -signs]])
    *rows, blocks, block = x_kb.shape
    x = x_kb.reshape(*rows, blocks * block // GROUP, GROUP)
    rotated = jnp.matmul(x, jnp.asarray(signs * factor), precision=lax.Precision.HIGHEST)
    rotated_kb, whole = rotated.reshape(x_kb.shape), num // GROUP * GROUP
    if whole == num:
        return rotated_kb
    return jnp.where(_index(x_kb) < jnp.uint32(whole), rotated_kb, x_kb * tail_factor)


def pack(codes_kb: UInt8[Array, "*rows k b"], num: int, bits: int) -> UInt8[Array, "*rows m"]:
    """Codes of 4 bits two per byte: `i` below, `i + b/2` above; a partial block by its half."""
    check_packable(bits)
    if bits == 8:
        return join(codes_kb, num)
    *rows, _, block = codes_kb.shape
    whole, rest = divmod(num, block)
    packed = _pack_halves(codes_kb[..., :whole, :])
    packed = packed.reshape(*rows, whole * (block // 2))
    if not rest:
        return packed
    tail = _pack_halves(codes_kb[..., whole, : 2 * math.ceil(rest / 2)])
    return jnp.concatenate((packed, tail), axis=-1)


def _pack_halves(codes: UInt8[Array, "*rows b"]) -> UInt8[Array, "*rows half"]:
    halves = codes.reshape(*codes.shape[:-1], 2, codes.shape[-1] // 2)
    half = lax.broadcasted_iota(jnp.uint8, halves.shape, halves.ndim - 2)
    # A sum, since XLA:CPU makes a loop of it that is 2.5 times as fast as of `low | high << 4`.
    return jnp.sum((halves & jnp.uint8(15)) << (half * jnp.uint8(4)), axis=-2, dtype=jnp.uint8)


def unpack(
    packed: UInt8[Array, "*rows m"], num: int, block: int, bits: int
) -> UInt8[Array, "*rows k b"]:
    """The codes in `packed`, one per byte, in blocks; codes of 4 bits are sign-extended."""
    check_packable(bits)
    if bits == 8:
        return split(packed, block)
    *rows, _ = packed.shape
    whole, rest = divmod(num, block)
    size = whole * (block // 2)
    codes_kb = _unpack_halves(packed[..., :size].reshape(*rows, whole, block // 2))
    if not rest:
        return codes_kb
    tail = split(_unpack_halves(packed[..., size:])[..., :rest], block)
    return jnp.concatenate((codes_kb, tail), axis=-2)


def _unpack_halves(packed: UInt8[Array, "*rows half"]) -> UInt8[Array, "*rows b"]:
    pair = jnp.concatenate((packed << jnp.uint8(4), packed), axis=-1)
    extended = lax.bitcast_convert_type(pair, jnp.int8) >> jnp.int8(4)
    return lax.bitcast_convert_type(extended, jnp.uint8)
