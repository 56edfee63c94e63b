"""What a stage passes from tick to tick, and the micro-batch that a part of a tick works on."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._program import Loop, Value, dtype_of, shape_of


class State(NamedTuple):
    """What a stage passes from tick to tick.

    Attributes:
        activations: the message from the stage before: the forward loop's carry, and its stacked
            outputs that the head reads, of all layers.
        cotangents: a message to the stage before: the backward loop's carry, and what all of its
            layers read.
        saved: `[slots, layers, ...]`, for each output that forward saves for backward.
        outputs: `[microbatches, ...]`, for each output of the program that is no gradient; valid on
            the last stage only.
    """

    activations: list[Any]
    cotangents: list[Any]
    saved: list[Array]
    outputs: list[Array]


class MicroBatch(NamedTuple):
    """A micro-batch of a tick.

    Attributes:
        index: the number of the micro-batch; if the tick has none here, that of the nearest one.
        exists: whether the tick has a micro-batch here.
        given: the values of the program's inputs for micro-batch `index`.
        loops: the layer loops.
    """

    index: Array
    exists: Array
    given: dict[Value, Any]
    loops: tuple[Loop | None, ...]

    def runs(self, is_layer: Array | None) -> Array:
        """Whether there is a micro-batch, and the layer is not padding; None: no layer is."""
        return self.exists if is_layer is None else self.exists & is_layer


def num_slots(num_stages: int, microbatches: int) -> int:
    """The most micro-batches whose saved activations a stage holds at a time."""
    return min(2 * num_stages - 1, microbatches)


def masked(exists: Array, x: Array) -> Array:
    """`x` if `exists` is true, otherwise zeros."""
    return lax.select_n(exists, jnp.zeros_like(x), x)


def zeros(like: Any, *lead: int, layers: int | None = None) -> Array:
    """Zeros in the dtype and shape of an atom, with further leading dims.

    Args:
        like: the atom.
        *lead: sizes of the further dims.
        layers: for a stack, its number of layers, if it is not that of `like`.
    """
    shape = shape_of(like) if layers is None else (layers, *shape_of(like)[1:])
    return jnp.zeros((*lead, *shape), dtype_of(like))
