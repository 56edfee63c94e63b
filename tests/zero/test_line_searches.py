"""Line searches on padded leaves: `grad` and `value_fn` in true shapes, as on one device."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo

pytestmark = pytest.mark.standard_promotion

SHAPES = {"up": (8, 25), "bias": (25,), "down": (25, 16)}  # 6 devices divide no dim of these
OPTIMIZERS = {
    "lbfgs": optax.lbfgs(),
    "backtracking": optax.chain(
        optax.sgd(4.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=20)
    ),
    "backtracking_with_gradients": optax.chain(
        optax.sgd(4.0),
        optax.scale_by_backtracking_linesearch(max_backtracking_steps=20, store_grad=True),
    ),
}


def _loss(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - 1.0) ** 2)


def _updated(tx, params, state, x, value_and_grad, value_fn):
    """Parameters after three updates."""

    @jax.jit
    def step(params, state, x):
        value, grads = value_and_grad(params, x)
        updates, state = tx.update(
            grads, state, params, value=value, grad=grads, value_fn=lambda p: value_fn(p, x)
        )
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = step(params, state, x)
    return params


@pytest.mark.parametrize("mesh", ["2x3-auto", "2x3-explicit"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_updates_equal_those_on_one_device(name, mesh):
    tx, zero = OPTIMIZERS[name], jz.Zero(zoo.make_mesh(mesh))
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        key = jax.random.key(0)
        whole = {
            leaf: zoo.normal(key, i, *shape).astype(np.float64)
            for i, (leaf, shape) in enumerate(SHAPES.items())
        }
        x = zoo.normal(key, 9, 24, 8, scale=1.0).astype(np.float64)
        on_one = jax.tree.map(jnp.asarray, whole)
        state = tx.init(on_one)
        want = _updated(tx, on_one, state, x, jax.value_and_grad(_loss), _loss)
        params, wrapped = zero.shard(whole), zero.optimizer(tx)
        state = zero.init_optimizer(wrapped, params)
        got = _updated(wrapped, params, state, x, zero.value_and_grad(_loss), _loss)
        moved = jax.tree.map(lambda new, old: float(abs(new - old).max()), want, whole)
        assert all(distance > 0 for distance in jax.tree.leaves(moved)), moved
        zoo.assert_close(jax.device_get(zero.unshard(got)), jax.device_get(want), 1e-9, name)


def test_a_line_search_is_tried_on_padded_leaves_without_a_warning():
    zero = jz.Zero(zoo.make_mesh("2x3-auto"))
    params = zero.shard({leaf: np.ones(shape, np.float32) for leaf, shape in SHAPES.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero.init_optimizer(OPTIMIZERS["backtracking"], params)
