"""Similarity, noise scale, averages and learning rates against numpy float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz

from .helpers import (
    PARAMS,
    cosine_of,
    feed_all,
    flattened,
    make_gradients,
    make_params,
    make_simigrad,
)


@pytest.mark.parametrize("steps", [2, 3, 6, 7])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.one_in(2)
def test_similarity_and_noise_scale_of_one_batch(steps, is_weighted):
    gradients = make_gradients(steps, seed=steps)
    weights = np.arange(1.0, steps + 1) if is_weighted else np.ones(steps)
    extras = [{"weight": np.int32(w)} if is_weighted else {} for w in weights]
    tx = make_simigrad(optax.sgd(1.0), initial=steps)
    updates, states = feed_all(tx, gradients, extras=extras)
    flat, cut = np.stack([flattened(g) for g in gradients]), steps // 2
    w1, w2 = weights[:cut].sum(), weights[cut:].sum()
    g1, g2 = weights[:cut] @ flat[:cut] / w1, weights[cut:] @ flat[cut:] / w2
    cosine, total = cosine_of(g1, g2), w1 + w2
    # The angle of equal halves, from that of these.
    tangent = math.tan(math.acos(cosine)) * math.sqrt(4 * w1 * w2) / total
    want = math.copysign(math.cos(math.atan(tangent)), cosine)
    stats = jz.simigrad_stats(states[-1])
    # float32: a few roundings of numbers near 1, over `steps` additions.
    np.testing.assert_allclose(stats["similarity"], want, atol=8 * steps * 2**-24)
    noise = (g1 - g2) @ (g1 - g2) * w1 * w2 / total
    np.testing.assert_allclose(stats["noise_scale"], noise / (g1 @ g2), rtol=1e-4)
    assert np.isnan(stats["noise_scale_error"]) and stats["seen"] == total
    np.testing.assert_allclose(flattened(updates[-1]), -(weights @ flat) / total, atol=1e-6)


def test_halves_of_the_only_micro_batch():
    random = np.random.default_rng(0)
    halves = [[random.normal(1, 1, x.shape) for x in jax.tree.leaves(PARAMS)] for _ in range(2)]
    tree = jax.tree.structure(PARAMS)

    def products(x, y):
        return tree.unflatten([jnp.float32(np.sum(a * b)) for a, b in zip(x, y, strict=True)])

    first, second = halves
    by_leaf = (products(first, first), products(second, second), products(first, second))
    totals = tuple(sum(jax.tree.leaves(part)) for part in by_leaf)
    gradient = tree.unflatten([jnp.float32((a + b) / 2) for a, b in zip(*halves, strict=True)])
    want = cosine_of(flattened(first), flattened(second))
    for given in (by_leaf, totals):
        tx = make_simigrad(initial=1, target_similarity=0.99)
        _, states = feed_all(tx, 3 * [gradient], extras=3 * [{"halves": given}])
        assert [int(s.steps) for s in states] == [2, 2, 1]
        np.testing.assert_allclose(states[0].similarity, want, atol=1e-6)
        # Halves of two micro-batches are those that were accumulated: here they are the same.
        np.testing.assert_allclose(states[2].similarity, 1, atol=1e-6)
    tx = make_simigrad(initial=1, groups={"a": "x", "b": "y"})
    _, states = feed_all(tx, [gradient], extras=[{"halves": by_leaf}])
    groups = jz.simigrad_stats(states[0])["groups"]
    np.testing.assert_allclose(
        groups["x"]["similarity"], cosine_of(flattened(first[:1]), flattened(second[:1])), atol=1e-6
    )


def test_one_micro_batch_alone_says_nothing():
    _, states = feed_all(make_simigrad(initial=1), make_gradients(3))
    stats = jz.simigrad_stats(states[-1])
    assert stats["unmeasured"] == 3 and stats["steps"] == 1 and stats["skipped"] == 0
    assert np.isnan(stats["similarity"]) and np.isnan(stats["noise_scale"])
    # No rule goes where it could not come back from.
    _, states = feed_all(make_simigrad(initial=2, target_similarity=0.0), 8 * make_gradients(1))
    assert {int(s.steps) for s in states} == {2} and states[-1].unmeasured == 0


@pytest.mark.parametrize("combine", ["mean", "median", "min"])
def test_groups(combine):
    gradients = [g | {"frozen": jnp.zeros(2)} for g in make_gradients(4)]
    params = make_params() | {"frozen": jnp.zeros(2)}
    labels = {"a": "x", "b": "y", "frozen": "z"}
    by_path = {"a": "x", "b.c": "y", "frozen": "z"}
    want = {}
    for label, name in (("x", "a"), ("y", "b")):
        flat = np.stack([flattened(g[name]) for g in gradients])
        want[label] = cosine_of(flat[:2].mean(0), flat[2:].mean(0))
    combined = {"mean": np.mean, "median": np.median, "min": np.min}[combine](list(want.values()))
    for groups in (labels, by_path.__getitem__):
        tx = make_simigrad(groups=groups, combine=combine, target_similarity=0.99)
        _, states = feed_all(tx, gradients, params)
        stats = jz.simigrad_stats(states[-1])
        assert stats["steps"] == 5 and stats["skipped"] == 0
        np.testing.assert_allclose(stats["similarity"], combined, atol=1e-6)
        for label, expected in want.items():
            np.testing.assert_allclose(stats["groups"][label]["similarity"], expected, atol=1e-6)
        assert np.isnan(stats["groups"]["z"]["similarity"]), "nothing was measured of it"


def test_complex_gradients():
    random = np.random.default_rng(0)
    gradients = [random.normal(1, 1, 6) + 1j * random.normal(0, 1, 6) for _ in range(2)]
    tx = make_simigrad(initial=2)
    params = jnp.zeros(6, jnp.complex64)
    _, states = feed_all(tx, [jnp.asarray(g, jnp.complex64) for g in gradients], params)
    x, y = (np.concatenate([g.real, g.imag]) for g in gradients)
    np.testing.assert_allclose(states[-1].similarity, cosine_of(x, y), atol=1e-6)


def test_averages_and_standard_error_equal_their_definitions():
    random = np.random.default_rng(1)
    window, number = 9, 12
    decay = 1 - 2 / (window + 1)
    products = random.uniform(2, 3, (number, 3)) - [0, 0, 1.5]
    halves = random.uniform(1, 4, (number, 2))
    gradients = []
    for first, second, both in products:  # of two gradients: |x|^2, |y|^2 and x.y
        x = np.array([math.sqrt(first), 0])
        y = np.array([both, math.sqrt(first * second - both**2)]) / math.sqrt(first)
        gradients += [jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)]
    extras = [{"weight": np.float32(w)} for w in halves.flat]
    tx = make_simigrad(initial=2, min_steps=2, max_steps=2, noise_window=window)
    _, states = feed_all(tx, gradients, params=jnp.zeros(2), extras=extras)
    stats = jz.simigrad_stats(states[-1])
    signal = products[:, 2]
    noise = (products[:, :2].sum(1) - 2 * signal) * halves.prod(1) / halves.sum(1)
    v = decay ** np.arange(number)[::-1]
    scale = np.sum(v * noise) / np.sum(v * signal)
    q = np.sum(v**2) / np.sum(v) ** 2
    square = np.average((noise - scale * signal) ** 2, weights=v)
    error = math.sqrt(square * q / (1 - q)) / np.average(signal, weights=v)
    np.testing.assert_allclose(stats["noise_scale"], scale, rtol=1e-5)
    np.testing.assert_allclose(stats["noise_scale_error"], error, rtol=1e-4)


def test_seen_counts_beyond_float32():
    """2^24 + 1 is no float32: adding 1 to 2^24 over and over gives 2^24."""
    tx = make_simigrad(initial=1, min_steps=1, max_steps=1)
    weights = [2.0**24, *[1.0] * 9]
    extras = [{"weight": np.float32(w)} for w in weights]
    _, states = feed_all(tx, 10 * make_gradients(1), extras=extras)
    assert float(states[-1].seen) + float(states[-1].seen_rest) == sum(weights)


# Learning rates.


@pytest.mark.parametrize("scaling", ["sqrt", "linear", None])
def test_learning_rates_follow_the_batch_and_count_what_was_seen(scaling):
    tx = make_simigrad(
        optax.sgd(1.0),
        initial=2,
        target_similarity=0.999,
        lr_scaling=scaling,
        schedule=lambda seen: 1 / (1 + seen),
    )
    gradients = make_gradients(9)
    updates, states = feed_all(tx, gradients)
    start = 0
    for steps in (2, 3, 4):  # the walk: one more each time
        flat = np.mean([flattened(g) for g in gradients[start : start + steps]], 0)
        factor = {"sqrt": math.sqrt(steps / 2), "linear": steps / 2, None: 1}[scaling]
        stop = start + steps
        assert states[stop - 1].seen == stop
        np.testing.assert_allclose(
            flattened(updates[stop - 1]), -flat * factor / (1 + start), rtol=1e-5, atol=1e-6
        )
        start = stop
