"""A run whose step compiles in seconds, and whose state holds all that a state can hold."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxzero as jz

_QUANTIZED = dataclasses.replace(jz.zeropp(), min_quantized_size=0)
ROWS = 24


class Run(NamedTuple):
    zero: jz.Zero
    first: dict[str, Any]  # the state before the first step
    step: Any  # a state to the next; the state that is given may not be used again


def make_run(nodes: int, devices: int, config: jz.ZeroConfig = _QUANTIZED) -> Run:
    """Padded leaves, quantised gradients, Adam in SimiGrad, batches from the key in the state."""
    zero = jz.Zero(jz.make_mesh(nodes, devices=jax.devices()[:devices]), config)
    params = zero.init(_init)
    tx = jz.simigrad(optax.adam(1e-2), target_similarity=0.5, initial=2, max_steps=4)
    with jax.numpy_dtype_promotion("standard"):  # optax
        opt_state = zero.init_optimizer(tx, params)
    key, number = jax.random.key(7), jnp.int32(0)
    first = {"params": params, "opt_state": opt_state, "key": key, "step": number}

    def step(state: dict[str, Any]) -> dict[str, Any]:
        key, batch_key = jax.random.split(state["key"])
        batch = jax.random.normal(batch_key, (ROWS, 7))
        params, opt_state = state["params"], state["opt_state"]
        _, grads = zero.value_and_grad(_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, weight=ROWS)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state, "key": key, "step": state["step"] + 1}

    return Run(zero, first, jax.jit(step, donate_argnums=0))


def _init() -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(0))
    return {
        "w": jax.random.normal(first, (7, 5)),  # padded on every mesh but one device
        "v": jax.random.normal(second, (5, 16)),
        "b": jnp.zeros(16),
    }


def _loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"][None] - 1) ** 2)


def whole(run: Run, state: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every leaf in its true shape, by path."""
    trees = {name: run.zero.unshard(state[name]) for name in ("params", "opt_state")}
    trees |= {"key": jax.random.key_data(state["key"]), "step": state["step"]}
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def assert_same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Fail unless all leaves are equal, bit for bit."""
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape, name
        assert got[name].tobytes() == array.tobytes(), name
