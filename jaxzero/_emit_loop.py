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

from ._arrivals import Held, on_shard, send
from ._messages import Parcel
from ._pieces import Pieces
from ._program import Loop
from ._reductions import Outbox
from ._traffic import recording, repeated
from ._uses import Stack, Weight

if TYPE_CHECKING:
    from ._emit import Emitter


class Prefetched(NamedTuple):
    """What is there before a layer begins."""

    arrived: dict[int, list[Parcel]]  # by number of the unit
    slices: dict[Weight, Pieces]  # that were kept of it


class _State(NamedTuple):
    """What a pipelined loop carries."""

    carry: list[Any]
    arrived: dict[int, list[Parcel]]
    outboxes: dict[int, Outbox]  # of the last iteration
    late: dict[int, Array]  # stacks of the late outputs, by number
    slices: list[Array]  # stacks of slices, for `_Loop.keeping`


def run_loop(emitter: Emitter, index: int, loop: Loop) -> list[Any]:
    """Run a loop of a block; its outputs, where those that are views outside are None."""
    return _Loop(emitter, index, loop).run()


def first_layer(emitter: Emitter, index: int, ties: tuple[Any, ...]) -> Prefetched:
    """Send the units that a loop's first iteration finds on their way."""
    loop = emitter.plan.block.operations[index]
    assert isinstance(loop, Loop)
    running = _Loop(emitter, index, loop)
    held = running.layer(jnp.asarray(loop.length - 1 if loop.is_reversed else 0))
    before = dict(held)
    arrived = {
        number: send(unit, held, emitter.wire, ties)
        for number, unit in enumerate(running.plan.body.units)
        if unit.ahead
    }
    return Prefetched(arrived, {x: held[x] for x in held if held[x] is not before[x]})


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
        return (self._pipelined if self.plan.is_pipelined else self._plain)(carry, stacks)

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
        """The next layer's weights, and the last one's gradients, on their way meanwhile."""
        loop = self.loop
        before = self.emitter.prefetched.pop(self.index)
        self.templates = dict(before.slices)
        state = self._start(carry, before, stacks)

        def body(state, scanned):
            i, stacks = scanned
            state, outputs, slices = self._iteration(state, i, stacks)
            return state, (outputs, slices)

        traced, note = repeated(body, loop.length)
        order = jnp.arange(loop.length)
        state, (stacked, slices) = loop.scan(traced, state, (order, stacks))
        note()
        last = 0 if loop.is_reversed else loop.length - 1
        late = self._settled(state.late, state.outboxes, jnp.asarray(last))
        self._hold(dict(zip(self.kept_ahead, state.slices, strict=True)))
        self._hold(dict(zip(self.kept_here, slices, strict=True)))
        self._hand_on(state)
        outputs = [*state.carry, *stacked]
        for number, x in late.items():
            outputs[number] = x
        return outputs

    def _iteration(
        self, state: _State, i: Array, stacks: Sequence[Any]
    ) -> tuple[_State, list[Any], list[Any]]:
        """One layer: the state after it, its outputs, and slices that it kept by itself."""
        step, last = (-1 if self.loop.is_reversed else 1), self.loop.length - 1
        following = jnp.clip(i + step, 0, last)
        held = self.layer(i)
        for weight, x in zip(self.kept_ahead, state.slices, strict=True):
            data = lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
            held[weight] = dataclasses.replace(self.templates[weight], data=data)
        inside = self._emitter(held, state.arrived, self.layer(following))
        outputs = inside.run([*self.constants, *state.carry, *stacks], self.uses.handed_on)
        late = self._settled(state.late, state.outboxes, jnp.clip(i - step, 0, last))
        slices = [
            lax.dynamic_update_index_in_dim(x, inside.next_held[weight].data, following, 0)
            for weight, x in zip(self.kept_ahead, state.slices, strict=True)
        ]
        self.templates.update({x: inside.held[x] for x in self.kept_here})
        carry = outputs[: self.loop.num_carry]
        state = _State(carry, inside.upcoming, inside.outboxes, late, slices)
        mine = [inside.held[weight].data for weight in self.kept_here]
        return state, outputs[self.loop.num_carry :], mine

    def _start(self, carry: list[Any], before: Prefetched, stacks: list[Any]) -> _State:
        """The state before the first iteration, which finds gradients of zero to send."""
        length = self.loop.length
        first = length - 1 if self.loop.is_reversed else 0
        slices = []
        for weight in self.kept_ahead:
            data = before.slices[weight].data
            stack = jnp.zeros((length, *data.shape), data.dtype)
            slices.append(lax.dynamic_update_index_in_dim(stack, data, first, 0))
        state = _State(carry, before.arrived, {}, {}, slices)
        rows = [None if x is None else x[0] for x in stacks]

        def shapes():
            outboxes = self._iteration(state, jnp.asarray(first), rows)[0].outboxes
            return outboxes, self._emitter(self.layer(jnp.asarray(first))).settle(outboxes)

        with recording(None):
            outboxes, late = jax.eval_shape(shapes)
        return state._replace(
            outboxes=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outboxes),
            late={i: jnp.zeros((length, *x.shape), x.dtype) for i, x in late.items()},
        )

    def _settled(
        self, late: dict[int, Array], outboxes: dict[int, Outbox], i: Array
    ) -> dict[int, Array]:
        """Reduce what layer `i` left, into the stacks."""
        if not late:
            return late
        made = self._emitter(self.layer(i)).settle(outboxes)
        return {
            number: lax.dynamic_update_index_in_dim(stack, made[number], i, 0)
            for number, stack in late.items()
        }

    def _emitter(
        self,
        held: Held,
        arrived: Mapping[int, list[Parcel]] | None = None,
        next_held: Held | None = None,
    ) -> Emitter:
        plan, wire = self.plan.body, self.emitter.wire
        return type(self.emitter)(plan, wire, held, arrived, next_held)

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
                self.emitter.prefetched[number] = Prefetched(state.arrived, {})
