"""Block codecs written again in numpy and float64, and what a message must then fulfil.

A message is taken apart by what its format says, not by the codec that wrote it.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import jaxzero as jz

TINY = 2.0**-126  # the smallest normal float32: XLA may take what is smaller for zero
EPS = 2.0**-24  # of one rounding in float32


@functools.cache
def encoder(codec):
    return jax.jit(lambda x, seed=0: codec.encode(x, seed=seed))


@functools.cache
def decoder(codec, num, dtype):
    return jax.jit(lambda message: codec.decode(message, num, dtype))


def round_trip(codec, x, seed=0):
    message = encoder(codec)(x, seed)
    return np.asarray(decoder(codec, x.shape[-1], x.dtype)(message))


def limit(codec):
    return {"Int8": 127, "Int4": 7}.get(type(codec).__name__) or float(jnp.finfo(codec.dtype).max)


def take_apart(codec, message, num):
    """The codes, as numbers, and each one's scale, of one message."""
    message, bits = np.asarray(message), 4 if isinstance(codec, jz.Int4) else 8
    size = math.ceil(num * bits / 8)
    codes, scales = message[:size], message[size:].view(codec.scale_dtype).astype(np.float64)
    assert len(scales) == math.ceil(num / codec.block)
    scales = np.repeat(scales, codec.block)[:num]
    if not isinstance(codec, jz.Int4):
        kind = np.int8 if isinstance(codec, jz.Int8) else codec.dtype
        return codes.view(kind).astype(np.float64), scales
    nibbles = np.zeros(num, np.int64)
    for start in range(0, num, codec.block):
        length = min(codec.block, num - start)
        part = codes[start // 2 : start // 2 + math.ceil(length / 2)].astype(np.int64)
        nibbles[start : start + length] = np.concatenate([part % 16, part // 16])[:length]
    return np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.float64), scales


def rotate(x, group_factor, tail_factor):
    """Full groups of 32 times Hadamard's matrix, the rest as it is, each times a factor."""
    signs = np.array([[(-1.0) ** (i & j).bit_count() for i in range(32)] for j in range(32)])
    whole = len(x) // 32 * 32
    groups = x[:whole].reshape(-1, 32) @ signs * group_factor
    return np.concatenate([groups.reshape(-1), x[whole:] * tail_factor])


def sums(x):
    """The sum of each group of 32, for each of its elements; 0 for the rest."""
    whole = len(x) // 32 * 32
    groups = np.repeat(x[:whole].reshape(-1, 32).sum(1), 32)
    return np.concatenate([groups, np.zeros(len(x) - whole)])


def rotated(codec, x):
    """What is rounded: blocks without an exact zero are rotated, if the codec rotates at all."""
    kept = is_kept(codec, x)
    return np.where(kept, x, rotate(x, 1 / 32, 1 / 8)) if codec.hadamard else x


def is_kept(codec, x):
    """Whether each number's block is not rotated, for the sake of an exact zero in its groups."""
    is_zero = np.asarray(x == 0) & (np.arange(len(x)) < len(x) // 32 * 32)
    if not codec.hadamard or not len(x):
        return np.ones(len(x), bool)
    return largest_of_block(is_zero, codec.block)


def largest_of_block(x, block):
    largest = [x[i : i + block].max() for i in range(0, len(x), block)]
    return np.repeat(np.array(largest), block)[: len(x)]


def up_to_bfloat16(x):
    mantissa, exponent = np.frexp(x)  # in [1/2, 1): 8 bits of it are kept
    return np.ldexp(np.ceil(mantissa * 256) / 256, exponent)


def step(codec, x):
    """How far apart the codes around `x` are."""
    if not isinstance(codec, jz.Float8):
        return np.ones_like(x)
    info = jnp.finfo(codec.dtype)
    least = float(info.smallest_normal)
    return np.exp2(np.floor(np.log2(np.maximum(np.abs(x), least)))) * 2.0**-info.nmant


def rounding(codec):
    return 1.0 if codec.rounding == "stochastic" else 0.5


def check_message(codec, x, message):
    """Scales are the smallest that do not clip; codes are next to the numbers."""
    codes, scales = take_apart(codec, message, len(x))
    doubt = np.zeros(len(x))
    if codec.hadamard:  # sums of 32 in float32 round at most 32 times
        np.testing.assert_array_equal(np.signbit(scales), is_kept(codec, x))
        doubt = np.where(is_kept(codec, x), 0, 32 * EPS * sums(np.abs(x)) / 32)
        x, scales = rotated(codec, x), np.abs(scales)
    # The constant 1/limit and the product with it are rounded.
    low = largest_of_block(np.abs(x) - doubt, codec.block) / limit(codec) * (1 - 4 * EPS)
    high = largest_of_block(np.abs(x) + doubt, codec.block) / limit(codec) * (1 + EPS)
    high = up_to_bfloat16(high) if codec.scale_dtype == jnp.bfloat16 else high
    assert (scales >= low).all() and (scales <= np.maximum(high, TINY)).all()

    scaled = np.clip(x / scales, -limit(codec), limit(codec))
    # Rounded: the reciprocal of the scale, and the product with it.
    bound = rounding(codec) * step(codec, scaled) + 4 * EPS * np.abs(scaled) + doubt / scales
    assert (np.abs(codes - scaled) <= bound).all()
    assert (np.abs(codes) <= limit(codec)).all()


def check_reading(codec, message, y):
    """What is read are codes times scales. Sums of codes are exact, but for those of e5m2."""
    codes, scales = take_apart(codec, message, len(y))
    want = np.where(np.signbit(scales), codes, rotate(codes, 1, 8)) if codec.hadamard else codes
    want = want * np.abs(scales)
    info = jnp.finfo(y.dtype)
    # What is not normal in the type is rounded to one of few numbers, or to zero.
    error = np.abs(y.astype(np.float64) - want)
    assert (error <= (info.eps / 2 + EPS) * np.abs(want) + float(info.smallest_normal)).all()


def numbers(shape, dtype=np.float32):
    """Rows of normal, heavy-tailed, widely spread and discrete numbers."""
    rng = np.random.default_rng(7)
    rows = [
        rng.normal(size=shape),
        rng.standard_t(2, size=shape) * 30,
        rng.normal(size=shape) * np.exp2(rng.integers(-12, 6, size=shape)),
        rng.integers(-3, 4, size=shape) * 1e-6,
    ]
    return np.stack(rows).astype(dtype)
