"""Gradients to feed to `jz.simigrad`, and formulas in numpy float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxzero as jz

PARAMS = {"a": np.linspace(-1, 1, 12).reshape(3, 4), "b": {"c": np.linspace(1, 2, 5)}}


def make_params(dtype=jnp.float32):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)


def make_gradients(number, seed=0, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    return [
        jax.tree.map(lambda x: jnp.asarray(random.normal(1, 1, x.shape), dtype), PARAMS)
        for _ in range(number)
    ]


def make_simigrad(inner=None, **options):
    options = {"target_similarity": 0.5, "initial": 4, "max_steps": 8} | options
    return jz.simigrad(optax.sgd(0.1) if inner is None else inner, **options)


def feed_all(tx, gradients, params=None, state=None, extras=None):
    """The updates, and the states after them, of a jitted loop."""
    params = make_params() if params is None else params
    state = tx.init(params) if state is None else state

    @jax.jit
    def step(gradient, state, params, extras):
        new, state = tx.update(gradient, state, params, **extras)
        return new, state, optax.apply_updates(params, new)

    updates, states = [], []
    for i, gradient in enumerate(gradients):
        new, state, params = step(gradient, state, params, extras[i] if extras else {})
        updates.append(new)
        states.append(state)
    return updates, states


def flattened(tree):
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def cosine_of(x, y):
    return float(x @ y / math.sqrt((x @ x) * (y @ y)))


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
