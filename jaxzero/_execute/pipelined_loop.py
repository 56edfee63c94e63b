"""Run a pipelined loop: a `lax.scan` over iteration numbers that overlaps the layers.

Beside the program's own carry it carries: buckets with the weights of the next layers, in flight;
shards that have been copied from host memory; buckets with the gradients of the last layers, not
fully reduced yet; the stacks of reduced gradients, which are filled one iteration or more after the
layer; and the stacks of node slices that prefetched gathers keep (hpZ).

The plan may cut off both ends of the loop (`_plan.loop_ends`). These iterations run before and
after it, as loops of their own, and send between nodes no gradients that no layer has made and no
layers that do not exist. Stacks of the program's loop are then indexed, not scanned, and its
stacked outputs are carried, so that no stack is ever cut or joined.

[Note: same bits] Losses and gradients have the same bits as if all iterations were in one loop. So
XLA has to compile each end like the loop's body, with the same barriers inside: where a value is
read by one, XLA does not replace the transpose of a product by a swap of its factors, which may sum
in another order. What an iteration does not send passes through the barriers nevertheless. XLA
takes a single iteration out of its loop, so nothing there may be fused across the ends either.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import ReduceBucket, copy_to_device, recording, repeated
from .._mesh import in_host
from .._plan import ShardedParam, known_after
from .._xla_of_jax import PRODUCTS_MAY_BE_READ_TWICE
from .deferred_gradients import Deferred, DeferredGradients
from .gradient_buckets import GradientBuckets
from .host_stacks import Queues
from .loop_layers import LoopLayers, Prologue, Runner
from .update_in_loop import UpdatesInLoop
from .weight_buckets import Bind, GatherSources, InFlight

_Outputs = tuple[list[Any], list[Array]]  # as `PipelinedLoop._iteration` returns them


class _State(NamedTuple):
    """What a pipelined loop carries."""

    carry: list[Any]  # the carry of the program's loop
    in_flight: InFlight  # weights of the next layers
    fetched: Queues  # shards copied from host memory
    rows: dict[int, Array]  # this iteration's slices of the program's stacks in host memory
    deferred: Deferred  # gradients of the last layers, and the stacks of reduced gradients
    slices: list[Array]  # stacks of node slices, one for each of `LoopLayers.kept_prefetched`
    stacked: Any  # stacked outputs of the iterations so far; None if `lax.scan` stacks them


class PipelinedLoop:
    """A pipelined loop, with gathers for the next layers and reductions for the previous ones.

    Args:
        layers: its layers.
        constants: of the program's loop; None for weights.
        stacks: that the program's loop scans; None for weights. Layers of those in host memory
            (activations that a policy of `jax.checkpoint` has offloaded) are copied to the device
            one iteration ahead.
    """

    def __init__(self, layers: LoopLayers, constants: list[Any], stacks: list[Any]):
        self.layers = layers
        self.outer = layers.outer
        self.loop = layers.loop
        self.plan = layers.plan
        self.num_hops = layers.plan.body.num_hops
        self.constants = constants
        self.host_inputs = {i: x for i, x in enumerate(stacks) if x is not None and in_host(x)}
        self.stacks = [None if i in self.host_inputs else x for i, x in enumerate(stacks)]
        self.templates: GatherSources = {}  # of the node slices: codec and layout
        # Stacks of node slices of the step before, which the loop overwrites layer by layer.
        self.previous = layers.take_kept(layers.kept_prefetched)
        updates = {number: self.outer.updates[leaf] for number, leaf in self.plan.updates.items()}
        self.deferred = DeferredGradients(
            self.plan,
            GradientBuckets(self.plan.body, self.outer.comm),
            self.loop.length,
            layers.layer_index,
            lambda done: layers.inside({}).deferred_outputs(done),
            UpdatesInLoop(updates, layers.layer_index),
        )
        # Fetches from stacks that are updated wait for this value, as [Note: write, then fetch] in
        # `update_in_loop` explains. On CPUs nothing is gained by that, and before JAX 0.11 it
        # changes how a product is rounded.
        body, early = self.plan.body, 1 / 4
        waits = updates and (PRODUCTS_MAY_BE_READ_TWICE or not self.outer.comm.on_cpus)
        self.fetches_after = known_after(body, early, in_any_order=True) if waits else None
        # A write in the last iteration waits for this one, so that the fetches before it need not
        # end earlier: 1.1 ms less to wait for than with 3/4 (Llama-7B, ZeRO-3, 2 x 8 H200).
        self.writes_after = known_after(body, 5 / 6) if waits else None
        # The queues of parameters that the loop also updates, by index of the output.
        queues = {number: layers.host.position_of(x.stacks[0]) for number, x in updates.items()}
        self.updated_queues = {number: i for number, i in queues.items() if i is not None}

    def run(self, carry: list[Any]) -> list[Any]:
        """Run the loop; return its outputs, with None for those that are views of weights."""
        before = self.outer.prologues.pop(self.layers.index)
        first, last = self.plan.num_first, self.loop.length - self.plan.num_last
        state, outputs = self._start(carry, before), None
        for start, stop in ((0, first), (first, last), (last, self.loop.length)):
            if start < stop:
                state, outputs = self._repeated(state, start, stop)
        stacked = state.stacked or outputs
        assert stacked is not None
        outputs, slices = stacked
        deferred = self.deferred.finish(state.deferred)
        self._keep(self.layers.kept_prefetched, state.slices)
        self._keep(self.layers.kept_in_iteration, slices)
        self._pass_prologue(state)
        outputs = [*state.carry, *outputs]
        for number, x in deferred.items():
            outputs[number] = x
        for number, leaf in self.plan.updates.items():
            self.outer.updated[leaf], outputs[number] = deferred[number], None
        return outputs

    def _start(self, carry: list[Any], before: Prologue) -> _State:
        """The state before the first iteration."""
        layers = self.layers
        self.templates = {x: kept for each in before.slices.values() for x, kept in each.items()}
        slices = []
        for weight in layers.kept_prefetched:
            if weight in self.previous:
                stack = self.previous[weight].data
            else:
                data = before.slices[0][weight].data
                stack = jnp.zeros((self.loop.length, *data.shape), data.dtype)
            for iteration, kept in before.slices.items():
                layer_index = layers.layer_index(jnp.asarray(iteration))
                stack = lax.dynamic_update_index_in_dim(stack, kept[weight].data, layer_index, 0)
            slices.append(stack)
        fetched = layers.host.continued(before.fetched)
        if fetched is None:
            fetched = layers.host.first(layers.layer_index)
        first_rows = self._host_rows(jnp.asarray(0))
        tie = functools.partial(self.outer.tie_to, self.plan.tie)
        deferred = self.deferred.start(tie)
        state = _State(carry, before.in_flight, fetched, first_rows, deferred, slices, None)
        return self._with_first_zeros(state)

    def _with_first_zeros(self, state: _State) -> _State:
        """The state before the first iteration, with zeros where later ones hold gradients.

        If ends are cut off, there are stacks for the loop's outputs too.
        """

        def first() -> tuple[Deferred, _Outputs]:
            after, outputs = self._iteration(state, jnp.asarray(0), self._rows(jnp.asarray(0)))
            return after.deferred, outputs

        with recording(None):  # traced only for shapes: its collectives must not be counted
            deferred, outputs = jax.eval_shape(first)
        state = state._replace(deferred=self.deferred.fill(state.deferred, deferred))
        if self.plan.num_first or self.plan.num_last:
            state = state._replace(stacked=self._empty_stacks(outputs))
        return state

    def _repeated(self, state: _State, start: int, stop: int) -> tuple[_State, _Outputs | None]:
        """Run the iterations from `start` to `stop` as a loop.

        Returns:
            The state after them, and the stacked outputs unless they are part of the state.
        """
        is_cut = state.stacked is not None
        reduces = start >= self.plan.num_first
        gathers = stop <= self.loop.length - self.plan.num_last
        hold = lax.optimization_barrier if stop - start == 1 else _same  # [Note: same bits]
        if self.plan.updates_last_apart and not gathers:
            state = state._replace(deferred=self.deferred.with_room_ahead(state.deferred))

        def body(state, scanned):
            iteration, rows = scanned
            if not is_cut:
                return self._iteration(state, iteration, rows)
            iteration, carry = hold((iteration, state.carry))
            carry, rows = hold((carry, self._rows(iteration)))
            state = state._replace(carry=carry)
            state, outputs = hold(
                self._iteration(state, iteration, rows, reduces=reduces, gathers=gathers)
            )
            return self._store(state, outputs, iteration), None

        traced, note = repeated(body, stop - start)
        scanned = self.layers.iterations(start, stop), None if is_cut else self.stacks
        state, outputs = self.loop.scan(traced, state, scanned, stop - start)
        note()
        return state, outputs

    def _iteration(
        self,
        state: _State,
        iteration: Array,
        rows: Sequence[Any],
        *,
        reduces: bool = True,
        gathers: bool = True,
    ) -> tuple[_State, _Outputs]:
        """Run one iteration.

        Args:
            state: before it.
            iteration: its number.
            rows: its slices of the program's stacks on the device.
            reduces: whether gradients are reduced between nodes.
            gathers: whether a later layer is gathered over the first axis.

        Returns:
            The state after it; the outputs of the iteration other than the carry; and the node
            slices of the weights in `kept_in_iteration`.
        """
        layers, num_hops = self.layers, self.num_hops
        here, following = layers.layer_index(iteration), layers.layer_index(iteration + num_hops)
        sources = layers.layer(here) | layers.host.layers(state.fetched, 0)
        for weight, x in zip(layers.kept_prefetched, state.slices, strict=True):
            data = lax.dynamic_index_in_dim(x, here, 0, keepdims=False)
            sources[weight] = dataclasses.replace(self.templates[weight], data=data)
        next_sources = None
        if gathers:
            next_sources = layers.layer(following) | layers.host.layers(state.fetched, num_hops)
            for weight, x in zip(layers.kept_prefetched, state.slices, strict=True):
                if weight in self.previous:
                    data = lax.dynamic_index_in_dim(x, following, 0, keepdims=False)
                    kept = self.previous[weight].layer(data)
                    next_sources[weight] = dataclasses.replace(next_sources[weight], kept=kept)
        inside = layers.inside(sources, state.in_flight, next_sources, gathers)
        sent: dict[int, ReduceBucket] = {}

        def reduce_previous(bind: Bind) -> None:
            before = state.deferred
            sent.update(self.deferred.reduce_first(before, bind, between_nodes=reduces))

        rows = [state.rows.get(i, x) for i, x in enumerate(rows)]
        inputs = [*self.constants, *state.carry, *rows]
        outputs = inside.run(inputs, layers.uses.view_outputs, reduce_previous)
        done = self.deferred.take_final(outputs)
        new = inside.gradients.deferred
        late, end = (
            iteration if x is None else _known_after(iteration, inside.read(x))
            for x in (self.fetches_after, None if gathers else self.writes_after)
        )
        deferred = self.deferred.advance(
            state.deferred, new, done, iteration, sent, between_nodes=reduces, late=late
        )
        if self.plan.updates_last_apart and not gathers:
            deferred = self.deferred.advance_last(deferred, iteration, late, end)
        carry, outputs = outputs[: self.loop.num_carry], outputs[self.loop.num_carry :]
        self.templates.update({x: inside.weights.sources[x] for x in layers.kept_in_iteration})
        kept = [self.templates[weight].data for weight in layers.kept_in_iteration]
        after = state._replace(
            carry=carry,
            in_flight=inside.weights.next_in_flight,
            deferred=deferred,
            slices=self._next_slices(state.slices, inside, iteration) if gathers else state.slices,
        )
        return self._copy_next(after, iteration, late, gathers), (outputs, kept)

    def _next_slices(self, slices: list[Array], inside: Runner, iteration: Array) -> list[Array]:
        """The stacks of node slices, with those that an iteration has gathered ahead.

        Past the end the last layer is sent again. Its slice has the difference already.
        """
        following = iteration + self.num_hops
        exists, i = following < self.loop.length, self.layers.layer_index(following)
        stacks = []
        for weight, x in zip(self.layers.kept_prefetched, slices, strict=True):
            data = inside.weights.next_sources[weight].data
            if weight in self.previous:
                data = jnp.where(exists, data, lax.dynamic_index_in_dim(x, i, 0, keepdims=False))
            stacks.append(lax.dynamic_update_index_in_dim(x, data, i, 0))
        return stacks

    def _copy_next(self, state: _State, iteration: Array, late: Array, gathers: bool) -> _State:
        """Copy from host memory what the next iterations need, at the end of an iteration.

        Without a layer left to gather there is none to copy, either. `late` equals
        `iteration`, but XLA knows it only when layers may be fetched: the stack that they are
        fetched from may be one that this iteration writes into.
        """
        carry, deferred = state.carry, state.deferred
        current = {
            self.updated_queues[number]: x.stacks[0]
            for number, x in deferred.updated.items()
            if number in self.updated_queues
        }
        host, layer_index = self.layers.host, self.layers.layer_index
        fetched = state.fetched
        if gathers:
            fetched = host.advance(fetched, layer_index, late, current)
        rows = self._host_rows(iteration + 1)
        layers = {number: x.layers for number, x in deferred.updated.items()}
        if fetched or rows or layers:
            # Otherwise XLA waits for some of the copies before the layer computes.
            operands = (carry, fetched, rows, layers, deferred.ahead)
            carry, fetched, rows, layers, ahead = lax.optimization_barrier(operands)
            updated = {i: x._replace(layers=layers[i]) for i, x in deferred.updated.items()}
            deferred = deferred._replace(updated=updated, ahead=ahead)
        return state._replace(carry=carry, fetched=fetched, rows=rows, deferred=deferred)

    def _host_rows(self, iteration: Array) -> dict[int, Array]:
        """An iteration's slices of the program's stacks in host memory, on the device."""
        i = self.layers.layer_index(iteration)
        return {
            number: copy_to_device(
                lax.dynamic_index_in_dim(x, i, 0, keepdims=False), "activations", "", windowed=True
            )
            for number, x in self.host_inputs.items()
        }

    def _rows(self, iteration: Array) -> list[Any]:
        """An iteration's slices of the program's stacks on the device; None for other stacks."""
        i = self.layers.layer_index(iteration)
        return [
            None if x is None else lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
            for x in self.stacks
        ]

    def _store(self, state: _State, outputs: _Outputs, iteration: Array) -> _State:
        """The state with an iteration's outputs in their stacks."""
        index = self.layers.layer_index(iteration)

        def stored(stack: Array, x: Array) -> Array:
            return lax.dynamic_update_index_in_dim(stack, x, index, 0)

        return state._replace(stacked=jax.tree.map(stored, state.stacked, outputs))

    def _empty_stacks(self, outputs: _Outputs) -> _Outputs:
        """A stack for each output of an iteration."""
        length = self.loop.length
        return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), outputs)

    def _keep(self, weights: Sequence[ShardedParam], stacks: Sequence[Array]) -> None:
        """Let later gathers start from stacks of node slices."""
        pairs = zip(weights, stacks, strict=True)
        self.layers.keep_slices({x: self.templates[x].stack(data) for x, data in pairs})

    def _pass_prologue(self, state: _State) -> None:
        """Hand the buckets in flight at this loop's end to the loop that continues with them."""
        for number, other in self.outer.plan.loops.items():
            if other.continues == self.layers.index:
                fetched = self.layers.host.passed(state.fetched)
                self.outer.prologues[number] = Prologue(state.in_flight, {}, fetched)


def _known_after(number: Array, x: Array) -> Array:
    """`number`, an integer, known only once the floats `x` are.

    XLA drops a barrier before it schedules, so the number is computed from an element: the bits of
    its absolute value, also of NaN, are no negative integer, which XLA does not know. Until it is
    dropped, the barrier keeps this sum apart from other uses of `number`, such as the indices of
    writes. In one kernel with it, they would be late too.
    """
    number, element = lax.optimization_barrier((number, x[(0,) * x.ndim]))
    element = jnp.abs(element.astype(jnp.float32))
    zero = jnp.minimum(lax.bitcast_convert_type(element, jnp.int32), 0)
    return number + zero.astype(number.dtype)


def _same(x: Any) -> Any:
    return x
