"""The shapes of a model's parameters, without computing initial values."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxzero.models import ShapesOnly


def abstract_model(make: Callable[[Any], nnx.Module], *, scanned: bool) -> tuple[Any, Any]:
    """Return the graph of a model, and its parameters as shapes and dtypes.

    Args:
        make: makes the model, given its `nnx.Rngs`.
        scanned: whether its layers are stacked, for which it splits the `nnx.Rngs`.
    """
    graphs = []

    # Split while it is traced: `nnx.eval_shape` walks the model twice more.
    def parameters() -> Any:
        graph, state = nnx.split(make(nnx.Rngs(0) if scanned else ShapesOnly()))
        graphs.append(graph)
        return state

    state = jax.eval_shape(parameters)
    return graphs[0], state
