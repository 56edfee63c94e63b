"""`MXFloat8` against the OCP microscaling specification, written again in numpy and float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz

from . import _codec_oracle as oracle

E4M3, E5M2 = jz.MXFloat8(), jz.MXFloat8(dtype=jnp.float8_e5m2)
LARGEST = {E4M3: (448.0, 8), E5M2: (57344.0, 15)}  # the largest element, and its exponent
NAN = 255

each_type = pytest.mark.parametrize("codec", [E4M3, E5M2], ids=str)


def encoded(codec, x):
    """The elements and scales of one row of float32 numbers (section 6.3 of the specification)."""
    limit, exponent = LARGEST[codec]
    x = np.where(np.abs(x) < oracle.TINY, np.copysign(0, x), x)  # XLA takes these for zero
    elements, scales = [], []
    for start in range(0, len(x), 32):
        part = x[start : start + 32].astype(np.float64)
        if not np.isfinite(part).all():
            scales.append(NAN)
            elements.append(np.full(len(part), NAN))
            continue
        largest = np.abs(part).max()
        shared = int(np.floor(np.log2(largest))) - exponent if largest else -127
        shared = max(shared, -127)
        scaled = np.clip(np.ldexp(part, -shared), -limit, limit).astype(np.float32)  # exact
        elements.append(scaled.astype(codec.dtype).view(np.uint8))
        scales.append(shared + 127)
    return np.concatenate(elements) if elements else np.zeros(0), np.array(scales)


def decoded(codec, elements, scales):
    powers = np.repeat(np.ldexp(1.0, np.asarray(scales, int) - 127), 32)[: len(elements)]
    powers[np.repeat(scales == NAN, 32)[: len(elements)]] = np.nan
    return elements.astype(np.uint8).view(codec.dtype).astype(np.float64) * powers


def check(codec, x):
    """Bit for bit, but the elements of blocks that are NaN, of which nobody reads any."""
    message = np.asarray(oracle.encoder(codec)(x))
    got = np.asarray(oracle.decoder(codec, x.shape[-1], x.dtype)(message))
    for row, bytes_, read in zip(np.atleast_2d(x), message, got, strict=True):
        elements, scales = encoded(codec, row.astype(np.float32))
        np.testing.assert_array_equal(bytes_[len(row) :], scales)
        used = np.repeat(scales != NAN, 32)[: len(row)]
        np.testing.assert_array_equal(bytes_[: len(row)][used], elements[used])
        want = decoded(codec, elements, scales)
        with np.errstate(over="ignore"):
            largest = float(jnp.finfo(x.dtype).max)
            want = np.clip(want, -largest, largest)
        is_tiny = np.abs(want) < max(oracle.TINY, float(jnp.finfo(x.dtype).smallest_normal))
        exact = np.where(is_tiny, 0, want).astype(np.float32).astype(x.dtype)
        np.testing.assert_array_equal(np.where(is_tiny, 0, read.astype(np.float32)), exact)


@each_type
@pytest.mark.parametrize("num", [0, 1, 31, 32, 33, 301])
def test_messages_are_those_of_the_specification(codec, num):
    check(codec, oracle.numbers(num))


@each_type
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float64])
def test_other_floats(codec, dtype):
    with jax.enable_x64(dtype == np.float64):
        check(codec, oracle.numbers(77, dtype))


@each_type
def test_every_size_of_numbers(codec):
    """Scales from the least to the largest, blocks of zeros, and numbers that are not normal."""
    rng = np.random.default_rng(0)
    exponents = np.repeat(np.arange(-149, 127), 32)
    x = (np.sign(rng.normal(size=exponents.size)) * rng.uniform(1, 2, exponents.size)).astype(
        np.float32
    )
    x = np.concatenate([np.ldexp(x, exponents).astype(np.float32), np.zeros(64, np.float32)])
    check(codec, x[None])


@each_type
def test_elements_are_rounded_to_even_and_saturate(codec):
    """All elements, the middles between them and what is next to those, and above the largest."""
    values = np.arange(256, dtype=np.uint8).view(codec.dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    limit, exponent = LARGEST[codec]
    above = np.float32(2.0 ** (exponent + 1)) * np.float32([0.9, 0.93, 0.95, 0.999, -0.999])
    near = [np.nextafter(middles, np.float32(s)) for s in (-np.inf, np.inf)]
    x = np.concatenate([values, middles, *near, above])
    x = np.concatenate([x, np.zeros(-len(x) % 31, np.float32)]).reshape(-1, 31)
    first = np.full((len(x), 1), 2.0**exponent, np.float32)  # the scale is 1
    x = np.concatenate([first, x], axis=1)
    check(codec, x)
    got = oracle.round_trip(codec, x)
    assert np.abs(got).max() == limit
    kept = np.isin(x, values)
    np.testing.assert_array_equal(got[kept], x[kept])


@each_type
def test_what_is_not_finite_spoils_its_block_only(codec):
    clean = oracle.numbers(3 * 32 + 7)[0]
    for bad in [np.nan, -np.inf, np.inf]:
        x = clean.copy()
        x[40] = bad
        got, want = oracle.round_trip(codec, x), oracle.round_trip(codec, clean)
        assert np.isnan(got[32:64]).all()
        np.testing.assert_array_equal(np.delete(got, range(32, 64)), np.delete(want, range(32, 64)))
        check(codec, x[None])


@each_type
def test_every_byte_is_read(codec):
    """Also scales that this encoder never writes, and elements that are infinite or NaN."""
    elements, scales = np.tile(np.arange(256, dtype=np.uint8), 256), np.arange(256)
    scales_of = np.repeat(scales, 8).astype(np.uint8)
    got = oracle.decoder(codec, elements.size, jnp.float32)(np.concatenate([elements, scales_of]))
    with np.errstate(invalid="ignore", over="ignore"):
        want = decoded(codec, elements, scales_of)
    largest = float(np.finfo(np.float32).max)
    want = np.clip(want, -largest, largest)
    want = np.where(np.abs(want) < oracle.TINY, 0, want)
    got = np.where(np.abs(got) < oracle.TINY, 0, got)
    np.testing.assert_array_equal(got, want.astype(np.float32))


def test_same_bits_however_it_is_compiled():
    x = jnp.asarray(oracle.numbers((2, 70)).reshape(8, 70))
    whole = np.asarray(jax.jit(E4M3.encode)(x))
    np.testing.assert_array_equal(E4M3.encode(x), whole)
    np.testing.assert_array_equal(jax.jit(jax.vmap(E4M3.encode))(x), whole)
    decode = functools.partial(E4M3.decode, num=70, dtype=jnp.float32)
    np.testing.assert_array_equal(decode(jnp.asarray(whole)), jax.jit(jax.vmap(decode))(whole))


def test_what_a_user_sees():
    assert (str(E4M3), str(E5M2)) == ("mx_float8_e4m3fn/32", "mx_float8_e5m2/32")
    assert jz.MXFloat8(dtype="float8_e5m2") == E5M2 != E4M3
    assert (E4M3.bits, E4M3.num_bytes(100, jnp.float32)) == (8, 104)
    with pytest.raises(ValueError, match="`dtype` of `MXFloat8` must be.*e4m3fn.*got 'int8'"):
        jz.MXFloat8(dtype="int8")
