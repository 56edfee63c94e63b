"""Run loops over stacked layers, plain or pipelined ([Note: loops] in `schedule`).

A pipelined loop is a `lax.scan` over the numbers of the layers. Beside the program's own carry it
carries the buckets with the next layer's weights, the last layer's gradients as they will be sent,
and the stacks that are filled one iteration late: reduced gradients, and slices that are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import CommSpec, EncodedShards, ReduceBucket, Sum, recording, repeated
from .._plan import BlockPlan, ShardedParam, Stack
from .._program import Atom, Loop
from .gathers import Bind, Held, encode_bucket, gather_next_axis, on_shard
from .gradient_buckets import GradientBuckets
from .weight_buckets import InFlight, WeightBuckets


@runtime_checkable
class Runner(Protocol):
    """A run of a block: what a loop reads of the one that it is in, and does with its body's."""

    plan: BlockPlan
    comm: CommSpec
    weights: WeightBuckets
    gradients: GradientBuckets
    prologues: dict[int, Prologue]

    def read(self, atom: Atom) -> Any: ...

    def tie_loop(self, carry: list[Any]) -> list[Any]: ...

    def run(self, inputs: Sequence[Any], handed_on: frozenset[int]) -> list[Any]: ...

    def settle(self, buckets: Mapping[int, ReduceBucket]) -> dict[int, Any]: ...

    @property
    def inside(self) -> Callable[..., Runner]:
        """Make a run of a loop's body: (plan, held, in_flight, next_held)."""
        ...


class Prologue(NamedTuple):
    """What is gathered before the first iteration of a loop."""

    in_flight: InFlight  # as `WeightBuckets.in_flight`
    slices: dict[int, dict[ShardedParam, EncodedShards]]  # slices kept, by number of the layer


class _State(NamedTuple):
    """What a pipelined loop carries."""

    carry: list[Any]
    in_flight: InFlight
    buckets: dict[int, list[ReduceBucket]]  # of each deferred group: by axes done
    deferred: dict[int, Sum]  # stacks of the deferred outputs, by number
    slices: list[Array]  # stacks of slices, for `_Loop.kept_ahead`


def run_loop(outer: Runner, index: int, loop: Loop) -> list[Any]:
    """Run a loop of a block; its outputs, where those that are views outside are None."""
    return _Loop(outer, index, loop).run()


def loop_prologue(outer: Runner, index: int, tie: Bind) -> Prologue:
    """Start to gather the layers of a loop's first iterations."""
    loop = outer.plan.block.operations[index]
    assert isinstance(loop, Loop)
    return _Loop(outer, index, loop).prologue(tie)


