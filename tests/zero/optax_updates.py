"""Updates of an optimizer on a mesh, compared with those on one device."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxzero as jz
from tests import zoo


def assert_equal_to_one_device(
    name: str,
    tx: optax.GradientTransformation,
    extras: Sequence[str],
    mesh: str,
    shapes: Mapping[str, tuple[int, ...]],
    num_updates: int,
    is_wrapped: bool,
) -> None:
    """Compare parameters after `num_updates` updates, which must have moved all of them.

    Args:
        name: of the optimizer, for messages.
        tx: the optimizer.
        extras: names of the extra arguments that its updates need.
        mesh: as in `zoo.make_mesh`.
        shapes: of the parameters `up`, `bias` and `down`.
        num_updates: how many updates are taken.
        is_wrapped: whether `zero.optimizer` wraps the optimizer.
    """
    zero = jz.Zero(zoo.make_mesh(mesh))
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        key = jax.random.key(0)
        whole = {
            leaf: zoo.normal(key, i, *shape).astype(np.float64)
            for i, (leaf, shape) in enumerate(shapes.items())
        }
        x = zoo.normal(key, 9, 24, 8, scale=1.0).astype(np.float64)
        on_one = jax.tree.map(jnp.asarray, whole)
        state = jax.jit(tx.init)(on_one)
        on_one = _updated(tx, extras, on_one, state, x, jax.value_and_grad(_loss), num_updates)
        want = jax.device_get(on_one)
        params = zero.shard(whole)
        tx = zero.optimizer(tx) if is_wrapped else tx
        state = zero.init_optimizer(tx, params)
        got = _updated(tx, extras, params, state, x, zero.value_and_grad(_loss), num_updates)
        moved = jax.tree.map(lambda new, old: float(abs(new - old).max()), want, whole)
        assert all(distance > 0 for distance in jax.tree.leaves(moved)), moved
        zoo.assert_close(jax.device_get(zero.unshard(got)), want, 1e-9, name)


def _loss(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - 1.0) ** 2)


def _updated(tx, extras, params, state, x, value_and_grad, num_updates):
    @jax.jit
    def step(params, state, x):
        value, grads = value_and_grad(params, x)
        options = {
            "value": value,
            "grad": grads,
            "value_fn": lambda params: _loss(params, x),
            "grad_fn": lambda params, _: value_and_grad(params, x)[1],
            "obj_fn": lambda params: _loss(params, x),
        }
        chosen = {name: options[name] for name in extras}
        updates, state = tx.update(grads, state, params, **chosen)
        return optax.apply_updates(params, updates), state

    for _ in range(num_updates):
        params, state = step(params, state, x)
    return params
