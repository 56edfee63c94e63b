"""Loops over stacked layers: the plain one, and the pipelined one ([Note: loops] in `_schedule`).

A pipelined loop is a `lax.scan` over the numbers of the layers. Beside the program's own carry
it carries the messages with the next layer's weights, the last layer's gradients as they will
be sent, and the stacks that are filled late: reduced gradients, and slices that are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import Outbox, Parcel, Pieces, Sum, recording, repeated
from .._plan import Stack, Weight
from .._program import Loop
from .gathers import Bind, Held, on_shard, pass_on, write

if TYPE_CHECKING:
    from .block import Emitter


class Prefetched(NamedTuple):
    """What is there before a loop begins."""

    on_way: dict[int, list[list[Parcel]]]  # of each unit: after each hop, as `Emitter.on_way`
    slices: dict[int, dict[Weight, Pieces]]  # that were kept of it, by number of the layer


class _State(NamedTuple):
    """What a pipelined loop carries."""

    carry: list[Any]
    on_way: dict[int, list[list[Parcel]]]
    outboxes: dict[int, list[Outbox]]  # of each late unit, of the iterations before: by hop
    late: dict[int, Sum]  # stacks of the late outputs, by number
    slices: list[Array]  # stacks of slices, for `_Loop.kept_ahead`


def run_loop(emitter: Emitter, index: int, loop: Loop) -> list[Any]:
    """Run a loop of a block; its outputs, where those that are views outside are None."""
    return _Loop(emitter, index, loop).run()


def first_layers(emitter: Emitter, index: int, tie: Bind) -> Prefetched:
    """Send the units that a loop's first iteration finds on their way."""
    loop = emitter.plan.block.operations[index]
    assert isinstance(loop, Loop)
    return _Loop(emitter, index, loop).prologue(tie)


