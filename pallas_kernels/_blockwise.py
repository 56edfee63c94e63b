"""Arithmetic of the block codecs: scales, rounding, rotation and packing, in float32.

A row of numbers is cut into blocks of `b` elements, the last filled up with zeros. Each block has a
scale `s = max|x| / limit`, where `limit` is the largest code, so that nothing clips. The code of
`x` is the one nearest to `x / s`, or with stochastic rounding one of the two around it.

[Note: exact zeros] A rotation would turn an exact zero among other numbers into a rounding error,
and Adam moves a weight by its learning rate for a gradient of any size. So a block that holds an
exact zero is not rotated: zero has the code 0, and a number that is 0 on every device stays 0 in
the sum. The sign of the scale, which is not needed otherwise, tells the two kinds of blocks apart:
in a format that rotates, the scale of an unrotated block is negative. Receivers add up rotated and
unrotated blocks separately, and rotate back the sum of the rotated ones.

Quotients are written as products with a reciprocal. XLA turns some quotients into such products but
not all, and codes would then depend on what an encoder is compiled together with.

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
from jaxtyping import Array, BFloat16, Bool, DTypeLike, Float, Float32, Shaped, UInt8, UInt32

from ._format import check_packable

GROUP = 32  # elements that are rotated together
ADDED = 16  # up to this many rows are added one by one in an unrolled sum
_TAIL = 8.0  # near sqrt(GROUP), by which `rotate` makes typical numbers smaller
TINY = 2.0**-126  # the smallest normal float32 and bfloat16; XLA treats smaller ones as zero


def to_float32(x: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Convert to float32; a finite float64 is clipped to the range of float32."""
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
    """Join the blocks of each row, and drop the padding after its `num` elements."""
    *rows, blocks, block = x_kb.shape
    return x_kb.reshape(*rows, blocks * block)[..., :num]


def add_up(rows: Shaped[Array, "num ..."]) -> Shaped[Array, ...]:
    """Sum over the leading dim; up to 16 rows are added one after the other, as kernels do.

    `jnp.sum` gives the same sum, but XLA:CPU runs it as a separate pass, which takes 5 times as
    long as additions that are fused with the computation of the rows.
    """
    if len(rows) > ADDED:
        return jnp.sum(rows, axis=0)
    parts = [lax.slice_in_dim(rows, i, i + 1) for i in range(len(rows))]
    return functools.reduce(operator.add, parts).reshape(rows.shape[1:])


def _index(x_kb: Shaped[Array, "*rows k b"]) -> UInt32[Array, "*rows k b"]:
    """Return the position of each element in its row."""
    shape, dims = x_kb.shape, x_kb.ndim
    block = lax.broadcasted_iota(jnp.uint32, shape, dims - 2)
    return block * jnp.uint32(shape[-1]) + lax.broadcasted_iota(jnp.uint32, shape, dims - 1)


def scales(
    largest: Float32[Array, "*shape"], limit: float, dtype: DTypeLike, divisor: int = 1
) -> Float32[Array, "*shape"]:
    """Return the scale of each block of `x / divisor`, with the bits that its message holds.

    `largest` is the largest `|x|` of each block, `limit` the largest code, and `dtype` the type of
    scales in messages. A block that is not all finite gets the scale NaN.

    A bfloat16 scale is rounded up: one that is too small would clip the largest number. It is
    rounded on its bits, and returned as float32: XLA may drop a cast to bfloat16 and back, and the
    codes would then belong to another scale than the one in the message.
    """
    exact = jnp.maximum(largest * not_above(1 / (limit * divisor)), TINY)
    scale = jnp.where(jnp.isfinite(largest), exact, jnp.nan)
    if jnp.dtype(dtype).itemsize == 4:
        return scale
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    # A bfloat16 is the upper half of a float32: this rounds up, and leaves a NaN one.
    bits = jnp.where(jnp.isnan(scale), bits, bits + jnp.uint32(0xFFFF))
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)


def not_above(x: float) -> np.float32:
    """Return the largest float32 that is not above `x`.

    `scales` multiplies by `not_above(1 / limit)`. If the largest number of a block is `limit * s`,
    for a bfloat16 `s`, the product is then at most `s`, and rounding up makes it `s`.
    """
    nearest = np.float32(x)
    return nearest if float(nearest) <= x else np.nextafter(nearest, np.float32(0))


def has_zero(x: Float[Array, "*shape"], axis: int) -> Bool[Array, "*rest"]:
    """Return whether `x` has an exact zero along `axis`, which is kept as a dim of size 1.

    On platforms that treat numbers below 2**-126 as zeros, such numbers count as zeros.
    """
    return jnp.min(jnp.abs(x), axis=axis, keepdims=True) == 0


def scales_of(scale: Float32[Array, "*shape"], *, rotated: bool) -> Float32[Array, "*shape"]:
    """Return the magnitudes of the scales of one kind of blocks, and 0 for the other kind.

    The kinds are the rotated and the unrotated blocks, told apart by the sign of `scale` ([Note:
    exact zeros]); `rotated` chooses one. NaN stays NaN.
    """
    return jnp.maximum(scale if rotated else -scale, 0)


