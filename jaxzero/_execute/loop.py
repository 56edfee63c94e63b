"""Run loops over stacked layers, plain or pipelined ([Note: loops] in `schedule`).

A plain loop gathers and reduces each layer within its own iteration. A pipelined loop is a
`lax.scan` over iteration numbers that overlaps the layers. Beside the program's own carry it
carries: buckets with the weights of the next layers, in flight; shards that have been copied from
host memory; buckets with the gradients of the last layers, not fully reduced yet; the stacks of
reduced gradients, which are filled one iteration or more after the layer; and the stacks of node
slices that prefetched gathers keep (hpZ).

Legend: an `iteration` counts from 0 in the order of execution; a `layer_index` is a position in
the stack, which runs backwards in a reversed loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import CommSpec, EncodedShards, ReduceBucket, copy_to_device, repeated
from .._mesh import in_host
from .._plan import BlockPlan, ShardedParam, Stack
from .._program import Atom, Loop, Value
from .deferred_gradients import Deferred, DeferredGradients
from .gathers import Bind, GatherSources, encode_bucket, gather_next_axis, on_shard
from .gradient_buckets import GradientBuckets
from .host_stacks import Fetched, HostStacks, Queues, layer_of
from .update_in_loop import LeafUpdate, UpdatesInLoop
from .weight_buckets import InFlight, WeightBuckets


@runtime_checkable
class Runner(Protocol):
    """The part of `BlockRunner` that a loop uses, for the block around it and for its body.

    `block` imports this module, so this module cannot import `BlockRunner`.
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
        reduce_early: Callable[[Bind], None] | None = None,
    ) -> list[Any]: ...

    def deferred_outputs(self, buckets: Mapping[int, ReduceBucket]) -> dict[int, Any]: ...

    def inside(self, weights: WeightBuckets) -> Runner: ...


class Prologue(NamedTuple):
    """The weights whose gathers start before the first iteration of a loop."""

    in_flight: InFlight  # as `WeightBuckets.in_flight`
    slices: dict[int, dict[ShardedParam, EncodedShards]]  # node slices kept, by iteration
    fetched: Fetched  # shards copied from host memory, of the layers after those in flight


class _State(NamedTuple):
    """The carry of a pipelined loop."""

    carry: list[Any]  # the carry of the program's loop
    in_flight: InFlight  # weights of the next layers
    fetched: Queues  # shards copied from host memory
    rows: dict[int, Array]  # this iteration's slices of the program's stacks in host memory
    deferred: Deferred  # gradients of the last layers, and the stacks of reduced gradients
    slices: list[Array]  # stacks of node slices, one for each of `_Loop.kept_prefetched`


def run_loop(outer: Runner, index: int, loop: Loop) -> list[Any]:
    """Run a loop of a block; return its outputs, with None for those that are views of weights."""
    return _Loop(outer, index, loop).run()


def loop_prologue(outer: Runner, index: int, tie: Bind) -> Prologue:
    """Start to gather the layers of a loop's first iterations."""
    loop = outer.plan.block.operations[index]
    assert isinstance(loop, Loop)
    return _Loop(outer, index, loop).prologue(tie)


