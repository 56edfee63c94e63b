"""`NVFloat4` against NVFP4 written again in numpy, with the casts of `ml_dtypes`."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxzero as jz

from . import _codec_oracle as oracle

CODEC = jz.NVFloat4()
NAN = 0x7F


def row_scale(largest):
    """In 16 significant bits, so that the largest scale of a block is 448 at most."""
    exact = np.float32(largest) * np.nextafter(np.float32(1 / 2688), np.float32(0))
    if float(np.float32(1 / 2688)) <= 1 / 2688:
        exact = np.float32(largest) * np.float32(1 / 2688)
    mantissa, exponent = math.frexp(max(float(exact), 2.0**-117))
    return math.ldexp(math.ceil(mantissa * 2**16), exponent - 16)


def encoded(x):
    """The elements (as numbers of 4 bits), blocks' scales and row's scale of a row of float32."""
    x = np.where(np.abs(x) < oracle.TINY, np.copysign(0, x), x).astype(np.float32)
    blocks = [x[i : i + 16] for i in range(0, len(x), 16)]
    is_finite = [bool(np.isfinite(part).all()) for part in blocks]
    largest = [
        np.abs(part).max() if ok else 0.0 for part, ok in zip(blocks, is_finite, strict=True)
    ]
    whole = row_scale(max(largest, default=0.0))
    inverse = np.float32(1) / np.float32(6 * whole)  # rounded, as is the product with it
    elements, scales = [], []
    for part, ok, size in zip(blocks, is_finite, largest, strict=True):
        scale = np.minimum(np.float32(size) * inverse, 448).astype(ml_dtypes.float8_e4m3fn)
        product = np.float32(float(scale) * whole)  # exact
        scaled = part * (np.float32(1) / product) if ok and product else np.copysign(0, part)
        scaled = np.clip(scaled, -6, 6).astype(np.float32)
        elements.append(scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15)
        scales.append(int(scale.view(np.uint8)) if ok else NAN)
    return np.concatenate(elements or [np.zeros(0, np.uint8)]), np.array(scales, np.uint8), whole


def decoded(elements, scales, whole):
    numbers = elements.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * whole
    return numbers * np.repeat(scales, 16)[: len(elements)]


def take_apart(message, num):
    size = math.ceil(num / 2)
    codes = np.stack([message[:size] & 15, message[:size] >> 4], axis=1).reshape(-1)
    assert num % 2 == 0 or codes[num] == 0
    return codes[:num], message[size:-4], float(message[-4:].view(np.float32)[0])


def check(x):
    """Bit for bit, but for the elements of blocks that are NaN."""
    message = np.asarray(oracle.encoder(CODEC)(x))
    got = np.asarray(oracle.decoder(CODEC, x.shape[-1], x.dtype)(message))
    for row, bytes_, read in zip(x, message, got, strict=True):
        elements, scales, whole = encoded(row.astype(np.float32))
        codes, got_scales, got_whole = take_apart(bytes_, len(row))
        assert got_whole == whole
        np.testing.assert_array_equal(got_scales, scales)
        used = np.repeat((scales != NAN) & (scales != 0), 16)[: len(row)]
        np.testing.assert_array_equal(codes[used], elements[used])
        want = decoded(elements, scales, whole)
        largest = float(jnp.finfo(x.dtype).max)
        want = np.clip(want, -largest, largest)
        is_tiny = np.abs(want) < max(oracle.TINY, float(jnp.finfo(x.dtype).smallest_normal))
        exact = np.where(is_tiny, 0, want).astype(np.float32).astype(x.dtype)
        np.testing.assert_array_equal(np.where(is_tiny, 0, read.astype(np.float32)), exact)


@pytest.mark.parametrize("num", [0, 1, 15, 16, 17, 301])
def test_messages_are_those_of_numpy(num):
    check(oracle.numbers(num))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float64])
def test_other_floats(dtype):
    with jax.enable_x64(dtype == np.float64):
        check(oracle.numbers(77, dtype))


@pytest.mark.parametrize("top", [-140, -126, -118, -100, 0, 100, 126])
def test_blocks_of_every_size_beside_each_other(top):
    """So scales from 448 down to zero, by way of those of e4m3 that are not normal."""
    rng = np.random.default_rng(0)
    exponents = np.repeat(np.arange(top, top - 26, -1), 16)
    signs = np.sign(rng.normal(size=exponents.size))
    x = np.ldexp(signs * rng.uniform(1, 2, exponents.size), exponents).astype(np.float32)
    check(x[None])
    got = oracle.round_trip(CODEC, x)
    assert np.isfinite(got).all()
    if top >= -90:
        assert got[0] and not got[-32:].any(), "Blocks below 2**-19 of the largest are zeros."


def test_elements_are_rounded_to_even():
    x = np.array([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -2.5, -5, 0.3, 5.1, 1, 0])
    x = np.float32(x) * 448  # the block's scale is 448, the row's is 1
    want = np.float32([6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -2, -4, 0.5, 6, 1, 0]) * 448
    np.testing.assert_array_equal(oracle.round_trip(CODEC, x), want)
    check(x[None])


def test_all_elements_and_scales_are_read():
    codes = np.tile(np.arange(16, dtype=np.uint8), 256)
    packed = codes[::2] | codes[1::2] << 4
    scales, whole = np.arange(256, dtype=np.uint8), np.float32(0.75)
    message = np.concatenate([packed, scales, whole[None].view(np.uint8)])
    got = np.asarray(oracle.decoder(CODEC, codes.size, jnp.float32)(message))
    want = decoded(codes, scales, 0.75)
    np.testing.assert_array_equal(got, want)
    known = ~np.isnan(want)  # zeros too have signs
    np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(want[known]))


def test_what_is_not_finite_spoils_its_block_only():
    clean = oracle.numbers(3 * 16 + 7)[0]
    for bad in [np.nan, -np.inf, np.inf]:
        x = clean.copy()
        x[20] = bad
        check(x[None])
        got = oracle.round_trip(CODEC, x)
        assert np.isnan(got[16:32]).all() and np.isfinite(np.delete(got, range(16, 32))).all()
        assert np.isnan(oracle.round_trip(CODEC, np.full(3, bad, np.float32))).all()


def test_zeros_and_the_largest_number_of_a_type():
    assert not oracle.round_trip(CODEC, np.zeros((2, 33), np.float32)).any()
    for dtype in (np.float32, np.float16, jnp.bfloat16):
        x = np.full(40, jnp.finfo(dtype).max, dtype)
        x[::3] = 0
        got = oracle.round_trip(CODEC, x)
        assert np.isfinite(got.astype(np.float32)).all()
        check(x[None])


def test_every_product_is_exact_in_any_order():
    """So receivers agree, however they are compiled."""
    message = np.asarray(oracle.encoder(CODEC)(oracle.numbers(301)[0]))
    codes, scales, whole = take_apart(message, 301)
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    each = np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32), 16)[:301]
    whole = np.float32(whole)
    np.testing.assert_array_equal((numbers * each) * whole, numbers * (each * whole))
    assert np.log2(whole) % 1, "A power of two would show nothing."


def test_same_bits_however_it_is_compiled():
    x = jnp.asarray(oracle.numbers((2, 70)).reshape(8, 70))
    whole = np.asarray(jax.jit(CODEC.encode)(x))
    np.testing.assert_array_equal(CODEC.encode(x), whole)
    np.testing.assert_array_equal(jax.jit(jax.vmap(CODEC.encode))(x), whole)
    decode = functools.partial(CODEC.decode, num=70, dtype=jnp.float32)
    np.testing.assert_array_equal(decode(jnp.asarray(whole)), jax.jit(jax.vmap(decode))(whole))


def test_what_a_user_sees():
    assert str(CODEC) == "nvfloat4/16"
    assert (CODEC.bits, CODEC.num_bytes(100, jnp.float32)) == (4, 50 + 7 + 4)
    assert len({CODEC, jz.NVFloat4(), jz.NVFloat4(block=32)}) == 2
