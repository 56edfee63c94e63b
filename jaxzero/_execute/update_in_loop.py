"""Update a leaf in the loop that makes its gradient, layer by layer; the gradient is not stored.

The loop carries the stacks in host memory of a leaf's parameter and state, and the layer of each
that is updated next, on the device. Backward reads a parameter from the stack that is carried,
always a layer that is not updated yet.

[Note: halves] XLA writes into a stack in its place only if nothing reads the old stack any more, so
of a stack a read and a write cannot overlap. In one half of an iteration, the parameter's new layer
is written and the next layers of the state are fetched; in the other half, the next layers of the
parameter are fetched and the state is written. So copies in both directions are under way in both
halves. A barrier with a value that exists halfway separates the two; without it, XLA would wait for
the first half of the copies before it computes anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._collectives import copy_to_device, copy_to_host
from .gathers import Bind
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


class UpdatesInLoop:
    """The updates of leaves in one loop.

    Args:
        updates: of the leaves, by index of the loop's output that is the gradient.
        layer_index: the layer of an iteration.
    """

    def __init__(self, updates: Mapping[int, LeafUpdate], layer_index: LayerIndex):
        self.leaves = updates
        self._layer_index = layer_index

    def start(self, number: int) -> Updated:
        """The stacks of a leaf before the first iteration, and their first layers."""
        stacks, first = list(self.leaves[number].stacks), jnp.asarray(0)
        layers = [self._fetched(number, stacks, i, first) for i in range(len(stacks))]
        return Updated(stacks, layers)

    def advance(
        self,
        states: Mapping[int, Updated],
        gradients: Mapping[int, tuple[Array, Array]],
        tie: Bind,
        *,
        is_last: bool = False,
    ) -> dict[int, Updated]:
        """Update one layer of each leaf, and fetch the next.

        Args:
            states: of all leaves, after the update before.
            gradients: of those that are updated, the mean gradient of the layer, on the device,
                and the iteration that made it. Before iteration 0 there is none, and the layer
                stays as it is.
            tie: passes arrays through a barrier with a value that exists when half of the
                iteration is computed.
            is_last: whether there is no further update.
        """
        new = {
            number: self._new_layers(number, states[number], *gradient)
            for number, gradient in gradients.items()
        }
        upcoming = {
            number: [
                None if is_last or not i else self._fetched(number, stacks, i, iteration + 1)
                for i in range(len(stacks))
            ]
            for number, (stacks, (_, iteration)) in _joined(states, gradients)
        }
        params = {number: layers[0] for number, layers in new.items()}
        of_state = {number: layers[1:] for number, layers in new.items()}
        # One barrier for all: of several, XLA's scheduler would wait for one copy after the other.
        of_state, upcoming = _tied(tie, (of_state, upcoming))
        advanced = {}
        for number, (stacks, (_, iteration)) in _joined(states, gradients):
            layers = [params[number], *of_state[number]]
            written = self._written(number, stacks, layers, self._layer_index(iteration))
            if not is_last:
                upcoming[number][0] = self._fetched(number, written, 0, iteration + 1, tie)
            advanced[number] = Updated(written, upcoming[number])
        return {**states, **advanced}

    def _new_layers(
        self, number: int, state: Updated, gradient: Array, iteration: Array
    ) -> Layers:
        new = self.leaves[number].new_layers(gradient, state.layers)
        return [
            x if x is None or old is None else jnp.where(iteration >= 0, x, old)
            for x, old in zip(new, state.layers, strict=True)
        ]

    def _written(
        self, number: int, stacks: Sequence[Array], layers: Layers, index: Array
    ) -> list[Array]:
        """The stacks of a leaf with these layers at `index`."""
        names = self.leaves[number].names
        return [
            stack
            if x is None
            else lax.dynamic_update_index_in_dim(
                stack, copy_to_host(x, "update", f"{name}[i]", windowed=True), index, 0
            )
            for stack, x, name in zip(stacks, layers, names, strict=True)
        ]

    def _fetched(
        self,
        number: int,
        stacks: Sequence[Array],
        i: int,
        iteration: Array,
        tie: Bind | None = None,
    ) -> Array | None:
        """The layer of stack `i` that the update of an iteration reads, on the device."""
        leaf = self.leaves[number]
        if not leaf.reads[i]:
            return None
        index = self._layer_index(iteration)
        (index,) = tie([index]) if tie else (index,)
        layer = lax.dynamic_index_in_dim(stacks[i], index, 0, keepdims=False)
        return copy_to_device(layer, "update", f"{leaf.names[i]}[i]", windowed=True)


def _joined(
    states: Mapping[int, Updated], gradients: Mapping[int, tuple[Array, Array]]
) -> list[tuple[int, tuple[list[Array], tuple[Array, Array]]]]:
    """For each leaf that is updated its stacks, and the layer's gradient and iteration."""
    return [(number, (states[number].stacks, x)) for number, x in gradients.items()]


def _tied(tie: Bind, tree: Any) -> Any:
    arrays, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, tie(arrays))
