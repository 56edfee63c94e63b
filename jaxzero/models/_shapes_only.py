"""Random keys for a model that is built for its shapes."""

from collections.abc import Callable

import jax
from flax import nnx


class ShapesOnly(nnx.Rngs):
    """Returns the same random key for every stream, in place of `nnx.Rngs`.

    Use it under `nnx.eval_shape`, where `nnx.Rngs` is slow: the counters of its keys are tracers,
    and every draw walks over the program that has been traced so far, which is quadratic in the
    number of layers. Shapes do not depend on keys. `make_layers` builds only one layer of each
    kind from it, and copies that.
    """

    _key: jax.Array

    def __init__(self):  # without streams
        object.__setattr__(self, "_key", jax.random.key(0))  # no part of Flax's state

    def __getattr__(self, stream: str) -> Callable[[], jax.Array]:
        return lambda: self._key
