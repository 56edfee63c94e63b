"""SimiGrad against `optax.MultiSteps`, and inside other transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz

from .helpers import (
    PARAMS,
    assert_same_bits,
    cosine_of,
    feed_all,
    flattened,
    make_gradients,
    make_params,
    make_simigrad,
)


def _halved(count):
    """No arithmetic that XLA could round in two ways."""
    return jnp.where(count < 2, 0.25, 0.125)


_OPTIMIZERS = {
    "sgd": lambda: optax.sgd(_halved, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "clip_adam": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=_halved),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("name", "steps", "dtype"),
    [(name, 3, jnp.float32) for name in _OPTIMIZERS]
    + [("adamw", 1, jnp.float32), ("adamw", 4, jnp.bfloat16)],
)
@pytest.mark.one_in(2)
def test_a_pinned_batch_equals_multi_steps_to_the_bit(name, steps, dtype):
    gradients = make_gradients(4 * steps, dtype=dtype)
    multi = optax.MultiSteps(_OPTIMIZERS[name](), steps)
    want, _ = feed_all(multi, gradients, make_params(dtype))
    tx = make_simigrad(_OPTIMIZERS[name](), initial=steps, min_steps=steps, max_steps=steps)
    got, states = feed_all(tx, gradients, make_params(dtype))
    assert_same_bits(got, want)
    stats = jz.simigrad_stats(states[-1])
    assert stats["updates"] == 4 and stats["seen"] == 4 * steps
    assert stats["unmeasured"] == (4 if steps == 1 else 0) and stats["skipped"] == 0
    for i, update in enumerate(got):
        assert bool(np.any(flattened(update))) == ((i + 1) % steps == 0), (
            "zero until the batch is full"
        )


# As optax has it.


def _struct(x):
    return jnp.shape(x), jnp.result_type(x), getattr(x, "weak_type", None)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("groups", [None, {"a": "first", "b": "second"}])
@pytest.mark.parametrize(
    "rule", ["walk", "jump", jz.JumpRule(average="ema"), jz.WalkRule(window=3)]
)
def test_the_state_keeps_its_types(rule, groups):
    tx = make_simigrad(optax.adamw(1e-2), rule=rule, groups=groups, lr_scaling="sqrt")
    state = tx.init(make_params())
    abstract = jax.eval_shape(tx.init, make_params())
    new, after = jax.eval_shape(tx.update, make_params(), state, make_params())
    assert jax.tree.map(_struct, abstract) == jax.tree.map(_struct, state)
    assert jax.tree.map(_struct, after) == jax.tree.map(_struct, state)
    assert jax.tree.map(_struct, new) == jax.tree.map(_struct, make_params())


def test_an_inner_state_that_would_widen_keeps_its_type():
    def widen(updates, state, params=None):
        return updates, state.astype(jnp.float32) + 1

    inner = optax.GradientTransformation(lambda params: jnp.zeros([], jnp.bfloat16), widen)
    _, states = feed_all(make_simigrad(inner), make_gradients(4))
    assert states[-1].inner.dtype == jnp.bfloat16 and states[-1].inner == 1


@pytest.mark.standard_promotion
def test_inside_chain_masked_and_inject_hyperparams():
    own = make_simigrad(optax.adam(1e-2), lr_scaling="sqrt", rule="jump")
    want, states = feed_all(own, make_gradients(12))
    wanted = jz.simigrad_stats(states[-1])

    def check(tx, scale=1.0):
        got, states = feed_all(tx, make_gradients(12))
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(flattened(x), scale * flattened(y), rtol=2**-22)
        assert_same_bits(jz.simigrad_stats(states[-1]), wanted)

    check(optax.chain(own, optax.scale(0.5)), 0.5)
    check(optax.masked(own, jax.tree.map(lambda x: True, PARAMS)))
    injected = optax.inject_hyperparams(jz.simigrad)(
        optax.adam(1e-2),
        target_similarity=0.5,
        initial=4,
        max_steps=8,
        lr_scaling="sqrt",
        rule="jump",
    )
    check(injected)
    assert optax.tree.get(injected.init(make_params()), "target_similarity") == 0.5


@pytest.mark.standard_promotion
def test_a_masked_part_is_neither_changed_nor_measured():
    tx = optax.masked(make_simigrad(), {"a": True, "b": {"c": False}})
    gradients = make_gradients(4)
    updates, states = feed_all(tx, gradients)
    np.testing.assert_array_equal(flattened(updates[0]["a"]), 0)
    assert_same_bits(updates[0]["b"], gradients[0]["b"])  # handed on, as optax has it
    halves = [
        np.mean([flattened(g["a"]) for g in part], 0) for part in (gradients[:2], gradients[2:])
    ]
    got = jz.simigrad_stats(states[-1])["similarity"]
    np.testing.assert_allclose(got, cosine_of(*halves), atol=1e-6)
