"""Update a leaf in the loop that makes its gradient, layer by layer; the gradient is not stored.

The loop carries the stacks in host memory of a leaf's parameter and state, and the layer of each
that is updated next, on the device. An update computes the new layer, fetches the layer after it,
and then writes the new one. The write is tied behind the fetches from the same stack; otherwise XLA
would copy the full stack in host memory, to keep the layers that are still to be fetched. Backward
reads a parameter from the stack that is carried, always a layer that is not updated yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._collectives import copy_to_device, copy_to_host
from .host_stacks import LayerIndex

Layers = list[Array | None]  # of each stack of a leaf; None: not known, or unchanged


@dataclasses.dataclass(frozen=True)
class LeafUpdate:
    """The update of one leaf, on one device.

    Attributes:
        stacks: this device's shards of the parameter, first, and of its state, in host memory.
        names: their paths.
        reads: which of them the update reads.
        new_layers: the new layer of each stack (None: unchanged), from the mean gradient of a
            layer and from the layers of the stacks that are read (None for others).
    """

    stacks: Sequence[Shaped[Array, ...]]
    names: Sequence[str]
    reads: Sequence[bool]
    new_layers: Callable[[Array, Layers], Layers]


class Updated(NamedTuple):
    """What a loop carries of a leaf that it updates."""

    stacks: list[Array]
    layers: Layers  # on the device: those that are updated next


class UpdateInLoop:
    """The update of one leaf in one loop.

    Args:
        update: of the leaf.
        layer_index: the layer of an iteration.
    """

    def __init__(self, update: LeafUpdate, layer_index: LayerIndex):
        self.update = update
        self._layer_index = layer_index

    def start(self) -> Updated:
        """The stacks before the first iteration, and their first layers."""
        stacks = list(self.update.stacks)
        return Updated(stacks, self._fetched(stacks, jnp.asarray(0)))

    def advance(
        self,
        state: Updated,
        gradient: Array,
        iteration: Array,
        reads: Sequence[Array] = (),
        *,
        is_last: bool = False,
    ) -> tuple[Updated, list[Array]]:
        """Update the layer of an iteration, and fetch that of the next.

        Args:
            state: of the update before.
            gradient: the mean gradient of the layer, on the device.
            iteration: the one that made the gradient. Before iteration 0 there is none, and the
                layer stays as it is.
            reads: layers of the parameter that have been fetched for other purposes, and have to
                be before the write.
            is_last: whether there is no further update.

        Returns:
            The next state, and `reads`.
        """
        stacks, tied = list(state.stacks), list(reads)
        upcoming: Layers = [None] * len(stacks)
        if not is_last:
            upcoming = self._fetched(stacks, iteration + 1)
        new, index = self.update.new_layers(gradient, state.layers), self._layer_index(iteration)
        for i, (x, name) in enumerate(zip(new, self.update.names, strict=True)):
            if x is None:
                continue
            old = state.layers[i]
            if old is not None:
                x = jnp.where(iteration >= 0, x, old)
            if i == 0:
                x, upcoming[i], tied = lax.optimization_barrier((x, upcoming[i], tied))
            else:
                x, upcoming[i] = lax.optimization_barrier((x, upcoming[i]))
            layer = copy_to_host(x, "update", f"{name}[i]", windowed=True)
            stacks[i] = lax.dynamic_update_index_in_dim(stacks[i], layer, index, 0)
        return Updated(stacks, upcoming), tied

    def _fetched(self, stacks: Sequence[Array], iteration: Array) -> Layers:
        """The layers that the update of an iteration reads, on the device."""
        index = self._layer_index(iteration)
        return [
            copy_to_device(
                lax.dynamic_index_in_dim(stack, index, 0, keepdims=False),
                "update",
                f"{name}[i]",
                windowed=True,
            )
            if reads
            else None
            for stack, name, reads in zip(
                stacks, self.update.names, self.update.reads, strict=True
            )
        ]
