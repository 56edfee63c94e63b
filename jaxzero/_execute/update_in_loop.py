"""Update a leaf in the loop that makes its gradient, layer by layer; the gradient is not stored.

The loop carries the stacks in host memory of a leaf's parameter and state, and the layer of each
that is updated next, on the device. Backward reads a parameter from the stack that is carried,
always a layer that is not updated yet.

[Note: write, then fetch] XLA writes into a stack in its place only if nothing reads the old stack
any more, so a write and a fetch from the same stack cannot overlap. The write comes first: what it
writes is known when the iteration begins, so XLA begins with it, and fetches the next layer while
the rest of the iteration computes. If the fetch came first, XLA would wait for it before it
computes anything. The fetch also waits for a product with a quarter of the iteration's work behind
it: where collectives start early (`compiler_options`), XLA otherwise starts it at once and waits
for the write before it, 2.9 ms in each iteration (Llama-7B, ZeRO-3, 2 x 8 H200, predicted). The
same holds for the layer of such a stack that is fetched to be gathered. A product that is only late
in the program's order will not do: XLA computes it first, and then fetches.

[Note: the last updates] The last iteration runs after the loop (`_plan.loop_ends`). It also fetches
the layers of all updates that are left, and near its end updates the layer whose gradient is
reduced by then. After it nothing computes that could hide these copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._collectives import copy_to_device, copy_to_host
from .host_stacks import LayerIndex
from .weight_buckets import Bind

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

    def start(self, number: int, tie: Bind) -> Updated:
        """The stacks of a leaf before the first iteration, and their first layers.

        `tie` delays the copies of these, which XLA would otherwise start before the forward pass.
        """
        stacks = list(self.leaves[number].stacks)
        return Updated(stacks, self._fetched(number, stacks, jnp.asarray(0), tie))

    def advance(
        self,
        states: Mapping[int, Updated],
        gradients: Mapping[int, Array],
        iteration: Array,
        following: Array | None,
    ) -> dict[int, Updated]:
        """Update one layer of some leaves, and fetch the next.

        Args:
            states: of all leaves, after the update before.
            gradients: of those that are updated, the mean gradient of the layer, on the device.
            iteration: the one that made these gradients. Before iteration 0 there are none, and
                the layer stays as it is.
            following: the one after, whose layers are fetched once this array is known; None: there
                is no further update.
        """
        advanced = dict(states)
        for number, gradient in gradients.items():
            stacks = self._written(number, states[number], gradient, iteration)
            layers: Layers = [None] * len(stacks)
            if following is not None:
                layers = self._fetched(number, stacks, following)
            advanced[number] = Updated(stacks, layers)
        return advanced

    def fetch(
        self, states: Mapping[int, Updated], numbers: Iterable[int], iteration: Array
    ) -> dict[int, Layers]:
        """Fetch, for the leaves in `numbers`, the layers that the update of an iteration reads."""
        return {
            number: self._fetched(number, states[number].stacks, iteration) for number in numbers
        }

    def _written(
        self, number: int, state: Updated, gradient: Array, iteration: Array
    ) -> list[Array]:
        """The stacks of a leaf with the new layers."""
        leaf, index, stacks = self.leaves[number], self._layer_index(iteration), list(state.stacks)
        # The bits of a mean that is stored: XLA may not merge factors of the mean and the update.
        new = leaf.new_layers(lax.optimization_barrier(gradient), state.layers)
        for i, (x, old, name) in enumerate(zip(new, state.layers, leaf.names, strict=True)):
            if x is None:
                continue
            x = x if old is None else jnp.where(iteration >= 0, x, old)
            layer = copy_to_host(x, "update", f"{name}[i]", windowed=True)
            stacks[i] = lax.dynamic_update_index_in_dim(stacks[i], layer, index, 0)
        return stacks

    def _fetched(
        self, number: int, stacks: Sequence[Array], iteration: Array, tie: Bind | None = None
    ) -> Layers:
        """The layers that the update of an iteration reads, on the device."""
        leaf, index = self.leaves[number], self._layer_index(iteration)
        (index,) = tie([index]) if tie else (index,)
        return [
            copy_to_device(
                lax.dynamic_index_in_dim(stack, index, 0, keepdims=False),
                "update",
                f"{name}[i]",
                windowed=True,
            )
            if reads
            else None
            for stack, name, reads in zip(stacks, leaf.names, leaf.reads, strict=True)
        ]