class _Loop:
    def __init__(self, outer: Runner, index: int, loop: Loop):
        self.outer = outer
        self.index = index
        self.loop = loop
        self.plan = outer.plan.loops[index]
        self.uses = outer.plan.uses.loops[index]
        self.gradients = GradientBuckets(self.plan.body, outer.comm)
        self.stacks = [self._stack(stack) for stack in self.uses.stacks]
        kept = [
            (group.prefetched, one.weight)
            for group in self.plan.body.gather_groups
            for one in group.gathers
            if one.keeps
        ]
        self.kept_ahead = [weight for prefetched, weight in kept if prefetched]
        self.kept_here = [weight for prefetched, weight in kept if not prefetched]

    def run(self) -> list[Any]:
        loop, outer = self.loop, self.outer
        first, known = loop.num_constants + loop.num_carry, self.plan.body.uses.views
        pairs = zip(loop.inputs, loop.body.inputs, strict=True)
        inputs = [
            None if i >= first and inside in known else outer.read(outside)
            for i, (outside, inside) in enumerate(pairs)
        ]
        self.constants = inputs[: loop.num_constants]
        carry, stacks = inputs[loop.num_constants : first], inputs[first:]
        carry = outer.tie_loop(carry)
        return (self._pipelined if self.plan.is_pipelined else self._plain)(carry, stacks)

    def prologue(self, tie: Bind) -> Prologue:
        """What is on its way before the first iteration: the layer of entry `s` has done
        hops 0 to `s`."""
        comm, num_hops = self.outer.comm, self.plan.body.num_hops
        in_flight: InFlight = {}
        slices: dict[int, dict[ShardedParam, EncodedShards]] = {}
        for hop in range(num_hops):
            place = self.place(jnp.asarray(num_hops - 1 - hop))
            held = self.layer(place)
            before = dict(held)
            for number, group in enumerate(self.plan.body.gather_groups):
                if group.prefetched:
                    buckets = encode_bucket(group, held, comm, tie, lambda messages: messages)
                    for done in range(hop + 1):
                        buckets = gather_next_axis(group, buckets, comm, num_hops - done)
                    in_flight.setdefault(number, []).append(buckets)
            slices[num_hops - 1 - hop] = {x: held[x] for x in held if held[x] is not before[x]}
        return Prologue(in_flight, slices)

    def place(self, turn: Array) -> Array:
        """Which layer has its turn after `turn` iterations.

        After the last one, what the loop that runs back takes; or the last one again.
        """
        length = self.loop.length
        back = any(x.continues == self.index for x in self.outer.plan.loops.values())
        after = 2 * length - 1 - turn if back else length - 1
        turn = jnp.where(turn < length, jnp.maximum(turn, 0), after)
        return length - 1 - turn if self.loop.is_reversed else turn

    def layer(self, i: Array) -> Held:
        """What is held of layer `i` of each weight."""
        return {
            stack.layer: pieces.layer(lax.dynamic_index_in_dim(pieces.data, i, 0, keepdims=False))
            for stack, pieces in zip(self.uses.stacks, self.stacks, strict=True)
        }

    def _stack(self, stack: Stack) -> EncodedShards:
        """What a loop scans of a stack, with the operations before it done."""
        view = stack.view
        pieces = self.outer.weights.held[view.weight]
        if not view.ops and pieces.codec is not None and not pieces.lead:
            # A stack of vectors is stored as one message, of which no layer can be cut out.
            return pieces.encode(None, ())
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
            inside = self.outer.inside(self.plan.body, held)
            outputs = inside.run([*self.constants, *carry, *stacks], self.uses.handed_on)
            mine = inside.weights.held
            slices = [mine[weight].data for weight in self.kept_here]
            self.templates = {x: mine[x] for x in self.kept_here}
            return outputs[:num_carry], (outputs[num_carry:], slices)

        traced, note = repeated(body, self.loop.length)
        data = [pieces.data for pieces in self.stacks]
        carry, (stacked, slices) = self.loop.scan(traced, carry, (stacks, data))
        note()
        self._hold(dict(zip(self.kept_here, slices, strict=True)))
        return [*carry, *stacked]

    def _pipelined(self, carry: list[Any], stacks: list[Any]) -> list[Any]:
        """Gather the next layers' weights and reduce the last ones' gradients meanwhile."""
        loop = self.loop
        before = self.outer.prologues.pop(self.index)
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
        deferred = self._flush(state)
        self._hold(dict(zip(self.kept_ahead, state.slices, strict=True)))
        self._hold(dict(zip(self.kept_here, slices, strict=True)))
        self._hand_on(state)
        outputs = [*state.carry, *stacked]
        for number, x in deferred.items():
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
        next_held = self.layer(following)
        inside = self.outer.inside(self.plan.body, held, state.in_flight, next_held)
        outputs = inside.run([*self.constants, *state.carry, *stacks], self.uses.handed_on)
        buckets, deferred = self._reduced(state, inside.gradients.deferred, turn)
        slices = [
            lax.dynamic_update_index_in_dim(x, inside.weights.next_held[weight].data, following, 0)
            for weight, x in zip(self.kept_ahead, state.slices, strict=True)
        ]
        self.templates.update({x: inside.weights.held[x] for x in self.kept_here})
        carry = outputs[: self.loop.num_carry]
        state = _State(carry, inside.weights.next_in_flight, buckets, deferred, slices)
        mine = [inside.weights.held[weight].data for weight in self.kept_here]
        return state, outputs[self.loop.num_carry :], mine

    def _start(self, carry: list[Any], before: Prologue, stacks: list[Any]) -> _State:
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
        state = _State(carry, before.in_flight, {}, {}, slices)
        rows = [None if x is None else x[0] for x in stacks]

        def shapes():
            first = self._iteration(state, jnp.asarray(0), rows)[0].buckets
            waiting = {number: [buckets[0]] for number, buckets in first.items()}
            done = {}
            for number, some in waiting.items():
                for axis in range(self.gradients.num_axes(number)):
                    some.append(self.gradients.reduce_next(number, axis, some[axis]))
                done[number] = some.pop()
            return waiting, self._settle(done)

        with recording(None):
            buckets, deferred = jax.eval_shape(shapes)
        return state._replace(
            buckets=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), buckets),
            deferred=jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), deferred),
        )

    def _reduced(
        self, state: _State, new: Mapping[int, ReduceBucket], turn: Array
    ) -> tuple[dict[int, list[ReduceBucket]], dict[int, Sum]]:
        """Reduce deferred buckets over one axis each; those of the oldest iteration are done."""
        buckets, done, num_axes = {}, {}, 0
        for number, some in state.buckets.items():
            reduce_next = self.gradients.reduce_next
            sent = [reduce_next(number, axis, bucket) for axis, bucket in enumerate(some)]
            buckets[number], done[number] = [new[number], *sent[:-1]], sent[-1]
            num_axes = len(some)
        if not done:
            return {number: [bucket] for number, bucket in new.items()}, state.deferred
        return buckets, self._written(state.deferred, done, turn - num_axes)

    def _flush(self, state: _State) -> dict[int, Sum]:
        """Reduce the buckets that the last iterations left."""
        deferred = state.deferred
        num_axes = max((len(some) for some in state.buckets.values()), default=0)
        for axis in reversed(range(num_axes)):
            done = {
                number: self.gradients.reduce_rest(number, axis, some[axis])
                for number, some in state.buckets.items()
            }
            deferred = self._written(deferred, done, jnp.asarray(self.loop.length - 1 - axis))
        return deferred

    def _written(
        self, deferred: dict[int, Sum], done: dict[int, ReduceBucket], turn: Array
    ) -> dict[int, Sum]:
        """The stacks of deferred outputs with those of one more layer."""
        made, place = self._settle(done), self.place(turn)
        return {
            number: jax.tree.map(
                lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, place, 0),
                stack,
                made[number],
            )
            for number, stack in deferred.items()
        }

    def _settle(self, done: dict[int, ReduceBucket]) -> dict[int, Any]:
        """The deferred outputs of one iteration, from its reduced buckets."""
        return self.outer.inside(self.plan.body, {}).settle(done)

    def _hold(self, slices: dict[ShardedParam, Array]) -> None:
        """The stacks of slices replace the stacks of shards."""
        for stack in self.uses.stacks:
            if stack.layer in slices:
                kept = self.templates[stack.layer].stack(slices[stack.layer])
                self.outer.weights.held[stack.view.weight] = kept

    def _hand_on(self, state: _State) -> None:
        """Let the loop that runs back begin with what was sent last."""
        for number, other in self.outer.plan.loops.items():
            if other.continues == self.index:
                self.outer.prologues[number] = Prologue(state.in_flight, {})