def write_scales(scale_k: Float32[Array, "*rows k"], dtype: DTypeLike) -> UInt8[Array, "*rows m"]:
    """Return the bytes of each scale: all 4 for float32, or the upper 2 for bfloat16."""
    bits = lax.bitcast_convert_type(scale_k, jnp.uint32)
    if jnp.dtype(dtype).itemsize == 2:
        bits = (bits >> jnp.uint32(16)).astype(jnp.uint16)
    sent = lax.bitcast_convert_type(bits, jnp.uint8)
    return sent.reshape(*sent.shape[:-2], sent.shape[-2] * sent.shape[-1])


def read_scales(sent: UInt8[Array, "*rows m"], dtype: DTypeLike) -> Float32[Array, "*rows k"]:
    """Read scales from bytes as float32; the reverse of `write_scales`."""
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
    """Return `x / (scale * divisor)`, clipped to +-`limit`, since a rounding error may exceed it.

    Each number is multiplied by one factor. With two factors, some versions of XLA would multiply
    the factors with each other first, and others would not.
    """
    inverse_k = inverse(scale_k, scale_dtype, divisor)
    return jnp.clip(x_kb * inverse_k[..., None], -limit, limit)


def inverse(
    scale: Float32[Array, "*shape"], dtype: DTypeLike, divisor: int = 1
) -> Float32[Array, "*shape"]:
    """Return `1 / (scale * divisor)`; for bfloat16 scales it is equal on all hardware."""
    first = 1 / scale
    if jnp.dtype(dtype).itemsize == 2:
        first = refine(first, scale)
    return first if divisor == 1 else first * np.float32(1 / divisor)


def refine(
    first: Float32[Array, "*shape"], scale: Float32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Return the correctly rounded reciprocal of bfloat16 scales, given an approximation, `first`.

    A GPU's reciprocal (`rcp.approx`, which both XLA and Mosaic use) may be off by one unit in the
    last place. This function does one step of Newton's method. A scale has 8 bits, so its products
    with the halves of the reciprocal's 24 bits are exact, and so is the error computed from them.
    For scales above 2**100 the lower half could underflow, and `first` is returned unchanged.
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
    index_kb: UInt32[Array, "*rows k b"] | None = None,
) -> Float32[Array, "*rows k b"]:
    """Return a pseudo-random number in [0, 1) for each element, to round it stochastically.

    The number is a hash of `seed`, the block's scale, the element, and its index in its row. The
    first element of a row has the index `start`. `index_kb` gives the indices of elements that are
    not in the order of the row; `start` is added to them.
    """
    index = (_index(x_kb) if index_kb is None else index_kb) + jnp.uint32(start)
    return uniforms_at(index, x_kb, scale_k[..., None], seed)


def uniforms_at(
    index: UInt32[Array, "*shape"],
    x: Float32[Array, "*shape"],
    scale: Float32[Array, "*#shape"],
    seed: UInt32[Array, ""],
) -> Float32[Array, "*shape"]:
    """Return the random numbers of `uniforms`, given the index and the scale of each element."""
    key = mix(lax.bitcast_convert_type(scale, jnp.uint32) ^ mix(seed))
    # 2**32 over the golden ratio, and odd: it spreads neighbouring indices, one to one.
    h = index * jnp.uint32(0x9E3779B9) + key
    h = mix(h ^ lax.bitcast_convert_type(x, jnp.uint32))
    # A float32 has 24 bits: 32 would round up to 1, which is outside of the range.
    return (h >> jnp.uint32(8)).astype(jnp.int32).astype(jnp.float32) * 2.0**-24


