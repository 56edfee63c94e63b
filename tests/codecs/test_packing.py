"""Rotation of 32 numbers, and codes in bytes, as the reference of the kernels packs them."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from jaxzero.pallas_kernels import _blockwise as blocks

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
