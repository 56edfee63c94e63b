"""Stochastic rounding: right on average, independent, and repeatable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz

from . import _codec_oracle as oracle

RANDOM = [
    jz.Int8(block=64, rounding="stochastic"),
    jz.Int4(block=64, rounding="stochastic", scale_dtype=jnp.float32),
    jz.Int4(block=64, rounding="stochastic", hadamard=32),
    jz.Float8(block=64, rounding="stochastic"),
    jz.Float8(block=64, rounding="stochastic", dtype=jnp.float8_e5m2),
]
NUM_SEEDS = 4096


def _over_seeds(codec, x):
    """What arrives for every seed, in units of the scale, and the scale."""
    seeds = jnp.arange(NUM_SEEDS, dtype=jnp.uint32)
    messages = jax.jit(jax.vmap(lambda s: codec.encode(jnp.asarray(x), seed=s)))(seeds)
    _, scale = oracle.take_apart(codec, messages[0], len(x))
    arrived = np.asarray(oracle.decoder(codec, len(x), x.dtype)(messages))
    return arrived.astype(np.float64) / scale, scale


@pytest.mark.parametrize("codec", RANDOM, ids=str)
def test_stochastic_rounding_is_unbiased(codec):
    x = oracle.numbers(64)[[0, 2]].reshape(-1)  # two blocks; the second holds subnormals of float8
    got, scale = _over_seeds(codec, x)
    want = x / scale
    if codec.hadamard:  # the sum of 32 errors, each of one step at most
        deviation = np.full(len(x), np.sqrt(32) / 2)
        z = (got.mean(0) - want) / deviation * np.sqrt(NUM_SEEDS)
        assert np.abs(z).max() < 5
        return
    step = oracle.step(codec, want)
    below = np.floor(want / step) * step
    chance = (want - below) / step
    assert ((np.abs(got - below) < 1e-3 * step) | (np.abs(got - below - step) < 1e-3 * step)).all()
    # What lies on a code may leave it once in 10**5 times: the reciprocal of the scale is rounded.
    deviation = step * np.sqrt(np.maximum(chance * (1 - chance), 1e-4) / NUM_SEEDS)
    z = (got.mean(0) - want) / deviation
    # Of 128 normal deviates, one is beyond 5 once in 10**4 runs, and less often is their variance
    # 6 of its standard deviations too large.
    assert np.abs(z).max() < 5
    assert np.mean(z**2) < 1 + 6 * np.sqrt(2 / len(z))


def test_roundings_are_independent():
    """Of elements, of seeds, and of equal numbers in one block."""
    codec = jz.Int8(block=64, rounding="stochastic", scale_dtype=jnp.float32)
    x = np.full(128, 0.5, np.float32)
    x[::64] = 127  # a scale of 1: all others lie half-way
    got, _ = _over_seeds(codec, x)
    ups = np.delete(got, [0, 64], axis=1)
    assert set(np.unique(ups)) == {0.0, 1.0}
    signs = 2 * ups - 1
    for pairs in [signs.T @ signs / NUM_SEEDS, signs[:512] @ signs[:512].T / signs.shape[1]]:
        size = len(pairs)
        between = pairs[~np.eye(size, dtype=bool)]
        deviation = 1 / np.sqrt(NUM_SEEDS if size == 126 else signs.shape[1])
        # Of at most 130,000 pairs, one is beyond 6 sigma once in 10**4 runs.
        assert np.abs(between).max() < 6 * deviation
        assert abs(np.std(between) / deviation - 1) < 0.05
    assert abs(signs.mean()) < 6 / np.sqrt(signs.size)


def test_numbers_at_one_place_round_independently():
    """So what one device sends at one place, step after step, is right on average."""
    codec = jz.Int8(block=64, rounding="stochastic", scale_dtype=jnp.float32)
    x = np.random.default_rng(0).uniform(0, 1, (NUM_SEEDS, 64)).astype(np.float32)
    x[:, 0] = 127  # a scale of 1
    error = (oracle.round_trip(codec, x) - x.astype(np.float64))[:, 1:]
    # A rounding of x has the variance x (1 - x), on average 1/6.
    assert np.abs(error.sum(0)).max() < 5 * np.sqrt(NUM_SEEDS / 6)


def test_seeds_decide():
    x = oracle.numbers(301)[0]
    random, nearest = jz.Int4(rounding="stochastic"), jz.Int4()

    def encode(codec, seed):
        if not isinstance(seed, jax.Array):
            return np.asarray(jax.jit(lambda x: codec.encode(x, seed=seed))(x)).tobytes()
        return np.asarray(oracle.encoder(codec)(x, seed)).tobytes()

    first = encode(random, 0)
    assert first == encode(random, None) == encode(random, jnp.int32(0)) == encode(random, 2**32)
    assert encode(random, -1) == encode(random, jnp.int32(-1)) == encode(random, 2**32 - 1)
    assert len({encode(random, seed) for seed in (0, 1, 2, -1)}) == 4
    assert encode(nearest, 0) == encode(nearest, 1) != first


def test_many_devices_with_a_seed_each_sum_up_to_the_truth():
    """Nearest rounding loses a small gradient that all share; stochastic keeps it."""
    x = np.full((1, 64), 0.2, np.float32)
    x[0, 0] = 7  # a scale of 1
    x = np.repeat(x, NUM_SEEDS, axis=0)
    random = jz.Int4(block=64, rounding="stochastic")
    messages = jax.jit(jax.vmap(lambda row, s: random.encode(row, seed=s)))(
        x, jnp.arange(NUM_SEEDS)
    )
    mean = np.asarray(oracle.decoder(random, 64, x.dtype)(messages))[:, 1:].mean()
    assert abs(mean - 0.2) < 6 * np.sqrt(0.2 * 0.8 / (NUM_SEEDS * 63))
    assert not oracle.round_trip(jz.Int4(block=64), x)[:, 1:].any()