def mix(h: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Hash 32 bits one to one, so that each input bit flips half of the output (lowbias32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = (h ^ (h >> jnp.uint32(shift))) * jnp.uint32(factor)
    return h ^ (h >> jnp.uint32(16))


def round_to_integer(
    x: Float32[Array, "*shape"], u: Float32[Array, "*shape"] | None
) -> Float32[Array, "*shape"]:
    """Round to the nearest integer, ties to even; or stochastically, by random numbers `u`.

    Numbers `u` are in [0, 1): `x` is rounded up if `u < x - floor(x)`, and down otherwise.
    """
    if u is None:
        return jnp.round(x)
    below = jnp.floor(x)
    return below + (u < x - below).astype(jnp.float32)


def round_to_float(
    x: Float32[Array, "*shape"], u: Float32[Array, "*shape"] | None, dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """Round to an 8-bit float type whose range contains `x`; or stochastically, by numbers `u`.

    The 8-bit floats around `x` are multiples of a power of two. Products with that power, and with
    its reciprocal, are exact. So `x` is divided by it, rounded to an integer, and multiplied by it.
    """
    if u is None:
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    binade = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    smallest = np.float32(info.smallest_normal).view(np.uint32)
    step = jnp.maximum(binade, smallest) - jnp.uint32(info.nmant << 23)
    # Its reciprocal has the biased exponent 254 - e: 254 << 23 is 0x7F000000.
    inverse = lax.bitcast_convert_type(jnp.uint32(0x7F000000) - step, jnp.float32)
    step = lax.bitcast_convert_type(step, jnp.float32)
    return (round_to_integer(x * inverse, u) * step).astype(dtype)


def rotate(
    x_kb: Float32[Array, "*rows k b"], num: int, width: int = GROUP
) -> tuple[Float32[Array, "*rows k b"], Bool[Array, "*rows k"], Float32[Array, "*rows k"]]:
    """Multiply each group of 32 numbers by H/32, where H is Hadamard's matrix of +1 and -1.

    This spreads an outlier over its group, which then needs a smaller scale. No sum overflows.
    Blocks with an exact zero in a full group are not changed ([Note: exact zeros]).

    Args:
        x_kb: rows, cut into blocks.
        num: elements of a row without padding. If the last ones do not fill a group, they are
            divided by 8 instead, and so shrink about as much.
        width: size of the matrix by which the numbers are multiplied, which has H/32 along its
            diagonal: 128 fills the lanes of a TPU. It divides the elements of all blocks of a row.

    Returns:
        The blocks; whether each block is unchanged; and the largest magnitude in each. The
        magnitudes are computed from `x_kb` and from its product, so that XLA:CPU does not write
        the returned blocks to memory for them.
    """
    whole = num // GROUP * GROUP
    tested_kb = x_kb
    if whole < x_kb.shape[-2] * x_kb.shape[-1]:  # neither the tail nor padding is rotated
        tested_kb = jnp.where(_index(x_kb) < jnp.uint32(whole), x_kb, 1)
    is_kept = has_zero(tested_kb, -1)
    rotated_kb = _rotate(x_kb, num, 1 / GROUP, 1 / _TAIL, width)
    largest_k, of_rotated_k = (jnp.max(jnp.abs(x), axis=-1) for x in (x_kb, rotated_kb))
    is_kept_k = is_kept[..., 0]
    largest_k = jnp.where(is_kept_k, largest_k, of_rotated_k)
    return jnp.where(is_kept, x_kb, rotated_kb), is_kept_k, largest_k


def unrotate(
    x_kb: Float32[Array, "*rows k b"], num: int, width: int = GROUP
) -> Float32[Array, "*rows k b"]:
    """Multiply each full group of 32 by H, the inverse of H/32; `num` and `width` as in `rotate`.

    If `x_kb` are codes, sums in the product are exact. If they are sums of several messages, each
    element of the product is rounded up to 31 times.
    """
    return _rotate(x_kb, num, 1.0, _TAIL, width)


def _rotate(
    x_kb: Float32[Array, "*rows k b"], num: int, factor: float, tail_factor: float, width: int
) -> Float32[Array, "*rows k b"]:
    # A product with a matrix is one pass. Sums and differences are five, which XLA does not
    # fuse into one (CPU: 8 times as long).
    *rows, blocks, block = x_kb.shape
    signs = hadamard(width)
    x = x_kb.reshape(*rows, blocks * block // width, width)
    rotated = jnp.matmul(x, jnp.asarray(signs * factor), precision=lax.Precision.HIGHEST)
    rotated_kb, whole = rotated.reshape(x_kb.shape), num // GROUP * GROUP
    if whole == num:
        return rotated_kb
    return jnp.where(_index(x_kb) < jnp.uint32(whole), rotated_kb, x_kb * tail_factor)


def bfloat16_parts(x: Float[Array, "*shape"]) -> list[BFloat16[Array, "*shape"]]:
    """Return bfloat16 arrays whose exact sum is `x`: `x` itself if it is bfloat16, else three.

    The one with the smallest numbers is first. They are made of the bits of `x`, because XLA may
    drop a cast to bfloat16 and back.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    rest, parts = to_float32(x), []
    for _ in range(3):
        bits = lax.bitcast_convert_type(rest, jnp.uint32) & jnp.uint32(0xFFFF0000)
        parts.append(lax.bitcast_convert_type(bits, jnp.float32))
        rest = rest - parts[-1]
    return [part.astype(jnp.bfloat16) for part in reversed(parts)]


def hadamard(width: int) -> Float32[np.ndarray, "width width"]:
    """Return a matrix with Hadamard's 32 x 32 matrix, repeated, along its diagonal; 0 elsewhere."""
    signs = np.ones((1, 1), np.float32)
    while len(signs) < GROUP:
        signs = np.block([[signs, signs], [signs, -signs]])
    return np.kron(np.eye(width // GROUP, dtype=np.float32), signs)


def pack(codes_kb: UInt8[Array, "*rows k b"], num: int, bits: int) -> UInt8[Array, "*rows m"]:
    """Pack the first `num` codes of each row to bytes; pairs of 4-bit codes share a byte.

    A pair consists of the codes `i` (in the lower half of the byte) and `i + b/2` of a block. In
    a last block with fewer codes, the codes of a pair are half of that number apart.
    """
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
    """Unpack codes to one per byte, in blocks of `block`; 4-bit codes are sign-extended."""
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
