"""JAX's transformations around a sharded function: those that work, and those that are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests import zoo

from .helpers import assert_equal, make_rows, mean_loss, on_one_device, whole_params


@pytest.mark.parametrize("wrap", [jax.jit, pytest.param(lambda f: f, marks=pytest.mark.exhaustive)])
def test_reverse_mode_is_refused(auto, wrap):
    params, x = auto.shard(whole_params()), make_rows(auto)
    evaluate, step = auto.apply(mean_loss), auto.value_and_grad(mean_loss)
    scaled = auto.apply(lambda params, x, scale: scale * mean_loss(params, x))
    cases = [
        (lambda params: evaluate(params, x), params),
        (lambda params: step(params, x)[0], params),
        (lambda params: sum(map(jnp.sum, jax.tree.leaves(step(params, x)[1]))), params),
        (lambda scale: scaled(params, x, scale), 2.0),
    ]
    for f, arg in cases:
        with pytest.raises(NotImplementedError, match=r"`jax.grad`.*zero.value_and_grad.*jax.jvp"):
            wrap(jax.grad(f))(arg)


@pytest.mark.exhaustive
def test_forward_mode_of_gradients_is_a_hessian_vector_product(auto):
    whole, x = whole_params(), make_rows(auto)
    params = auto.shard(whole)

    @jax.jit
    def product(params, vector):
        return jax.jvp(lambda p: auto.value_and_grad(mean_loss)(p, x)[1], (params,), (vector,))[1]

    def gradient(params):
        return jax.grad(mean_loss)(params, x)

    ones = jax.tree.map(jnp.ones_like, whole)
    want = jax.jvp(gradient, (whole,), (ones,))[1]
    zoo.assert_close(auto.unshard(product(params, auto.shard(ones))), want, 1e-4, "product")


def test_vmap_over_batches(auto):
    params, x = auto.shard(whole_params()), make_rows(auto)
    losses, grads = jax.vmap(lambda x: auto.value_and_grad(mean_loss)(params, x))(
        jnp.stack([x, 2 * x])
    )
    want, want_grads = on_one_device(mean_loss)(whole_params(), 2 * x)
    zoo.assert_close(losses[1], want, 1e-5, "loss")
    zoo.assert_close(grads["table"][1], want_grads["table"], 1e-5, "grads")


def test_disable_jit_has_no_effect_inside(auto):
    want = on_one_device(mean_loss)(whole_params(), make_rows(auto))
    with jax.disable_jit():
        params = auto.shard(whole_params())
        made = auto.init(lambda key: jax.random.normal(key, (31, 8)), jax.random.key(0))
        assert_equal(auto, auto.value_and_grad(mean_loss)(params, make_rows(auto)), want)
        loss = auto.apply(mean_loss)(params, make_rows(auto))
    zoo.assert_close(loss, want[0], 1e-5, "loss")
    zoo.assert_close(auto.unshard(made), jax.random.normal(jax.random.key(0), (31, 8)), 0, "made")
