"""Five updates of a small tree, by windows on devices and by optax on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import jaxzero as jz
from jaxzero._windowed_update import UpdateLayouts, windowed_update

STEPS = 5
RATE = 1e-2  # of learning
SHAPES = {
    "stack": {"kernel": (4, 8, 6), "odd": (3, 7, 5)},  # layers first; the second is padded
    "matrix": (8, 12),
    "odd": (7, 5),
    "bias": (3,),  # too small for host memory
    "scale": (),
}
SIZE = 4 * 8 * 6 + 3 * 7 * 5 + 8 * 12 + 7 * 5 + 3 + 1
MESHES = {
    "2x2": lambda: jz.make_mesh(2, devices=jax.devices()[:4]),
    "2x4-explicit": lambda: jz.make_mesh(2, axis_type=AxisType.Explicit),
    "1x3": lambda: jz.make_mesh(1, devices=jax.devices()[:3]),
}
PLACES = {
    "all": dict(weights=True, optimizer=True, gradients=True),
    "but_gradients": dict(weights=True, optimizer=True),
    "state": dict(optimizer=True),
    "weights": dict(weights=True),
    "gradients": dict(gradients=True),
    "one_stack": dict(optimizer="stack.*", gradients="stack.odd"),
}
# A window of one row of a layer; of some rows, so that windows overlap in an array of 7 rows, of
# gradients or of all arrays of a leaf; of a layer or more; and of the full leaf.
ROW, OF_GRADIENTS, OVERLAPPING, LAYER, ALL = 1, 70, 250, 1000, 2**26


def offload(place: str) -> jz.Offload:
    return jz.Offload(min_size=24, **PLACES[place])


def random_tree(seed: int, shapes: Any = None) -> Any:
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: random.normal(size=shape).astype(np.float32),
        SHAPES if shapes is None else shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def gradient(step: int) -> Any:
    return random_tree(100 + step)


def reference(tx: Any, **extra_args: Any) -> tuple[Any, Any]:
    """Parameters and state after five updates by optax on one device."""
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, random_tree(0))
    state = tx.init(params)
    for step in range(STEPS):
        params, state = update(gradient(step), state, params)
    return params, state


class Updater:
    """Updates of a tree laid out by `Zero`, with some leaves in host memory."""

    def __init__(self, tx: Any, mesh: str, place: str, window_bytes: int):
        self.mesh = MESHES[mesh]()
        self.zero = jz.Zero(self.mesh, jz.ZeroConfig(offload=offload(place)))
        wanted = PLACES[place].get("gradients")
        gradients_in_host = wanted and jz.Offload(min_size=24, weights=wanted)
        self.of_gradients = jz.Zero(self.mesh, jz.ZeroConfig(offload=gradients_in_host or None))
        self.tx = tx
        self.params = self.zero.shard(random_tree(0))
        self.state = self.zero.init_optimizer(self.zero.optimizer(tx), self.params)
        self.window_bytes = window_bytes

    def update(self, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
        layouts = [self.zero.find_layout(tree) for tree in (grads, state, params)]
        return windowed_update(
            self.tx,
            grads,
            state,
            params,
            layouts=UpdateLayouts(*layouts, self.mesh, self.zero.config.axes),
            extra_args=extra_args,
            window_bytes=self.window_bytes,
        )

    def run(self, **extra_args: Any) -> tuple[Any, Any]:
        """Parameters and state after five updates, in their own shapes."""
        run = jax.jit(lambda *trees: self.update(*trees, **extra_args), donate_argnums=(0, 1))
        memory = memory_kinds((self.params, self.state))
        for step in range(STEPS):
            grads = self.of_gradients.shard(gradient(step))
            self.params, self.state = run(self.params, self.state, grads)
        assert memory_kinds((self.params, self.state)) == memory
        return self.zero.unshard(self.params), self.zero.unshard(self.state)


def memory_kinds(tree: Any) -> list[str]:
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def assert_equal_but_for_sums(found, expected):
    # A sum of n squares in another order differs by at most n eps, relative; a norm by half of
    # that. The update of each step, of size at most RATE times a few, depends on two such norms.
    tolerance = STEPS * RATE * 4 * SIZE * np.finfo(np.float32).eps
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=tolerance)
