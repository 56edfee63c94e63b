"""Codecs against numpy and float64, with derived bounds. Randomness is in `test_stochastic.py`."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero import pallas_kernels as pk

from . import _codec_oracle as oracle
from ._examples import CODECS, NEAREST, SMALL

LENGTHS = [(codec, 256) for codec in NEAREST] + [(codec, 301) for codec in CODECS]
LENGTHS += [(codec, num) for codec in SMALL.values() for num in (0, 1, 31, 32, 95)]

each_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)
each_small = pytest.mark.parametrize("codec", SMALL.values(), ids=SMALL)
integers = pytest.mark.parametrize("codec", [jz.Int8(block=32), jz.Int4(block=32)], ids=str)


@each_codec
def test_sizes_are_exact(codec):
    bits = 4 if isinstance(codec, jz.Int4) else 8
    for num in [*range(130), 255, 256, 257, 8191]:
        scales = math.ceil(num / codec.block) * jnp.dtype(codec.scale_dtype).itemsize
        size = math.ceil(num * bits / 8) + scales
        assert codec.num_bytes(num, jnp.float32) == size
        if num % 29:
            continue  # tracing takes a while
        rows = [(), (3,), (0,), (2, 5)][num % 4]
        x = jax.ShapeDtypeStruct((*rows, num), jnp.bfloat16)
        message = jax.eval_shape(codec.encode, x)
        assert (message.shape, message.dtype) == ((*rows, size), jnp.uint8)
        back = jax.eval_shape(lambda m, n=num: codec.decode(m, n, jnp.bfloat16), message)
        assert (back.shape, back.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize(("codec", "num"), LENGTHS, ids=str)
def test_messages_are_those_of_numpy(codec, num):
    x = oracle.numbers(num)
    messages = np.asarray(oracle.encoder(codec)(x))
    read = np.asarray(oracle.decoder(codec, num, x.dtype)(messages))
    for row in range(len(x)):
        oracle.check_message(codec, x[row].astype(np.float64), messages[row])
        oracle.check_reading(codec, messages[row], read[row])


@each_small
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float64])
def test_other_floats(codec, dtype):
    with jax.enable_x64(dtype == np.float64):
        x = oracle.numbers(77, dtype)
        messages = oracle.encoder(codec)(x)
        read = np.asarray(oracle.decoder(codec, 77, x.dtype)(messages))
    assert read.dtype == x.dtype
    for row in range(len(x)):
        oracle.check_message(codec, x[row].astype(np.float32).astype(np.float64), messages[row])
        oracle.check_reading(codec, messages[row], read[row])


@each_codec
def test_error_of_a_round_trip(codec):
    """Half a step of the code for "nearest", one for "stochastic", times the scale."""
    x = oracle.numbers(224)
    for row, got in zip(x.astype(np.float64), oracle.round_trip(codec, x), strict=True):
        rotated = oracle.rotated(codec, row)
        largest = oracle.largest_of_block(np.abs(rotated), codec.block)
        least_scale = largest / oracle.limit(codec)
        scale = least_scale * (1 + 2.0**-7)  # at most, once rounded up to bfloat16
        bound = scale * oracle.rounding(codec) * oracle.step(codec, rotated / least_scale)
        bound += 16 * oracle.EPS * largest
        error = got - row
        if codec.hadamard:  # it turns the errors of a group, and makes them sqrt(32) longer
            assert (np.sqrt(oracle.sums(error**2)) <= np.sqrt(32 * oracle.sums(bound**2))).all()
        else:
            assert (np.abs(error) <= bound).all()


@each_small
@hypothesis.given(
    hnp.arrays(np.float32, 70, elements=st.floats(width=32), fill=st.nothing()),
    st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=60)
def test_any_floats(codec, x, seed):
    """Finite blocks stay finite, and near; every other block arrives as NaN."""
    got = oracle.round_trip(codec, x, np.uint32(seed)).astype(np.float64)
    for start in range(0, 70, codec.block):
        part, read = x[start : start + codec.block], got[start : start + codec.block]
        if not np.isfinite(part).all():
            assert np.isnan(read).all()
            continue
        assert np.isfinite(read).all()
        part = part.astype(np.float64)
        # The largest step of all codecs is that of e5m2, 2**-3 of the largest; of integers, 1/7.
        largest = np.linalg.norm(part) if codec.hadamard else np.abs(part).max()
        assert (np.abs(read - part) <= largest / 7 * (1 + 2.0**-7) + 64 * oracle.TINY).all()


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(
    "codec", [jz.Int8(block=32), jz.Int4(block=32), jz.Float8(block=32)], ids=str
)
def test_the_largest_number_does_not_clip(codec, sign):
    rng = np.random.default_rng(3)
    x = rng.uniform(-1, 1, (64, 32)).astype(np.float32)
    x[:, 5] = sign * np.exp2(rng.uniform(0.1, 9, 64))
    exact = dataclasses.replace(codec, scale_dtype=jnp.float32)
    np.testing.assert_allclose(oracle.round_trip(exact, x)[:, 5], x[:, 5], rtol=8 * oracle.EPS)

    x[:, 5] = sign * oracle.limit(codec) * oracle.up_to_bfloat16(rng.uniform(1, 99, 64))
    np.testing.assert_array_equal(oracle.round_trip(codec, x)[:, 5], x[:, 5])


@pytest.mark.parametrize("num", [2, 16, 17])
@pytest.mark.parametrize("codec", [jz.Int8(block=64), jz.Int4(block=64, hadamard=32)], ids=str)
def test_messages_are_added_where_they_are_decoded(codec, num):
    """Up to 16 of them without a pass over all; and right beyond."""
    message = codec.encode(jax.random.normal(jax.random.key(0), (num, 640)))
    compiled = jax.jit(codec.decode_sum, static_argnums=1).lower(message, 640).compile()
    assert bool(re.search(r"= f32\[\S* reduce\(", compiled.as_text())) == (num > 16)
    each = np.asarray(codec.decode(message, 640, jnp.float32), np.float64)
    # `num` additions in float32, each of which rounds a partial sum by 2**-24 of it; and if the sum
    # is rotated back, 32 more, of the rotated numbers of a group, to each number of it.
    sizes, additions = np.abs(each).sum(0), num
    if codec.hadamard:
        read = [oracle.take_apart(codec, row, 640) for row in message]
        sizes = oracle.sums(sum(np.abs(codes * scales) for codes, scales in read))
        additions += 32
    assert (np.abs(compiled(message) - each.sum(0)) <= additions * oracle.EPS * sizes).all()


def test_a_sum_is_rotated_back_once_and_again_on_its_way_to_the_next_hop():
    codec, shape = jz.Int4(block=64, hadamard=32), (100, 64)
    message = codec.encode(jax.random.normal(jax.random.key(0), (3, 6400)))

    def recode(num, message):
        return codec.recode(message, codec, shape, 1, num, divisor=1)

    def rotations(f):
        return str(jax.make_jaxpr(f)(message)).count("dot_general[")

    assert rotations(lambda x: codec.decode_sum(x, 6400)) == 1
    assert rotations(functools.partial(recode, 2)) == 2
    total = codec.decode_sum(message, 6400).reshape(shape)
    for num in (2, 4):  # pieces of whole groups, and of parts of them
        want = codec.encode_pieces(total, 1, num)
        np.testing.assert_array_equal(recode(num, message), want)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", [jz.Int8, jz.Int4, jz.Float8], ids=lambda kind: kind.__name__)
def test_what_is_zero_on_every_device_is_zero_in_the_sum(kind, rounding):
    """Whatever its neighbours are, and in whatever block; through a second hop too."""
    codec = kind(block=64, hadamard=32, rounding=rounding)
    rng, num = np.random.default_rng(0), 1000  # its last 8 numbers are not rotated
    x = rng.standard_t(2, (5, num)).astype(np.float32)
    is_zero = rng.random(num) < 0.01
    is_zero[[0, 990, 999]] = True
    x[:, is_zero] = 0
    x[2, 100:700] = 0  # zero on one device only
    x[3, is_zero] = -0.0
    message = jax.vmap(lambda row, seed: codec.encode(row, seed=seed))(x, jnp.arange(5))
    total = np.asarray(codec.decode_sum(message, num))
    assert not total[is_zero].any()
    again = codec.recode(message, codec, (num,), 0, 2, divisor=5, seed=7)
    mean = np.asarray(codec.decode_pieces(again, (num // 2,), 0, jnp.float32))
    assert not mean[is_zero].any()
    bound = codec.error_bound(x).sum(0) / 5 + codec.error_bound(total.reshape(2, -1) / 5).reshape(
        -1
    )
    assert (np.abs(mean - x.mean(0, dtype=np.float64)) <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("divisor", [1, 2, 3, 6, 48])
def test_a_mean_is_its_sum_with_another_scale(divisor, scale_dtype):
    format = pk.Format(kind="int8", block=64, scale_dtype=scale_dtype)
    codes = np.random.default_rng(0).integers(-127, 128, (5, 6400)).astype(np.float32)
    rows = pk.quantize(jnp.asarray(codes)[None], format)
    total = np.asarray(pk.dequantize_sum(rows, format, num=6400)).astype(np.float64)
    codec = jz.Int8(block=64, scale_dtype=jnp.dtype(scale_dtype))
    message = codec.recode(rows, codec, (6400,), 0, 1, divisor=divisor)
    oracle.check_message(codec, total / divisor, np.asarray(message[0]))


@integers
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_multiples_of_the_scale_come_back_as_they_were(codec, rounding):
    limit = oracle.limit(codec)
    codes = np.random.default_rng(4).integers(-limit, limit + 1, size=(50, 64))
    codes[:, ::32] = limit
    scale = oracle.up_to_bfloat16(np.random.default_rng(5).uniform(1e-3, 1e3, (50, 1)))
    x = (codes * scale).astype(np.float32)
    x = np.concatenate([x, x * 0], axis=1)  # and a block of zeros
    got = oracle.round_trip(dataclasses.replace(codec, rounding=rounding), x)
    # "stochastic" may take what the reciprocal rounds off for a reason to move, once in 1e5.
    assert (got != x).sum() <= (5 if rounding == "stochastic" else 0)


@each_small
def test_what_is_not_finite_spoils_its_block_only(codec):
    clean = oracle.numbers(3 * codec.block + 7)[0]
    for bad in [np.nan, -np.nan, np.inf, -np.inf]:
        for place in [0, codec.block + 9, 2 * codec.block - 1, len(clean) - 1]:
            x = clean.copy()
            x[place] = bad
            got, want = oracle.round_trip(codec, x), oracle.round_trip(codec, clean)
            start = place // codec.block * codec.block
            block = slice(start, start + codec.block)
            assert np.isnan(got[block]).all()
            np.testing.assert_array_equal(np.delete(got, block), np.delete(want, block))


@each_small
def test_constants_zeros_and_tiny_numbers(codec):
    num = 75
    assert not np.any(oracle.round_trip(codec, np.zeros((2, num), np.float32)))
    for size in [1e-45, 1e-40, oracle.TINY, 100 * oracle.TINY, 1e4 * oracle.TINY]:
        x = (np.random.default_rng(0).uniform(-1, 1, num) * size).astype(np.float32)
        error = np.abs(oracle.round_trip(codec, x).astype(np.float64) - x)
        # XLA makes zeros of numbers below TINY, and of 32nds where 32 are rotated.
        assert (error <= 33 * oracle.TINY + size / (1 if codec.hadamard else 7)).all()
    for dtype in [np.float32, jnp.bfloat16, np.float16]:
        for value in [1, -3.3, 1e-4, 60000]:
            x = np.full((2, num), value, dtype)
            got = oracle.round_trip(codec, x).astype(np.float64)
            # No code is further from its neighbours than 1/7 of the largest. Rotated constants
            # are one number each 32, the rest zeros; the tail of a row shares its scale.
            assert (np.abs(got - x.astype(np.float64)) <= abs(value) / 7 * 1.01).all()
            if codec.rounding == "nearest" and not codec.hadamard:
                np.testing.assert_array_equal(got[0], got[1])


@each_small
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_the_largest_number_of_a_type_stays_finite(codec, dtype):
    """A scale that was rounded up, or half a step, must not make an infinity of it."""
    largest = float(jnp.finfo(dtype).max)
    x = np.full(64, largest, dtype)
    x[::3] = 0
    got = oracle.round_trip(codec, x).astype(np.float64)
    assert np.isfinite(got).all()
    bound = (8 if codec.hadamard else 1) * largest / 7 * 1.01
    assert (np.abs(got - x.astype(np.float64)) <= bound).all()


@each_small
def test_same_bits_however_it_is_compiled(codec):
    x = jnp.asarray(oracle.numbers((2, 70)))  # 4, 2, 70
    encode = functools.partial(codec.encode, seed=3)
    whole = np.asarray(jax.jit(encode)(x))
    rows = x.reshape(8, 70)
    devices = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    others = {
        "eager": encode(x),
        "vmap": jax.jit(jax.vmap(encode))(x),
        "vmap of vmap": jax.jit(jax.vmap(jax.vmap(encode)))(x),
        "one row": jnp.stack([jax.jit(encode)(row) for row in rows]),
        "scan": jax.lax.scan(lambda carry, row: (carry, encode(row)), 0, rows)[1],
        "shard_map": jax.jit(
            jax.shard_map(encode, mesh=devices, in_specs=P("i"), out_specs=P("i"))
        )(rows),
        "among others": jax.jit(lambda x: (encode(jnp.sin(x) * 0 + x), jnp.sum(x)))(x)[0],
    }
    for name, message in others.items():
        np.testing.assert_array_equal(np.asarray(message).reshape(whole.shape), whole, name)
    decode = functools.partial(codec.decode, num=70, dtype=jnp.float32)
    want = np.asarray(jax.jit(decode)(whole))
    np.testing.assert_array_equal(np.asarray(decode(jnp.asarray(whole))), want)
    np.testing.assert_array_equal(np.asarray(jax.jit(jax.vmap(decode))(whole)), want)
