"""Parameters of models for tests that ask nothing of how Flax draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def drawn(make: Callable[[], nnx.Module], seed: int = 0) -> tuple[Any, Any]:
    """Graph and parameters, drawn by NumPy: XLA takes seconds to compile the draws of a model.

    Weights are normal with a standard deviation of 0.3; scales are 1, and biases 0.
    """
    graph, params = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(seed)

    def draw(path: Any, x: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "scale" in name or "bias" in name:
            return jnp.full(x.shape, float("scale" in name), x.dtype)
        return jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype)

    return graph, jax.tree.map_with_path(draw, params)
