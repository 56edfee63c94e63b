"""The stacks of a loop that lie in host memory, and the layers of them that are on the device.

An iteration encodes the shards of the layer that it sends (`num_hops` iterations ahead, if they
are prefetched) and may need those of its own layer. Each stack has a queue of layers on the device
that reaches from the first of these to `window` layers beyond the last. Every iteration copies one
more layer to the end of the queue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import EncodedShards
from .._mesh import in_host
from .._plan import LoopPlan, Stack, View
from .weight_buckets import Bind, GatherSources

LayerIndex = Callable[[Array], Array]  # the layer of an iteration
Queues = list[list[Array]]  # for each stack, the shards of successive iterations
Fetched = dict[tuple[View, int], list[Array]]  # a queue, by its stack and its first iteration


class HostStacks:
    """The stacks of one loop that lie in host memory.

    Args:
        plan: the plan of the loop.
        stacks: the stacks of weights that the loop scans.
        shards: this device's shards of each stack.
    """

    def __init__(self, plan: LoopPlan, stacks: Sequence[Stack], shards: Sequence[EncodedShards]):
        pairs = zip(stacks, shards, strict=True)
        self._stacks = [(stack, x) for stack, x in pairs if in_host(x.data)]
        self._window = plan.window
        self._leads = [plan.leads(stack.layer) for stack, _ in self._stacks]

    def position_of(self, data: Array) -> int | None:
        """The position, among the queues, of the stack that `data` is; None if it is none."""
        return next((i for i, (_, x) in enumerate(self._stacks) if x.data is data), None)

    def fetch(self, layer_index: Array, lead: int, tie: Bind | None = None) -> GatherSources:
        """Copy the layer that is used `lead` iterations later; `tie` delays the copies.

        Stacks that are not needed so early are left out.
        """
        pairs = zip(self._stacks, self._leads, strict=True)
        needed = [(stack, x) for (stack, x), leads in pairs if lead in leads]
        (i,) = tie([layer_index]) if tie and needed else (layer_index,)
        return {stack.layer: _copied(stack, x, i) for stack, x in needed}

    def first(self, layer_index: LayerIndex, tie: Bind | None = None) -> Queues:
        """The queues before the first iteration."""
        queues = []
        for (stack, x), leads in zip(self._stacks, self._leads, strict=True):
            iterations = range(leads[0], leads[-1] + self._window)
            indices = [layer_index(jnp.asarray(i)) for i in iterations]
            indices = tie(indices) if tie else indices
            queues.append([_copied(stack, x, i).data for i in indices])
        return queues

    def layers(self, queues: Queues, lead: int) -> GatherSources:
        """The layers that are needed `lead` iterations before their use.

        A stack that is not needed so early, or no more, has a shape and dtype in place of data.
        """
        sources = {}
        for (stack, x), queue, leads in zip(self._stacks, queues, self._leads, strict=True):
            struct = jax.ShapeDtypeStruct(x.data.shape[1:], x.data.dtype)
            layer = x.layer(queue[lead - leads[0]] if lead in leads else x.described(struct).data)
            sources[stack.layer] = layer
        return sources

    def advance(
        self,
        queues: Queues,
        layer_index: LayerIndex,
        iteration: Array,
        current: Mapping[int, Array],
    ) -> Queues:
        """Copy the next layer of each stack to the device; drop the first layer of its queue.

        Args:
            queues: one for each stack.
            layer_index: the layer of an iteration.
            iteration: its number.
            current: the stacks, by position, of which the loop updates layers; these are read in
                place of those before the loop.
        """
        advanced = []
        every = zip(self._stacks, self._leads, queues, strict=True)
        for number, ((stack, x), leads, queue) in enumerate(every):
            x = dataclasses.replace(x, data=current.get(number, x.data))
            i = layer_index(iteration + leads[-1] + self._window)
            advanced.append([*queue[1:], _copied(stack, x, i).data])
        return advanced

    def passed(self, queues: Queues) -> Fetched:
        """The queues after the last iteration, for the loop that continues with them."""
        pairs = zip(self._stacks, self._leads, queues, strict=True)
        return {(stack.view, leads[0]): queue for (stack, _), leads, queue in pairs}

    def continued(self, fetched: Fetched) -> Queues | None:
        """The queues that another loop has passed on; None if they are not those of this loop."""
        queues = []
        for (stack, _), leads in zip(self._stacks, self._leads, strict=True):
            queue = fetched.get((stack.view, leads[0]), [])
            if len(queue) != leads[-1] - leads[0] + self._window:
                return None
            queues.append(queue)
        return queues


def _copied(stack: Stack, shards: EncodedShards, i: Array) -> EncodedShards:
    """Layer `i` of a stack in host memory, on the device."""
    return layer_of(shards, i).on_device(stack.layer.name, windowed=True)


def layer_of(stack: EncodedShards, i: Array) -> EncodedShards:
    """Layer `i` of a stack of shards, in the memory where the stack is."""
    data = lax.dynamic_index_in_dim(stack.data, i, 0, keepdims=False)
    if stack.kept is None:
        return stack.layer(data)
    return stack.layer(data, lax.dynamic_index_in_dim(stack.kept.data, i, 0, keepdims=False))
