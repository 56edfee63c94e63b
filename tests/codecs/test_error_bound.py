"""One property for every codec: what arrives is as near as `error_bound` says."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz

from . import _codec_oracle as oracle
from .test_new_codec import Int6

UNDERFLOW = 2.0**-120  # what `Codec.error_bound` leaves to float32
CODECS = {
    "int8": jz.Int8(block=32),
    "int8 rotated": jz.Int8(block=64, hadamard=32),
    "int4 at random": jz.Int4(block=32, rounding="stochastic"),
    "int4 float32": jz.Int4(block=32, scale_dtype=jnp.float32, hadamard=32),
    "e4m3": jz.Float8(block=32),
    "e5m2 rotated, at random": jz.Float8(
        block=32, dtype=jnp.float8_e5m2, hadamard=32, rounding="stochastic"
    ),
    "mx e4m3": jz.MXFloat8(),
    "mx e5m2": jz.MXFloat8(dtype=jnp.float8_e5m2),
    "nv": jz.NVFloat4(),
    "int6": Int6(),
    "cast bfloat16": jz.Cast(jnp.bfloat16),
    "cast float16": jz.Cast(jnp.float16),
    "cast e4m3": jz.Cast(jnp.float8_e4m3fn),
}
NUM = 70

each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def _check(codec, x, seed=0):
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.abs(oracle.round_trip(codec, x, seed).astype(np.float64) - x)
        bound = codec.error_bound(x)
    assert bound.shape == x.shape and bound.dtype == np.float64
    assert not np.isnan(bound).any() and (bound >= 0).all()
    assert np.isinf(bound[~np.isfinite(x)]).all()
    known = np.isfinite(bound)
    assert (error[known] <= bound[known] + UNDERFLOW).all()
    return error, bound


@each_codec
@hypothesis.given(
    hnp.arrays(np.float32, NUM, elements=st.floats(width=32), fill=st.nothing()),
    st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=60)
def test_any_floats(codec, x, seed):
    _check(codec, x, np.uint32(seed))


@each_codec
@hypothesis.given(
    hnp.arrays(np.float32, NUM, elements=st.floats(-2, 2, width=32), fill=st.nothing()),
    st.integers(-120, 120),
)
@hypothesis.settings(max_examples=30)
def test_numbers_of_one_size(codec, x, exponent):
    """All finite, so that the bound must be too, but where a cast's range ends."""
    x = np.ldexp(x, exponent).astype(np.float32)
    _, bound = _check(codec, x)
    assert isinstance(codec, jz.Cast) or np.isfinite(bound).all()


@each_codec
def test_zeros_arrive_as_zeros(codec):
    """Also the only one in a block of large numbers, and whatever the sign and the seed."""
    x = np.random.default_rng(1).standard_t(2, size=(8, NUM)).astype(np.float32)
    is_zero = np.random.default_rng(2).random(x.shape) < np.linspace(0, 0.5, 8)[:, None]
    x[is_zero] = np.where(x[is_zero] < 0, np.float32(-0.0), 0)
    for seed in (0, 1):
        assert not oracle.round_trip(codec, x, np.uint32(seed))[is_zero].any()


@each_codec
def test_the_bound_says_something(codec):
    """Of normal numbers the worst loses half of what is allowed, unless many share the bound."""
    x = np.random.default_rng(0).normal(size=(64, 320)).astype(np.float32)
    error, bound = _check(codec, x)
    shared = getattr(codec, "hadamard", None)
    assert (error / bound).max() > (0.15 if shared else 0.5)
    assert (bound <= np.abs(x).max() / (1 if shared else 4)).all()


@pytest.mark.parametrize("codec", [jz.Int8(block=32), jz.MXFloat8(), jz.NVFloat4()], ids=str)
def test_numbers_beyond_float32(codec):
    bound = codec.error_bound(np.array([1e300, 1.0, 0.0]))
    assert 0.99e300 <= bound[0] <= 1.01e300 and np.isfinite(bound).all()
    assert codec.error_bound(np.zeros((2, 0), np.float32)).shape == (2, 0)


def test_larger_blocks_and_random_rounding_have_larger_bounds():
    x = oracle.numbers(256)
    small, large = jz.Int8(block=32), jz.Int8(block=256)
    random = dataclasses.replace(small, rounding="stochastic")
    assert (small.error_bound(x) <= large.error_bound(x)).all()
    assert (small.error_bound(x) < random.error_bound(x)).all()
