"""The arrays that a stage keeps from tick to tick, and the micro-batches that a tick works on."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._program import Loop, Value, dtype_of, shape_of


class State(NamedTuple):
    """The arrays that a stage keeps from one tick to the next.

    Attributes:
        activations: the message that came from the stage before (`LayerCut.activations`): the carry
            of the forward loop, and the stacked outputs of this loop that the head reads, with the
            layers of all stages.
        cotangents: the message that goes to the stage before: the carry of the backward loop, and
            the values that each of its layers reads (`LayerCut.travelling`).
        saved: an array `[slots, layers, ...]` for each output that forward saves for backward.
        outputs: an array `[microbatches, ...]` for each output of the program that is no gradient;
            valid on the last stage only.
    """

    activations: list[Any]
    cotangents: list[Any]
    saved: list[Array]
    outputs: list[Array]


class MicroBatch(NamedTuple):
    """The micro-batch that the forward or backward part of a tick works on, on this stage.

    Attributes:
        index: the number of the micro-batch; if this stage has none in this tick, that of the
            nearest one.
        exists: whether this stage has a micro-batch in this tick.
        given: the values of the program's inputs for micro-batch `index`.
        loops: the layer loops.
    """

    index: Array
    exists: Array
    given: dict[Value, Any]
    loops: tuple[Loop | None, ...]

    def runs(self, is_layer: Array | None) -> Array:
        """Return whether a layer does real work: on an existing micro-batch, and not as padding.

        Args:
            is_layer: false for a padding layer; None: no stage has padding layers.
        """
        return self.exists if is_layer is None else self.exists & is_layer


def num_slots(num_stages: int, microbatches: int) -> int:
    """Return how many micro-batches' saved activations a stage holds at most at a time."""
    return min(2 * num_stages - 1, microbatches)


def masked(exists: Array, x: Array) -> Array:
    """Return `x` if `exists` is true, otherwise zeros."""
    return lax.select_n(exists, jnp.zeros_like(x), x)


def zeros(like: Any, *lead: int, layers: int | None = None) -> Array:
    """Return zeros in the dtype and shape of an atom, with further leading dims.

    Args:
        like: the atom.
        *lead: sizes of the further dims.
        layers: if the atom is a stack, the number of layers of the zeros; None: that of the atom.
    """
    shape = shape_of(like) if layers is None else (layers, *shape_of(like)[1:])
    return jnp.zeros((*lead, *shape), dtype_of(like))
