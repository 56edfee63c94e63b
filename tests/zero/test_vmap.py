"""`jax.vmap` and `jax.lax.scan` over members of an ensemble, of which leaves are stored padded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo

SHAPES = {"up": (8, 25), "down": (25, 12)}  # 6 devices divide a dim of the second
NUM = 3


def _loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - 1.0) ** 2)


@pytest.fixture
def zero():
    return jz.Zero(zoo.make_mesh("2x3-auto"))


def _members():
    """Parameters and batches of all members, and their losses and gradients on one device."""
    key = jax.random.key(0)
    members = {n: zoo.normal(key, i, NUM, *s) for i, (n, s) in enumerate(SHAPES.items())}
    x = zoo.normal(key, 9, NUM, 12, 8, scale=1.0)
    want = jax.jit(jax.vmap(jax.value_and_grad(_loss)))(members, x)
    return members, x, jax.device_get(want)


def _check(got, want):
    # Sums of up to 12 * 12 and 25 products, taken in another order.
    zoo.assert_close(jax.device_get(got), want, 64 * float(np.finfo(np.float32).eps), "vmap")


@pytest.mark.parametrize("loop", ["vmap", "scan"])
def test_members_that_are_laid_out_one_by_one_train_as_on_one_device(zero, loop):
    members, x, want = _members()
    params = jax.vmap(zero.shard)(members)
    value_and_grad = zero.value_and_grad(_loss)
    if loop == "vmap":
        losses, grads = jax.jit(jax.vmap(value_and_grad))(params, x)
    else:
        _, (losses, grads) = jax.lax.scan(
            lambda _, a: (None, value_and_grad(*a)), None, (params, x)
        )
    _check((losses, jax.vmap(zero.unshard)(grads)), want)
    tx = optax.sgd(0.1, momentum=0.9)
    state = jax.vmap(lambda p: zero.init_optimizer(tx, p))(params)
    updates, _ = jax.jit(jax.vmap(tx.update))(grads, state, params)
    _check(jax.vmap(zero.unshard)(updates), jax.tree.map(lambda g: np.float32(-0.1) * g, want[1]))


def test_results_with_a_further_dim_are_refused_with_what_to_do(zero):
    members, x, want = _members()
    _, grads = jax.vmap(zero.value_and_grad(_loss))(jax.vmap(zero.shard)(members), x)
    with pytest.raises(ValueError, match=r"`up`.*added a dim.*`jax.vmap\(zero.unshard\)\(tree\)`"):
        zero.unshard(grads)
    second = zero.unshard(jax.tree.map(lambda g: g[1], grads))
    _check(second, jax.tree.map(lambda g: g[1], want[1]))


def test_a_stack_that_was_laid_out_as_a_whole_is_refused_with_what_to_do(zero):
    members, x, _ = _members()
    stack = zero.shard(members)
    message = r"`up`.*a part of the stored array.*`jax.vmap\(zero.shard\)\(stack\)`"
    with pytest.raises(ValueError, match=message):
        jax.vmap(zero.value_and_grad(_loss))(stack, x)