class _Loop:
    """One loop, which is operation `index` of the block that `outer` runs."""

    def __init__(self, outer: Runner, index: int, loop: Loop):
        self.outer = outer
        self.index = index
        self.loop = loop
        self.plan = outer.plan.loops[index]
        self.uses = outer.plan.uses.loops[index]
        self.stacks = [self._stack(stack) for stack in self.uses.stacks]
        self.constants_from = {x: outer.weights.sources[x] for x in self.uses.constants}
        self.host = HostStacks(self.plan, self.uses.stacks, self.stacks)
        updates = {number: outer.updates[leaf] for number, leaf in self.plan.updates.items()}
        self.deferred = DeferredGradients(
            self.plan,
            GradientBuckets(self.plan.body, outer.comm),
            loop.length,
            self.layer_index,
            lambda done: self._inside({}).deferred_outputs(done),
            UpdatesInLoop(updates, self.layer_index),
        )
        # The queues of parameters that the loop also updates, by index of the output.
        queues = {number: self.host.position_of(x.stacks[0]) for number, x in updates.items()}
        self.updated_queues = {number: i for number, i in queues.items() if i is not None}
        # Weights whose node slices this loop keeps: those gathered in an earlier iteration, and
        # those gathered in the iteration that uses them.
        kept = [
            (group.prefetched, gather.weight)
            for group in self.plan.body.gather_groups
            for gather in group.gathers
            if gather.keeps
        ]
        self.kept_prefetched = [weight for prefetched, weight in kept if prefetched]
        self.kept_in_iteration = [weight for prefetched, weight in kept if not prefetched]

    def run(self) -> list[Any]:
        loop, outer = self.loop, self.outer
        first = loop.num_constants + loop.num_carry
        pairs = zip(loop.inputs, loop.body.inputs, strict=True)
        inputs = [self._input(outside, inside) for outside, inside in pairs]
        self.constants = inputs[: loop.num_constants]
        carry, stacks = inputs[loop.num_constants : first], inputs[first:]
        carry = outer.tie_loop(carry)
        return (self._pipelined if self.plan.is_pipelined else self._plain)(carry, stacks)

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
        iteration must gather something. Before the start, it is the first layer.
        """
        length = self.loop.length
        continued = any(x.continues == self.index for x in self.outer.plan.loops.values())
        after = 2 * length - 1 - iteration if continued else length - 1
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

    def _iterations(self) -> Array:
        """The iteration numbers, in the order of the stacks that are scanned."""
        iterations = jnp.arange(self.loop.length)
        return iterations[::-1] if self.loop.is_reversed else iterations

    def _inside(
        self,
        sources: GatherSources,
        in_flight: InFlight | None = None,
        next_sources: GatherSources | None = None,
    ) -> Runner:
        """Make a runner for one iteration."""
        weights = WeightBuckets(self.plan.body, self.outer.comm, sources, in_flight, next_sources)
        return self.outer.inside(weights)

    def _plain(self, carry: list[Any], stacks: list[Any]) -> list[Any]:
        """Run the loop with each layer gathered and reduced in its own iteration."""
        num_carry = self.loop.num_carry

        def body(carry, scanned):
            stacks, data, iteration = scanned
            layers = {
                layer: shards.layer(x) for (layer, shards), x in zip(known, data, strict=True)
            }
            fetched = self.host.fetch(self.layer_index(iteration), 0)
            inside = self._inside(self.constants_from | layers | fetched)
            outputs = inside.run([*self.constants, *carry, *stacks], self.uses.view_outputs)
            after = inside.weights.sources
            slices = [after[weight].data for weight in self.kept_in_iteration]
            # `scan` stacks only the data; codec and layout are read from the traced body.
            self.templates = {x: after[x] for x in self.kept_in_iteration}
            return outputs[:num_carry], (outputs[num_carry:], slices)

        traced, note = repeated(body, self.loop.length)
        pairs = zip(self.uses.stacks, self.stacks, strict=True)
        known = [(stack.layer, x) for stack, x in pairs if not in_host(x.data)]
        data = [shards.data for _, shards in known]
        scanned = (stacks, data, self._iterations())
        carry, (stacked, slices) = self.loop.scan(traced, carry, scanned)
        note()
        self._keep_slices(dict(zip(self.kept_in_iteration, slices, strict=True)))
        return [*carry, *stacked]

    def _pipelined(self, carry: list[Any], stacks: list[Any]) -> list[Any]:
        """Run the loop with gathers for the next layers and reductions for the previous ones.

        Slices of the program's own stacks in host memory (activations that a policy of
        `jax.checkpoint` has offloaded) are copied to the device one iteration ahead.
        """
        self.host_inputs = {i: x for i, x in enumerate(stacks) if x is not None and in_host(x)}
        stacks = [None if i in self.host_inputs else x for i, x in enumerate(stacks)]
        before = self.outer.prologues.pop(self.index)
        self.templates = {x: kept for each in before.slices.values() for x, kept in each.items()}
        state = self._start(carry, before, stacks)

        def body(state, scanned):
            iteration, stacks = scanned
            state, outputs, slices = self._iteration(state, iteration, stacks)
            return state, (outputs, slices)

        traced, note = repeated(body, self.loop.length)
        state, (stacked, slices) = self.loop.scan(traced, state, (self._iterations(), stacks))
        note()
        deferred = self.deferred.finish(state.deferred)
        self._keep_slices(dict(zip(self.kept_prefetched, state.slices, strict=True)))
        self._keep_slices(dict(zip(self.kept_in_iteration, slices, strict=True)))
        self._pass_prologue(state)
        outputs = [*state.carry, *stacked]
        for number, x in deferred.items():
            outputs[number] = x
        for number, leaf in self.plan.updates.items():
            self.outer.updated[leaf], outputs[number] = deferred[number], None
        return outputs

    def _iteration(
        self, state: _State, iteration: Array, stacks: Sequence[Any]
    ) -> tuple[_State, list[Any], list[Any]]:
        """Run one iteration of a pipelined loop.

        Returns:
            The next state; the outputs of the iteration other than the carry; and the node slices
            of the weights in `kept_in_iteration`.
        """
        here, following = (
            self.layer_index(iteration),
            self.layer_index(iteration + self.plan.body.num_hops),
        )
        sources = self.layer(here) | self.host.layers(state.fetched, 0)
        for weight, x in zip(self.kept_prefetched, state.slices, strict=True):
            data = lax.dynamic_index_in_dim(x, here, 0, keepdims=False)
            sources[weight] = dataclasses.replace(self.templates[weight], data=data)
        num_hops = self.plan.body.num_hops
        next_sources = self.layer(following) | self.host.layers(state.fetched, num_hops)
        inside = self._inside(sources, state.in_flight, next_sources)
        rows = [state.rows.get(i, x) for i, x in enumerate(stacks)]
        sent: dict[int, ReduceBucket] = {}

        def reduce_early(bind: Bind) -> None:
            sent.update(self.deferred.reduce_first(state.deferred, bind))

        inputs = [*self.constants, *state.carry, *rows]
        outputs = inside.run(inputs, self.uses.view_outputs, reduce_early)
        done = self.deferred.take_final(outputs)
        new = inside.gradients.deferred
        deferred = self.deferred.advance(state.deferred, new, done, iteration, sent)
        fetched = self._fetch_next(state.fetched, deferred, iteration)
        slices = [
            lax.dynamic_update_index_in_dim(
                x, inside.weights.next_sources[weight].data, following, 0
            )
            for weight, x in zip(self.kept_prefetched, state.slices, strict=True)
        ]
        self.templates.update({x: inside.weights.sources[x] for x in self.kept_in_iteration})
        carry = outputs[: self.loop.num_carry]
        next_rows = self._host_rows(iteration + 1)
        layers = {number: x.layers for number, x in deferred.updated.items()}
        if fetched or next_rows or layers:
            # Otherwise XLA waits for some of the copies before the layer computes.
            operands = (carry, fetched, next_rows, layers)
            carry, fetched, next_rows, layers = lax.optimization_barrier(operands)
            updated = {i: x._replace(layers=layers[i]) for i, x in deferred.updated.items()}
            deferred = deferred._replace(updated=updated)
        in_flight = inside.weights.next_in_flight
        state = _State(carry, in_flight, fetched, next_rows, deferred, slices)
        kept = [inside.weights.sources[weight].data for weight in self.kept_in_iteration]
        return state, outputs[self.loop.num_carry :], kept

    def _start(self, carry: list[Any], before: Prologue, stacks: list[Any]) -> _State:
        """The state before the first iteration."""
        length = self.loop.length
        slices = []
        for weight in self.kept_prefetched:
            data = before.slices[0][weight].data
            stack = jnp.zeros((length, *data.shape), data.dtype)
            for iteration, kept in before.slices.items():
                layer_index = self.layer_index(jnp.asarray(iteration))
                stack = lax.dynamic_update_index_in_dim(stack, kept[weight].data, layer_index, 0)
            slices.append(stack)
        fetched = self.host.continued(before.fetched)
        if fetched is None:
            fetched = self.host.first(self.layer_index)
        rows = [None if x is None else x[0] for x in stacks]

        first_rows = self._host_rows(jnp.asarray(0))

        def first(deferred: Deferred) -> Deferred:
            state = _State(carry, before.in_flight, fetched, first_rows, deferred, slices)
            return self._iteration(state, jnp.asarray(0), rows)[0].deferred

        tie = functools.partial(self.outer.tie_to, self.plan.tie)
        deferred = self.deferred.start(first, tie)
        return _State(carry, before.in_flight, fetched, first_rows, deferred, slices)

    def _fetch_next(self, queues: Queues, deferred: Deferred, iteration: Array) -> Queues:
        """Copy the next layer of each stack in host memory to the device."""
        current = {
            self.updated_queues[number]: x.stacks[0]
            for number, x in deferred.updated.items()
            if number in self.updated_queues
        }
        return self.host.advance(queues, self.layer_index, iteration, current)

    def _host_rows(self, iteration: Array) -> dict[int, Array]:
        """An iteration's slices of the program's stacks in host memory, on the device."""
        i = self.layer_index(iteration)
        return {
            number: copy_to_device(
                lax.dynamic_index_in_dim(x, i, 0, keepdims=False), "activations", "", windowed=True
            )
            for number, x in self.host_inputs.items()
        }

    def _keep_slices(self, slices: dict[ShardedParam, Array]) -> None:
        """Let later gathers start from the stacks of node slices, in place of the shards."""
        for stack in self.uses.stacks:
            if stack.layer in slices:
                kept = self.templates[stack.layer].stack(slices[stack.layer])
                self.outer.weights.sources[stack.view.weight] = kept

    def _pass_prologue(self, state: _State) -> None:
        """Hand the buckets in flight at this loop's end to the loop that continues with them."""
        for number, other in self.outer.plan.loops.items():
            if other.continues == self.index:
                fetched = self.host.passed(state.fetched)
                self.outer.prologues[number] = Prologue(state.in_flight, {}, fetched)
