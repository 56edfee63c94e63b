"""Blocks of numbers: scales, rotations and packed codes, as in the reference of the kernels."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from jaxzero import pallas_kernels as pk
from jaxzero._codecs.blockwise import pack, unpack
from jaxzero.pallas_kernels import _blockwise as blocks
from jaxzero.pallas_kernels import _format

from . import _codec_oracle as oracle
from ._examples import E5M2


@pytest.mark.parametrize("num", [32, 64, 75, 20])
def test_rotation(num):
    x = np.random.default_rng(0).integers(1, 1001, size=(3, num)).astype(np.float32)
    x_kb = blocks.split(jnp.asarray(x), 64)
    rotated, is_kept, _ = blocks.rotate(x_kb, num)
    assert not is_kept.any()
    want = np.stack([oracle.rotate(row, 1 / 32, 1 / 8) for row in x.astype(np.float64)])
    np.testing.assert_array_equal(blocks.join(rotated, num), want)
    np.testing.assert_array_equal(blocks.unrotate(rotated, num), x_kb)


@pytest.mark.parametrize("num", [1024, 1000])
def test_rotation_helps_heavy_tails(num):
    x = np.random.default_rng(1).standard_t(2, size=(20, num)).astype(np.float32)

    def error(codec):
        return np.linalg.norm(oracle.round_trip(codec, x) - x)

    for codec in [jz.Int4(), jz.Int8()]:
        rotated = dataclasses.replace(codec, hadamard=32)
        assert error(rotated) < 0.8 * error(codec)


@pytest.mark.parametrize("num", [0, 1, 31, 32, 47, 96])
def test_all_patterns_of_packed_codes(num):
    codec = jz.Int4(block=32, scale_dtype=jnp.float32)
    size = math.ceil(num / 2)
    packed = np.random.default_rng(num).integers(0, 256, (50, size)).astype(np.uint8)
    if num % 2:
        packed[:, -1] &= 15  # no code there
    codes_kb = blocks.unpack(jnp.asarray(packed), num, 32, 4)
    np.testing.assert_array_equal(blocks.pack(codes_kb, num, 4), packed)
    ones = np.ones((50, math.ceil(num / 32)), np.float32).view(np.uint8)
    messages = np.concatenate([packed, ones], axis=1)
    got = oracle.decoder(codec, num, jnp.float32)(messages)
    for message, row in zip(messages, np.asarray(got), strict=True):
        np.testing.assert_array_equal(row, oracle.take_apart(codec, message, num)[0])


@pytest.mark.parametrize("codec", [jz.Int8(block=32), jz.Float8(), jz.Float8(dtype=E5M2)], ids=str)
def test_all_patterns_of_byte_codes(codec):
    codes = np.arange(256, dtype=np.uint8)
    scales = np.ones(256 // codec.block, jnp.bfloat16).view(np.uint8)
    message = np.concatenate([codes, scales])
    got = oracle.decoder(codec, 256, jnp.float32)(message)
    want = oracle.take_apart(codec, message, 256)[0]
    want = np.clip(want, -float(jnp.finfo(np.float32).max), float(jnp.finfo(np.float32).max))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_codes_of_any_size(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 24)).astype(np.uint8)
    packed = np.asarray(pack(jnp.asarray(codes), bits))
    for row, message in zip(codes, packed, strict=True):
        number = sum(int(code) << (bits * i) for i, code in enumerate(row))
        assert message.tobytes() == number.to_bytes(3 * bits, "little")
    np.testing.assert_array_equal(unpack(jnp.asarray(packed), bits), codes)


def test_codes_of_six_bits_are_packed_by_no_kernel(monkeypatch):
    kind = _format.CodeKind(bits=6, is_integer=True, limit=31.0)
    monkeypatch.setattr(_format, "KINDS", {**_format.KINDS, "int6": kind})
    object.__setattr__(six := pk.Format(), "kind", "int6")
    assert (six.bits, six.limit) == (6, 31.0)
    x = jnp.ones((1, 1, 256))
    with pytest.raises(NotImplementedError, match="pack codes of 4 or 8 bits; got 6 bits"):
        pk.quantize(x, six)
    with pytest.raises(NotImplementedError, match="pack codes of 4 or 8 bits; got 6 bits"):
        pk.dequantize(jnp.zeros((1, 194), jnp.uint8), six, outer=1, inner=256, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="4 or 8 bits"):
        _ = six.codes_per_byte  # what tiles and walks ask


def test_nothing_is_above_the_largest_code():
    """It could be rounded up once in 10**5 times, and 8 in four bits is -8."""
    x_kb = np.random.default_rng(0).uniform(1, 2, (20_000, 1)).astype(np.float32)
    for limit in [7.0, 127.0, 448.0]:
        scale_k = blocks.scales(jnp.asarray(x_kb[:, 0]), limit, jnp.float32)
        assert np.max(x_kb * (np.float32(1) / np.asarray(scale_k))[:, None]) > limit
        assert jnp.max(blocks.divide(jnp.asarray(x_kb), scale_k, limit, jnp.float32)) <= limit


@pytest.mark.parametrize("off", [-2, -1, 0, 1, 2])
def test_a_reciprocal_that_is_nearly_right_is_mended(off):
    """The PTX ISA allows `rcp.approx.f32` a relative error of 2**-23: two units below 1."""
    mantissas = np.arange(128, 256, dtype=np.float64)  # all that a bfloat16 can have
    scales = (mantissas[:, None] * 2.0 ** np.array([-133, -60, -7, 0, 92])).astype(np.float32)
    right = (1 / scales.astype(np.float64)).astype(np.float32)
    first = (right.view(np.int32) + off).view(np.float32)
    got = np.asarray(jax.jit(blocks.refine)(first, scales))
    np.testing.assert_array_equal(got, right)
