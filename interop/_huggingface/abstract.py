"""The shapes of a model's parameters, without arrays."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


class _OneKey(nnx.RngStream):
    """A stream that returns the same key at each call.

    An `nnx.RngStream` counts its calls. When traced, each count makes an error message inside JAX
    whose cost grows with the trace, so that building n layers took time in n squared.
    """

    def __call__(self) -> jax.Array:
        return self.key[...]


def abstract_model(make: Callable[[nnx.Rngs], nnx.Module], *, scanned: bool) -> tuple[Any, Any]:
    """Split a model that is not built into its `nnx.GraphDef` and the shapes of its parameters.

    Args:
        make: builds the model.
        scanned: whether its layers are one stack, which needs a key for each layer.
    """

    def build() -> nnx.Module:
        rngs = nnx.Rngs(0)
        if not scanned:
            rngs.default = _OneKey(0, tag="default")
        return make(rngs)

    return nnx.split(nnx.eval_shape(build))
