"""Batch rules against their formulas, and on noise that is known."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz

from .helpers import (
    make_simigrad,
)


def test_the_walk_is_that_of_the_paper():
    sizes = np.arange(1, 20_000)

    def walk(similarity):
        return jax.vmap(
            lambda steps: jz.WalkRule().wanted(
                jnp.float32(similarity), steps, steps, jnp.float32(0.5), jz.WalkRule().init()
            )[0]
        )(jnp.asarray(sizes, jnp.float32))

    np.testing.assert_array_equal(walk(0.4), [max(n + 1, int(1.1 * n)) for n in sizes.tolist()])
    np.testing.assert_array_equal(walk(0.6), [min(n - 1, int(0.9 * n)) for n in sizes.tolist()])
    np.testing.assert_array_equal(walk(0.5), sizes)


def test_averages_of_rules():
    values = [0.1, 0.8, 0.2, 0.9, 0.4]
    rule, decay = jz.WalkRule(window=3), 1 - 2 / 4

    def steps(rule):
        memory, found = rule.init(), []
        for value in values:
            ten = jnp.float32(10)
            wanted, memory = rule.wanted(jnp.float32(value), ten, ten, jnp.float32(0.5), memory)
            found.append(float(wanted))
        return found

    medians = [np.median(values[max(0, i - 2) : i + 1]) for i in range(5)]
    assert steps(rule) == [11 if m < 0.5 else 9 for m in medians]
    weights = [decay ** np.arange(i + 1)[::-1] for i in range(5)]
    means = [np.average(values[: i + 1], weights=weights[i]) for i in range(5)]
    assert steps(jz.WalkRule(window=3, average="ema")) == [11 if m < 0.5 else 9 for m in means]


@pytest.mark.parametrize(
    ("similarity", "steps", "want"),
    [(0.5, 10, 10), (0.25, 10, 30), (0.8, 100, 25), (0.01, 10, 40), (-0.3, 10, 40), (1.0, 80, 20)],
)
def test_the_jump_solves_the_closed_form_within_its_bound(similarity, steps, want):
    rule = jz.JumpRule()
    steps = jnp.float32(steps)
    for per_step in (1.0, 7.0):  # the unit of weight does not matter
        got, _ = rule.wanted(
            jnp.float32(similarity), steps, per_step * steps, jnp.float32(0.5), rule.init()
        )
        assert got == want


# Known noise: a quadratic, and Gaussian noise of another spectrum.

_DIM = 2**15
_CURVATURE = np.geomspace(1, 0.1, _DIM)
_SPREAD = np.geomspace(1, 3, _DIM)


def _noise(scale, num_microbatches, dim=_DIM, seed=0):
    """Curvature, and draws of the noise of one unit of weight: tr(Sigma) / |H x|^2 is `scale`."""
    curvature, spread = (x[:: _DIM // dim] for x in (_CURVATURE, _SPREAD))
    spread = spread * math.sqrt(scale * np.sum(curvature**2) / np.sum(spread**2))
    draws = np.random.default_rng(seed).standard_normal((num_microbatches, dim), np.float32)
    return jnp.asarray(curvature, jnp.float32), jnp.asarray(draws * spread.astype(np.float32))


@functools.partial(jax.jit, static_argnums=0)
def _train(tx, curvature, draws, weights=None):
    """Sizes and statistics after each micro-batch, at a point that does not move."""
    params = jnp.ones_like(curvature)
    weights = jnp.ones(len(draws)) if weights is None else weights

    def one(state, given):
        draw, weight = given
        gradient = curvature * params + draw / jnp.sqrt(weight)
        _, state = tx.update(gradient, state, params, weight=weight)
        return state, jz.simigrad_stats(state)

    return jax.lax.scan(one, tx.init(params), (draws, weights))[1]


def _at_updates(stats):
    return {
        k: np.asarray(v)[np.asarray(stats["count"]) == 0] for k, v in stats.items() if k != "groups"
    }


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 1, 1), (1, 2, 3, 10)])
def test_similarity_and_noise_scale_of_known_noise(weights):
    steps, scale = len(weights), 6.0
    tx = make_simigrad(optax.sgd(0.0), initial=steps, min_steps=steps, max_steps=steps)
    stats = _at_updates(_train(tx, *_noise(scale, 40 * steps), jnp.float32(40 * weights)))
    want = 1 / (1 + 2 * scale / sum(weights))
    np.testing.assert_allclose(np.mean(stats["similarity"]), want, rtol=0.05)
    np.testing.assert_allclose(stats["noise_scale"][-1], scale, rtol=0.05)
    assert abs(stats["noise_scale"][-1] - scale) < 5 * stats["noise_scale_error"][-1]


def test_the_standard_error_is_that_of_many_runs():
    number, scale = 200, 10.0
    tx = make_simigrad(optax.sgd(0.0), initial=8, min_steps=8, max_steps=8, noise_window=10)

    curvature, draws = _noise(scale, number * 8 * 30, dim=512)

    def last(draws):
        stats = _train(tx, curvature, draws)
        return stats["noise_scale"][-1], stats["noise_scale_error"][-1]

    scales, errors = jax.lax.map(last, draws.reshape(number, 8 * 30, 512))
    # A standard deviation of 200 values is known to 1 / sqrt(2 * 200) = 5%; three times that. So is
    # their mean, to a fourteenth of it; the bias of a ratio is of second order in its error.
    np.testing.assert_allclose(np.sqrt(np.mean(errors**2)), np.std(scales), rtol=0.15)
    np.testing.assert_allclose(np.mean(scales), scale, atol=4 * np.std(scales) / math.sqrt(number))


@pytest.mark.parametrize("rule", ["jump", jz.JumpRule(average="ema", window=3)])
@pytest.mark.parametrize(("initial", "wanted"), [(4, 48), (200, 40)])
@pytest.mark.one_in(2)
def test_the_jump_settles_in_three_updates(rule, initial, wanted):
    target = 0.5
    scale = wanted * (1 - target) / (2 * target)
    tx = make_simigrad(
        optax.sgd(0.0), target_similarity=target, initial=initial, max_steps=400, rule=rule
    )
    sizes = _at_updates(_train(tx, *_noise(scale, 500)))["steps"]
    assert len(sizes) >= 6
    np.testing.assert_allclose(sizes[2:], wanted, rtol=0.05)


@pytest.mark.parametrize(("initial", "wanted"), [(20, 96), (96, 20)])
def test_the_walk_settles(initial, wanted):
    target = 0.25
    scale = wanted * (1 - target) / (2 * target)
    tx = make_simigrad(optax.sgd(0.0), target_similarity=target, initial=initial, max_steps=400)
    expected, size = 0, initial  # the paper's rule without noise
    while (size < wanted) == (initial < wanted):
        size = max(size + 1, int(1.1 * size)) if size < wanted else min(size - 1, int(0.9 * size))
        expected += 1
    sizes = _at_updates(_train(tx, *_noise(scale, 2200, dim=2**13)))["steps"]
    reached = 1 + int(np.argmax(sizes >= wanted if initial < wanted else sizes <= wanted))
    formula = abs(math.log(wanted / initial)) / math.log(1.1)
    assert abs(reached - expected) <= 2 and abs(reached - formula) <= 4
    # Up and down by a tenth, and by what a cosine of so many numbers is uncertain.
    assert len(sizes) >= reached + 8
    np.testing.assert_allclose(sizes[reached:], wanted, rtol=0.2)
    np.testing.assert_allclose(np.mean(sizes[reached:]), wanted, rtol=0.1)