class _Loop:
    def __init__(self, emitter: Emitter, index: int, loop: Loop):
        self.emitter = emitter
        self.index = index
        self.loop = loop
        self.plan = emitter.plan.loops[index]
        self.uses = emitter.plan.uses.loops[index]
        self.stacks = [self._stack(stack) for stack in self.uses.stacks]
        ahead = [one for unit in self.plan.body.units if unit.ahead for one in unit.gathers]
        here = [one for unit in self.plan.body.units if not unit.ahead for one in unit.gathers]
        self.kept_ahead = [one.weight for one in ahead if one.keeps]
        self.kept_here = [one.weight for one in here if one.keeps]

    def run(self) -> list[Any]:
        loop, emitter = self.loop, self.emitter
        first, known = loop.num_constants + loop.num_carry, self.plan.body.uses.views
        pairs = zip(loop.inputs, loop.body.inputs, strict=True)
        inputs = [
            None if i >= first and inside in known else emitter.read(outside)
            for i, (outside, inside) in enumerate(pairs)
        ]
        self.constants = inputs[: loop.num_constants]
        carry, stacks = inputs[loop.num_constants : first], inputs[first:]
        carry = emitter.tie_loop(carry)
        return (self._pipelined if self.plan.is_pipelined else self._plain)(carry, stacks)

    def prologue(self, tie: Bind) -> Prefetched:
        """What is on its way before the first iteration: the layer of entry `s` has done
        hops 0 to `s`."""
        wire, num_hops = self.emitter.wire, self.plan.body.num_hops
        on_way: dict[int, list[list[Parcel]]] = {}
        slices: dict[int, dict[Weight, Pieces]] = {}
        for hop in range(num_hops):
            place = self.place(jnp.asarray(num_hops - 1 - hop))
            held = self.layer(place)
            before = dict(held)
            for number, unit in enumerate(self.plan.body.units):
                if unit.ahead:
                    parcels = write(unit, held, wire, tie, lambda messages: messages)
                    for done in range(hop + 1):
                        parcels = pass_on(unit, parcels, wire, num_hops - done)
                    on_way.setdefault(number, []).append(parcels)
            slices[num_hops - 1 - hop] = {x: held[x] for x in held if held[x] is not before[x]}
        return Prefetched(on_way, slices)

    def place(self, turn: Array) -> Array:
        """Which layer has its turn after `turn` iterations.

        After the last one, what the loop that runs back takes; or the last one again.
        """
        length = self.loop.length
        back = any(x.continues == self.index for x in self.emitter.plan.loops.values())
        after = 2 * length - 1 - turn if back else length - 1
        turn = jnp.where(turn < length, jnp.maximum(turn, 0), after)
        return length - 1 - turn if self.loop.is_reversed else turn

    def layer(self, i: Array) -> Held:
        """What is held of layer `i` of each weight."""
        return {
            stack.layer: pieces.layer(lax.dynamic_index_in_dim(pieces.data, i, 0, keepdims=False))
            for stack, pieces in zip(self.uses.stacks, self.stacks, strict=True)
        }

    def _stack(self, stack: Stack) -> Pieces:
        """What a loop scans of a stack, with the operations before it done."""
        view = stack.view
        pieces = self.emitter.held[view.weight]
        if not view.ops:
            return pieces
        return on_shard(pieces, view.ops, view.weight)[0]

    def _plain(self, carry: list[Any], stacks: list[Any]) -> list[Any]:
        """Everything in its own iteration."""
        num_carry = self.loop.num_carry

        def body(carry, slices):
            stacks, data = slices
            layers = [pieces.layer(x) for pieces, x in zip(self.stacks, data, strict=True)]
            held = dict(zip((stack.layer for stack in self.uses.stacks), layers, strict=True))
            inside = self._emitter(held)
            outputs = inside.run([*self.constants, *carry, *stacks], self.uses.handed_on)
            slices = [inside.held[weight].data for weight in self.kept_here]
            self.templates = {x: inside.held[x] for x in self.kept_here}
            return outputs[:num_carry], (outputs[num_carry:], slices)

        traced, note = repeated(body, self.loop.length)
        data = [pieces.data for pieces in self.stacks]
        carry, (stacked, slices) = self.loop.scan(traced, carry, (stacks, data))
        note()
        self._hold(dict(zip(self.kept_here, slices, strict=True)))
        return [*carry, *stacked]

    def _pipelined(self, carry: list[Any], stacks: list[Any]) -> list[Any]:
        """The next layers' weights, and the last ones' gradients, on their way meanwhile."""
        loop = self.loop
        before = self.emitter.prefetched.pop(self.index)
        self.templates = {x: kept for each in before.slices.values() for x, kept in each.items()}
        state = self._start(carry, before, stacks)

        def body(state, scanned):
            turn, stacks = scanned
            state, outputs, slices = self._iteration(state, turn, stacks)
            return state, (outputs, slices)

        turns = jnp.arange(loop.length)
        traced, note = repeated(body, loop.length)
        state, (stacked, slices) = loop.scan(
            traced, state, (turns[::-1] if loop.is_reversed else turns, stacks)
        )
        note()
        late = self._flush(state)
        self._hold(dict(zip(self.kept_ahead, state.slices, strict=True)))
        self._hold(dict(zip(self.kept_here, slices, strict=True)))
        self._hand_on(state)
        outputs = [*state.carry, *stacked]
        for number, x in late.items():
            outputs[number] = x
        return outputs

    def _iteration(
        self, state: _State, turn: Array, stacks: Sequence[Any]
    ) -> tuple[_State, list[Any], list[Any]]:
        """One layer: the state after it, its outputs, and slices that it kept by itself."""
        here, following = self.place(turn), self.place(turn + self.plan.body.num_hops)
        held = self.layer(here)
        for weight, x in zip(self.kept_ahead, state.slices, strict=True):
            data = lax.dynamic_index_in_dim(x, here, 0, keepdims=False)
            held[weight] = dataclasses.replace(self.templates[weight], data=data)
        inside = self._emitter(held, state.on_way, self.layer(following))
        outputs = inside.run([*self.constants, *state.carry, *stacks], self.uses.handed_on)
        outboxes, late = self._reduced(state, inside.outboxes, turn)
        slices = [
            lax.dynamic_update_index_in_dim(x, inside.next_held[weight].data, following, 0)
            for weight, x in zip(self.kept_ahead, state.slices, strict=True)
        ]
        self.templates.update({x: inside.held[x] for x in self.kept_here})
        carry = outputs[: self.loop.num_carry]
        state = _State(carry, inside.upcoming, outboxes, late, slices)
        mine = [inside.held[weight].data for weight in self.kept_here]
        return state, outputs[self.loop.num_carry :], mine

    def _start(self, carry: list[Any], before: Prefetched, stacks: list[Any]) -> _State:
        """The state before the first iteration, which finds gradients of zero to send."""
        length = self.loop.length
        slices = []
        for weight in self.kept_ahead:
            data = before.slices[0][weight].data
            stack = jnp.zeros((length, *data.shape), data.dtype)
            for turn, kept in before.slices.items():
                place = self.place(jnp.asarray(turn))
                stack = lax.dynamic_update_index_in_dim(stack, kept[weight].data, place, 0)
            slices.append(stack)
        state = _State(carry, before.on_way, {}, {}, slices)
        rows = [None if x is None else x[0] for x in stacks]

        def shapes():
            first = self._iteration(state, jnp.asarray(0), rows)[0].outboxes
            boxes = {number: [outboxes[0]] for number, outboxes in first.items()}
            inside = self._emitter({})
            done = {}
            for number, some in boxes.items():
                for hop in range(inside.num_reduce_hops(number)):
                    some.append(inside.reduce_hop(number, hop, some[hop]))
                done[number] = some.pop()
            return boxes, inside.settle(done)

        with recording(None):
            outboxes, late = jax.eval_shape(shapes)
        return state._replace(
            outboxes=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outboxes),
            late=jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), late),
        )

    def _reduced(
        self, state: _State, new: Mapping[int, Outbox], turn: Array
    ) -> tuple[dict[int, list[Outbox]], dict[int, Sum]]:
        """Send late gradients over a hop each; those of the oldest iteration are reduced."""
        inside = self._emitter({})
        outboxes, done, num_hops = {}, {}, 0
        for number, some in state.outboxes.items():
            sent = [inside.reduce_hop(number, hop, box) for hop, box in enumerate(some)]
            outboxes[number], done[number] = [new[number], *sent[:-1]], sent[-1]
            num_hops = len(some)
        if not done:
            return {number: [box] for number, box in new.items()}, state.late
        return outboxes, self._written(state.late, done, turn - num_hops)

    def _flush(self, state: _State) -> dict[int, Sum]:
        """Reduce what the last iterations left."""
        late = state.late
        inside = self._emitter({})
        num_hops = max((len(some) for some in state.outboxes.values()), default=0)
        for hop in reversed(range(num_hops)):
            done = {
                number: inside.reduce_rest(number, hop, some[hop])
                for number, some in state.outboxes.items()
            }
            late = self._written(late, done, jnp.asarray(self.loop.length - 1 - hop))
        return late

    def _written(
        self, late: dict[int, Sum], done: dict[int, Outbox], turn: Array
    ) -> dict[int, Sum]:
        """The stacks of late outputs with those of one more layer."""
        made, place = self._emitter({}).settle(done), self.place(turn)
        return {
            number: jax.tree.map(
                lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, place, 0),
                stack,
                made[number],
            )
            for number, stack in late.items()
        }

    def _emitter(
        self,
        held: Held,
        on_way: Mapping[int, list[list[Parcel]]] | None = None,
        next_held: Held | None = None,
    ) -> Emitter:
        plan, wire = self.plan.body, self.emitter.wire
        return type(self.emitter)(plan, wire, held, on_way, next_held)

    def _hold(self, slices: dict[Weight, Array]) -> None:
        """The stacks of slices replace the stacks of shards."""
        for stack in self.uses.stacks:
            if stack.layer in slices:
                kept = self.templates[stack.layer].stack(slices[stack.layer])
                self.emitter.held[stack.view.weight] = kept

    def _hand_on(self, state: _State) -> None:
        """Let the loop that runs back begin with what was sent last."""
        for number, other in self.emitter.plan.loops.items():
            if other.continues == self.index:
                self.emitter.prefetched[number] = Prefetched(state.on_way, {})
