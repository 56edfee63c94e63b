"""The shapes of a model's parameters, without computing initial values."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


class _OneKey(nnx.Rngs):
    """Returns the same random key for every stream, in place of `nnx.Rngs`.

    `nnx.Rngs` counts the keys that it draws. Under `nnx.eval_shape` the counters are tracers, and
    every draw walks over the program that has been traced so far, which is quadratic in the number
    of layers. Shapes do not depend on keys.
    """

    _key: jax.Array

    def __init__(self):  # without streams
        object.__setattr__(self, "_key", jax.random.key(0))  # no part of Flax's state

    def __getattr__(self, stream: str) -> Callable[[], jax.Array]:
        return lambda: self._key


def abstract_model(make: Callable[[Any], nnx.Module], *, scanned: bool) -> tuple[Any, Any]:
    """Return the graph of a model, and its parameters as shapes and dtypes.

    Args:
        make: makes the model, given its `nnx.Rngs`.
        scanned: whether its layers are stacked, for which it splits the `nnx.Rngs`.
    """
    return nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0) if scanned else _OneKey())))
