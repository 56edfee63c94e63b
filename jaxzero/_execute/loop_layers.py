"""What a loop over stacked layers has to know of its layers: which is where, and its shards.

Legend: an `iteration` counts from 0 in the order of execution; a `layer_index` is a position in
the stack, which runs backwards in a reversed loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array

from .._collectives import CommSpec, EncodedShards, ReduceBucket
from .._mesh import in_host
from .._plan import BlockPlan, ShardedParam, Stack, slices_kept_in_program
from .._program import Atom, Loop, Value
from .gradient_buckets import GradientBuckets
from .host_stacks import Fetched, HostStacks, layer_of
from .update_in_loop import LeafUpdate
from .weight_buckets import (
    Bind,
    GatherSources,
    InFlight,
    WeightBuckets,
    encode_bucket,
    gather_next_axis,
    on_shard,
)


@runtime_checkable
class Runner(Protocol):
    """The part of `BlockRunner` that a loop uses, for the block around it and for its body.

    `block` imports the modules of loops, so these cannot import `BlockRunner`.
    """

    plan: BlockPlan
    comm: CommSpec
    weights: WeightBuckets
    gradients: GradientBuckets
    prologues: dict[int, Prologue]
    updates: Mapping[int, LeafUpdate]
    updated: dict[int, list[Array]]

    def read(self, atom: Atom) -> Any: ...

    def tie_loop(self, carry: list[Any]) -> list[Any]: ...

    def tie_to(self, value: Value | None, arrays: list[Any]) -> list[Any]: ...

    def run(
        self,
        inputs: Sequence[Any],
        view_outputs: frozenset[int],
        reduce_previous: Callable[[Bind], None] | None = None,
    ) -> list[Any]: ...

    def deferred_outputs(self, buckets: Mapping[int, ReduceBucket]) -> dict[int, Any]: ...

    def inside(self, weights: WeightBuckets) -> Runner: ...


class Prologue(NamedTuple):
    """The weights whose gathers start before the first iteration of a loop."""

    in_flight: InFlight  # as `WeightBuckets.in_flight`
    slices: dict[int, dict[ShardedParam, EncodedShards]]  # node slices kept, by iteration
    fetched: Fetched  # shards copied from host memory, of the layers after those in flight


class LoopLayers:
    """The layers of one loop, which is operation `index` of the block that `outer` runs."""

    def __init__(self, outer: Runner, index: int):
        loop = outer.plan.block.operations[index]
        assert isinstance(loop, Loop)
        self.outer = outer
        self.index = index
        self.loop = loop
        self.plan = outer.plan.loops[index]
        self.uses = outer.plan.uses.loops[index]
        self.stacks = [self._stack(stack) for stack in self.uses.stacks]
        self.constants_from = {x: outer.weights.sources[x] for x in self.uses.constants}
        self.host = HostStacks(self.plan, self.uses.stacks, self.stacks)
        self.is_continued = any(x.continues == index for x in outer.plan.loops.values())
        # Weights whose node slices this loop keeps: those gathered in an earlier iteration, and
        # those gathered in the iteration that uses them, which may be by a loop inside.
        prefetched = {
            gather.weight
            for group in self.plan.body.gather_groups
            for gather in group.gathers
            if gather.keeps and group.prefetched
        }
        made = slices_kept_in_program(self.plan.body)
        kept = [stack.layer for stack in self.uses.stacks if stack.layer in made]
        self.kept_prefetched = [layer for layer in kept if layer in prefetched]
        self.kept_in_iteration = [layer for layer in kept if layer not in prefetched]

    def inputs(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants, carry and stacks of the program's loop; None for a weight."""
        loop = self.loop
        first = loop.num_constants + loop.num_carry
        pairs = zip(loop.inputs, loop.body.inputs, strict=True)
        inputs = [self._input(outside, inside) for outside, inside in pairs]
        carry = self.outer.tie_loop(inputs[loop.num_constants : first])
        return inputs[: loop.num_constants], carry, inputs[first:]

    def _input(self, outside: Atom, inside: Value) -> Any:
        """An input of the program's loop; None for a weight."""
        body = self.plan.body
        if inside in body.gradients.sums:  # it starts from zero
            return self.outer.gradients.zeros(inside, body.gradients.sums[inside])
        return None if inside in body.uses.views else self.outer.read(outside)

    def prologue(self, tie: Bind) -> Prologue:
        """Start the gathers of the first `num_hops` layers; a gather has `num_hops` axes.

        The first layer is gathered over all axes, the next over all but the last, and so on. Each
        iteration then gathers every layer in flight over one more axis.
        """
        comm, num_hops = self.outer.comm, self.plan.body.num_hops
        in_flight: InFlight = {}
        slices: dict[int, dict[ShardedParam, EncodedShards]] = {}
        fetched = self.host.passed(self.host.first(self.layer_index, tie))
        for hop in range(num_hops):
            layer_index = self.layer_index(jnp.asarray(num_hops - 1 - hop))
            sources = self.layer(layer_index) | self.host.fetch(layer_index, num_hops, tie)
            before = dict(sources)
            for number, group in enumerate(self.plan.body.gather_groups):
                if group.prefetched:
                    buckets = encode_bucket(group, sources, comm, tie, lambda messages: messages)
                    for done in range(hop + 1):
                        buckets = gather_next_axis(group, buckets, comm, num_hops - done)
                    in_flight.setdefault(number, []).append(buckets)
            slices[num_hops - 1 - hop] = {
                x: sources[x] for x in sources if sources[x] is not before[x]
            }
        return Prologue(in_flight, slices, fetched)

    def layer_index(self, iteration: Array) -> Array:
        """The layer of an iteration; `iteration` may lie outside of the loop.

        Past the end, it is the layer that the backward loop takes first, second and so on, if a
        loop continues with this loop's buckets; otherwise the last layer again, since every
        iteration of a loop must gather something. Before the start, it is the first layer.
        """
        length = self.loop.length
        after = 2 * length - 1 - iteration if self.is_continued else length - 1
        iteration = jnp.where(iteration < length, jnp.maximum(iteration, 0), jnp.maximum(after, 0))
        return length - 1 - iteration if self.loop.is_reversed else iteration

    def layer(self, i: Array) -> GatherSources:
        """The shard or node slice of each constant, and of layer `i` of stacks on the device."""
        return self.constants_from | {
            stack.layer: layer_of(shards, i)
            for stack, shards in zip(self.uses.stacks, self.stacks, strict=True)
            if not in_host(shards.data)
        }

    def _stack(self, stack: Stack) -> EncodedShards:
        """The shards of a stack of layers, after the operations of the stack's view."""
        view, sources = stack.view, self.outer.weights.sources
        shards = sources[view.weight]
        # A stack of vectors is stored as one message, of which no layer can be cut out.
        is_message = shards.codec is not None and not shards.lead
        if not view.ops and not is_message:
            return shards
        # XLA would merge the copies that several loops make, since nothing ties them.
        shards = sources[view.weight] = shards.on_device(view.weight.name, windowed=False)
        if not view.ops:
            return shards.encode(None, ())
        return on_shard(shards, view.ops, view.weight)[0]

    def iterations(self, start: int, stop: int) -> Array:
        """The iteration numbers from `start` to `stop`, in the order of stacks that are scanned."""
        iterations = jnp.arange(start, stop)
        return iterations[::-1] if self.loop.is_reversed else iterations

    def inside(
        self,
        sources: GatherSources,
        in_flight: InFlight | None = None,
        next_sources: GatherSources | None = None,
        starts_gathers: bool = True,
    ) -> Runner:
        """Make a runner for one iteration; for its arguments see `WeightBuckets`."""
        plan, comm = self.plan.body, self.outer.comm
        weights = WeightBuckets(plan, comm, sources, in_flight, next_sources, starts_gathers)
        return self.outer.inside(weights)

    def take_kept(self, layers: Sequence[ShardedParam]) -> GatherSources:
        """Remove and return the stacks of node slices of the step before (`EncodedShards.kept`)."""
        taken = {}
        for i, stack in enumerate(self.uses.stacks):
            shards = self.stacks[i]
            if stack.layer in layers and shards.kept is not None:
                taken[stack.layer] = shards.kept
                self.stacks[i] = dataclasses.replace(shards, kept=None)
        return taken

    def keep_slices(self, slices: Mapping[ShardedParam, EncodedShards]) -> None:
        """Let later gathers start from the stacks of node slices, in place of the shards."""
        for stack in self.uses.stacks:
            if stack.layer in slices:
                self.outer.weights.sources[stack.view.weight] = slices[stack.layer]
