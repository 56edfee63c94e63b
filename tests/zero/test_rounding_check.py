"""A warning where parameters in 16 bits would never change; and none elsewhere."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz

pytestmark = pytest.mark.standard_promotion
TO_1E_5, TO_1E_3 = (
    optax.warmup_cosine_decay_schedule(0, peak, 2000, 20000) for peak in (1e-5, 1e-3)
)
PARTS = {"up": "trained", "norm": "frozen", "bias": "frozen"}


@pytest.fixture(scope="module")
def zero() -> jz.Zero:
    return jz.Zero(jz.make_mesh(nodes=2), jz.zero3())


def weights(dtype: Any) -> dict[str, np.ndarray]:
    """As of a language model: of size 0.02, around 1, and zeros."""
    normal = np.random.default_rng(0).normal(size=(32, 16))
    held = {"up": 0.02 * normal, "norm": 1 + 0.02 * normal[0], "bias": np.zeros(16)}
    return {name: x.astype(dtype) for name, x in held.items()}


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keep float32 copies of parameters in the state."""

    def widened(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params):
        return widened(params), inner.init(widened(params))

    def update(grads, state, params=None):
        updates, inner_state = inner.update(widened(grads), state[1], state[0])
        copies = optax.apply_updates(state[0], updates)
        rounded = jax.tree.map(lambda new, old: new.astype(old.dtype) - old, copies, params)
        return rounded, (copies, inner_state)

    return optax.GradientTransformation(init, update)


def rounded_at_random(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Round updated bfloat16 parameters up or down, to the exact value on average."""

    def init(params):
        return jnp.uint32(1), inner.init(params)

    def update(grads, state, params=None):
        updates, inner_state = inner.update(grads, state[1], params)

        def rounded(update, x):
            exact = x.astype(jnp.float32) + update.astype(jnp.float32)
            bits = jax.lax.bitcast_convert_type(exact, jnp.uint32)
            noise = jax.random.bits(jax.random.key(state[0]), x.shape, jnp.uint32) >> 16
            kept = (bits + noise) & jnp.uint32(0xFFFF0000)
            new = jax.lax.bitcast_convert_type(kept, jnp.float32)
            return new - x.astype(jnp.float32)

        return jax.tree.map(rounded, updates, params), (state[0] + 1, inner_state)

    return optax.GradientTransformation(init, update)


def warned_of(zero: jz.Zero, tx: optax.GradientTransformation, params: Any) -> str:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        zero.init_optimizer(tx, params)
    return " ".join(str(each.message) for each in found)


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-5),
        pytest.param(optax.chain(optax.clip_by_global_norm(1), optax.adam(TO_1E_5)), id="warm-up"),
        pytest.param(
            optax.MultiSteps(optax.adamw(1e-5), 8).gradient_transformation(), id="MultiSteps"
        ),
        pytest.param(optax.lion(1e-5), marks=pytest.mark.ci),
        pytest.param(optax.lamb(1e-4), marks=pytest.mark.ci),
    ],
)
def test_updates_that_round_away(zero: jz.Zero, tx: Any):
    text = warned_of(zero, tx, zero.shard(weights(jnp.bfloat16)))
    assert "In 'norm', 'up', parameters in 16 bits, most elements would never change" in text
    assert 'load with `dtype="float32"`' in text


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.adamw(1e-2), id="large"),
        pytest.param(optax.chain(optax.adam(TO_1E_3), optax.scale(10.0)), id="warm-up"),
        pytest.param(optax.sgd(1e-5, momentum=0.9), id="sgd"),
        pytest.param(
            optax.MultiSteps(optax.adamw(1e-5), 100).gradient_transformation(),
            id="none of 32 steps updates",
        ),
        pytest.param(in_float32(optax.adamw(1e-5)), id="copies"),
        pytest.param(rounded_at_random(optax.adamw(1e-5)), id="stochastic"),
        pytest.param(optax.set_to_zero(), id="frozen"),
        pytest.param(
            optax.multi_transform(
                {"trained": optax.adamw(1e-3), "frozen": optax.set_to_zero()}, PARTS
            ),
            id="partly frozen",
        ),
        pytest.param(
            optax.inject_hyperparams(optax.lion)(learning_rate=lambda i: 1e-2 * (i > 999)),
            marks=pytest.mark.ci,
            id="injected",
        ),
    ],
)
def test_no_false_alarm(zero: jz.Zero, tx: Any):
    assert warned_of(zero, tx, zero.shard(weights(jnp.bfloat16))) == ""


def test_only_leaves_in_16_bits_that_are_large_for_the_rate(zero: jz.Zero):
    tx = optax.adamw(1e-3)
    text = warned_of(zero, tx, zero.shard(weights(jnp.bfloat16)))
    assert "In 'norm', parameters" in text  # at 1 the next number is 0.008 away
    assert warned_of(zero, tx, zero.shard(weights(jnp.float32))) == ""
    mixed = weights(jnp.bfloat16) | {"norm": weights(np.float32)["norm"]}
    assert warned_of(zero, tx, zero.shard(mixed)) == ""
    assert "'up'" in warned_of(zero, optax.adamw(1e-6), zero.shard(weights(np.float16)))


def test_under_a_transfer_guard_and_in_a_jit(zero: jz.Zero):
    params, tx = zero.shard(weights(jnp.bfloat16)), optax.adam(1e-5)
    with jax.transfer_guard("disallow"):
        assert "would never change" in warned_of(zero, tx, params)

    @jax.jit
    def traced(x):
        assert "would never change" in warned_of(zero, tx, params)
        return x

    traced(jnp.zeros(()))
    assert warned_of(zero, tx, zero.abstract(lambda: params)) == ""


def test_it_is_true(zero: jz.Zero):
    """After 20 steps of Adam at 1e-5, with gradients that keep their signs."""
    params, tx = zero.shard(weights(jnp.bfloat16)), optax.adam(1e-5)
    with pytest.warns(UserWarning, match="would never change"):
        state = zero.init_optimizer(tx, params)
    grads = jax.tree.map(jnp.ones_like, params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    changed = params
    for _ in range(20):
        changed, state = step(changed, state)
    same = {name: float(jnp.mean(changed[name] == params[name])) for name in params}
    assert same["norm"] == 1 and same["up"] > 0.5 and same["bias"] == 0
