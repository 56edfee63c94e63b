"""One forward and one backward (1F1B): the micro-batches of a step on all stages, in one program.

In tick `t`, stage `s` of `S` runs forward of micro-batch `t - s`, then backward of micro-batch
`t - 2 (S - 1) + s`. The first `S - 1` ticks have only the forward part, the last `S - 1` only the
backward part, so `m` micro-batches take the time of `m + S - 1` forwards and as many backwards, as
in 1F1B. A message takes a tick, since all stages run the same program: at most `2 S - 1`
micro-batches are in flight, whose saved activations lie in a ring of as many slots.

If a part of a tick has no micro-batch on a stage, it works on the nearest one, and its results are
dropped. Backward then gets cotangents of zero. Gradients that are not zero nevertheless are masked
before they are reduced; where stages have padding layers, all gradients are masked. Forward stores
activations in the slot of the nearest micro-batch. Before the first micro-batch, that is harmless:
the micro-batch overwrites its slot when it runs. After the last one, the slot gets the activations
that it holds already. So backward always reads activations of a micro-batch that exists.

References:
    PipeDream (https://arxiv.org/abs/1806.03377), 1F1B;
    DAPPLE (https://arxiv.org/abs/2007.01045).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import accumulator_dtype, all_reduce, labelled, repeated
from .._mesh import STAGE
from .._program import Loop, Value, at_line_of, dtype_of, shape_of
from .cut import LayerCut
from .evaluation import Evaluation, Sums, before_moves, before_widening, run_block, zeros_of_layer
from .layers import Layer, Layers, StageLayers, passing_padding
from .messages import Encoding, Message, scan_beside, sent
from .state import MicroBatch, State, masked, num_slots, zeros


class Pipeline:
    """The ticks of one stage, which run the stage's part of each micro-batch and send messages.

    Args:
        cut: the program of one micro-batch, cut at its layer loops.
        weights: the arrays of the inputs that are equal for all micro-batches. A stack has only
            this stage's layers; other arrays are in full.
        rows: the arrays of the program's other inputs, `[microbatches, ...]`.
        outer: indices of the outputs that are gradients of weights outside of the layers.
        microbatches: the number of micro-batches.
        share: the factor that gradients are multiplied by before they are added up.
        encoding: how arrays are encoded that are sent between stages.
    """

    def __init__(
        self,
        cut: LayerCut,
        weights: Mapping[Value, Any],
        rows: Mapping[Value, Array],
        outer: Sequence[int],
        microbatches: int,
        share: float,
        encoding: Encoding,
    ):
        self.cut = cut
        self._message = functools.partial(Message, encoding=encoding)
        self.rows = rows
        self.microbatches = microbatches
        self.share = share
        self.num_stages = lax.axis_size(STAGE)
        self.stage = lax.axis_index(STAGE)
        self.layers = StageLayers(cut.forward.length, self.num_stages, self.stage)
        outputs = cut.block.outputs
        gradients = {*cut.stack_gradients, *outer}
        self.others = {k: x for k, x in enumerate(outputs) if k not in gradients}
        self.outer = {k: before_widening(cut.block, outputs[k]) for k in outer}
        self.sums = Sums(cut.block, cut.from_backward)
        # Values of a backward layer that are zero if its cotangents are zero, and so need no mask.
        # In padding layers they may not be zero.
        self._zeros = set[Value]()
        if cut.backward is not None and not self.layers.has_padding:
            self._zeros = zeros_of_layer(cut.backward, cut.travelling)
        # Weights are cast once, before the ticks, so that loops hold the narrower arrays.
        whole = weights.keys() - cut.stacks.keys()
        casts: list[Value] = []
        for operation in cut.block.operations:
            if operation.source in whole and operation.view() is not None:
                whole.update(operation.outputs)
                casts += operation.outputs
        values = Evaluation(cut.block, weights, ())
        values(casts)
        self.weights = values.known

    def run(self) -> tuple[list[Any], Array | None]:
        """Run all ticks.

        Returns:
            An array for each output of the program; and an element of the first message of the last
            ticks, for which later messages should wait, or None. Gradients are summed over
            micro-batches: a stack's has this stage's layers, any other is this stage's term of a
            sum. Outputs that are no gradients are `[microbatches, ...]`, equal on all stages.
        """
        with at_line_of(self.cut.forward):
            return self._run()

    def _run(self) -> tuple[list[Any], Array | None]:
        num, fill = self.microbatches, self.num_stages - 1
        state, _ = self._ticks(self._start(), range(fill), forward=True)
        steady, drain = range(fill, fill + num), range(fill + num, 2 * fill + num)
        has_backward = self.cut.backward is not None
        parts = {"forward": True, "head": True, "backward": has_backward}
        state, sums = self._ticks(state, steady, self._no_sums(), **parts)
        arrived = None
        if has_backward and drain:
            received = sent(self._message(state.cotangents, -1))
            floats = [x for x in received if x.size and jnp.issubdtype(x.dtype, jnp.floating)]
            arrived = floats[0][(0,) * floats[0].ndim] if floats else None
            state = state._replace(cotangents=received)
            # The head's gradients are final, and could be sent now. But the last ticks wait for the
            # message, so it goes first. In one loop over these ticks it would go after gradients.
            state, sums = self._ticks(state, drain[:1], sums, backward=True)
            state, sums = self._ticks(state, drain[1:], sums, receive=True, backward=True)
        outputs = dict(zip((*self.cut.stack_gradients, *self.outer), sums, strict=True))
        outputs |= zip(self.others, map(self._of_last_stage, state.outputs), strict=True)
        return [outputs[k] for k in range(len(self.cut.block.outputs))], arrived

    def _start(self) -> State:
        slots = num_slots(self.num_stages, self.microbatches)
        return State(
            [zeros(x) for x in self.cut.activations],
            [zeros(x) for x in self.cut.cotangents],
            [zeros(self.cut.stacked(i), slots, layers=self.layers.num) for i in self.cut.saved],
            [zeros(x, self.microbatches) for x in self.others.values()],
        )

    def _ticks(
        self, state: State, ticks: range, sums: Sequence[Any] = (), **parts: bool
    ) -> tuple[State, list[Any]]:
        """Run ticks of the same `parts` (see `_tick`) in a loop; return state and sums after it.

        `sums` are the sums of gradients so far, in the order of `_no_sums`. The loop carries a
        sum only if it adds to it: otherwise the plan of reductions would not recognize the sum.
        """
        if not ticks:
            return state, [*sums]
        grow = [bool(sums) and self._has_terms(i, **parts) for i in range(len(sums))]

        def tick(carry: Any, number: Array) -> tuple[Any, None]:
            state, sums = carry
            state, gradients = self._tick(state, number, **parts)
            terms = [x for x, grows in zip(gradients, grow, strict=True) if grows]
            sums = [
                functools.reduce(jnp.add, [y.astype(x.dtype) for y in added], x)
                for x, added in zip(sums, terms, strict=True)
            ]
            return (state, sums), None

        carried = [x for x, grows in zip(sums, grow, strict=True) if grows]
        traced, note = repeated(tick, len(ticks))
        numbers = jnp.arange(ticks.start, ticks.stop, dtype=jnp.int32)
        (state, carried), _ = lax.scan(traced, (state, carried), numbers)
        note()
        left = iter(carried)
        return state, [next(left) if grows else x for x, grows in zip(sums, grow, strict=True)]

    def _has_terms(self, i: int, head: bool = False, **_: bool) -> bool:
        """Return True if a tick, with the head or without it, adds to sum number `i`."""
        stacks = list(self.cut.stack_gradients.values())
        if i < len(stacks):
            return stacks[i] is not None
        gradient = [*self.outer.values()][i - len(stacks)]
        return self.sums.has_layers(gradient) or (head and self.sums.has_rest(gradient))

    def _no_sums(self) -> list[Array]:
        """Return zeros to which gradients are added: first for stacks, then for other weights."""
        stacks = [self.cut.block.outputs[k] for k in self.cut.stack_gradients]
        outer = [self.cut.block.outputs[k] for k in self.outer]
        shapes = [(self.layers.num, *shape_of(x)[1:]) for x in stacks]
        shapes += [shape_of(x) for x in outer]
        dtypes = [accumulator_dtype(dtype_of(x)) for x in (*stacks, *outer)]
        return list(map(jnp.zeros, shapes, dtypes))

    def _tick(
        self,
        state: State,
        number: Array,
        forward: bool = False,
        head: bool = False,
        backward: bool = False,
        receive: bool = False,
    ) -> tuple[State, list[list[Array]]]:
        """Run the parts of tick `number` whose flags are true; `receive`: first send cotangents on.

        Returns:
            The state after the tick, and a list of terms to add to each sum of `_no_sums`.
        """
        activations, cotangents, saved, outputs = state
        first = number - self.stage
        if receive:
            cotangents = sent(self._message(cotangents, -1))
        if forward:
            beside = self._message(cotangents, -1) if backward else None
            micro = self._micro(first)
            activations, rows, received = self._forward(micro, activations, beside)
            cotangents = received if backward else cotangents
            saved = [_put(x, y, micro.index % len(x)) for x, y in zip(saved, rows, strict=True)]
        micro = self._micro(first - 2 * (self.num_stages - 1 - self.stage) if backward else first)
        rest: list[list[Array]] = [[] for _ in self.outer]
        if head:
            cotangents, rest, made = self._head(micro, activations, cotangents)
            outputs = [_put(x, y, micro.index) for x, y in zip(outputs, made, strict=True)]
        if not backward:
            terms = [*([] for _ in self.cut.stack_gradients), *rest] if head else []
            return State(sent(self._message(activations, 1)), cotangents, saved, outputs), terms
        beside = self._message(activations, 1) if forward else None
        if self._zeros:
            cotangents = [masked(micro.exists, x) for x in cotangents]
        cotangents, stacks, outer, received = self._backward(micro, cotangents, saved, beside)
        activations = received if forward else activations
        outer = [[*x, *y] for x, y in zip(outer, rest, strict=True)]
        return State(activations, cotangents, saved, outputs), [*stacks, *outer]

    def _micro(self, number: Array) -> MicroBatch:
        """Return micro-batch `number`; if there is none of this number, the nearest one."""
        index = jnp.clip(number, 0, self.microbatches - 1)
        values = {x: rows[index] for x, rows in self.rows.items()}
        loops = self.cut.forward, self.cut.backward
        return MicroBatch(index, index == number, self.weights | values, loops)

    def _forward(
        self, micro: MicroBatch, activations: list[Any], beside: Message | None
    ) -> tuple[list[Any], list[Array], list[Any]]:
        """Run this stage's layers forward.

        Returns:
            The arrays to send to the next stage; the arrays saved for backward, `[layers, ...]`;
            and the arrays received while the layers ran.
        """
        cut, loop = self.cut, self.cut.forward
        num = loop.num_carry
        values = Evaluation(cut.block, micro.given, micro.loops)
        inside = values(loop.inputs[: loop.num_constants])
        layers = self._layers(loop, values, {})

        def embedded() -> list[Any]:
            here = Evaluation(cut.block, values.known, micro.loops)
            here.run(cut.effects("start"), micro.exists)
            start = here(loop.inputs[loop.num_constants : loop.first_stack])
            return [*start, *map(zeros, self.cut.activations[num:])]

        activations = self._where(self.stage == 0, embedded, activations, self.cut.activations)

        def layer(carry: list[Any], layers: Layers) -> tuple[list[Any], list[Any]]:
            stacks, exists = layers[0], micro.runs(layers[1])
            outputs = run_block(loop.body, [*inside, *carry, *stacks], exists=exists)
            return outputs[:num], outputs[num:]

        carry, stacked, received = self._scan(loop, layer, activations[:num], layers, beside)
        pairs = zip(activations[num:], cut.collected, strict=True)
        collected = [self.layers.put(x, stacked[i]) for x, i in pairs]
        return [*carry, *collected], [stacked[i] for i in cut.saved], received

    def _head(
        self, micro: MicroBatch, activations: list[Any], cotangents: list[Any]
    ) -> tuple[list[Any], list[list[Array]], list[Any]]:
        """Run the operations between the layer loops on the last stage; other stages do nothing.

        Returns:
            The cotangents with which the backward loop begins; for each weight outside of the
            layers, a list with the term to add to its gradient, or an empty list; and the program's
            outputs that are no gradients.
        """
        inputs = micro.given | dict(zip(self.cut.activations, activations, strict=True))
        has_rest = [x for x in self.outer.values() if self.sums.has_rest(x)]
        others = [*self.others.values()]

        def made() -> list[Any]:
            values = Evaluation(self.cut.block, inputs, micro.loops)
            values.run(self.cut.effects("head"), micro.exists)
            return [*values([*self.cut.cotangents, *others]), *self.sums.rest(has_rest, values)]

        like = [*self.cut.cotangents, *others, *has_rest]
        values = iter(self._where(self.stage == self.num_stages - 1, made, cotangents, like))
        cotangents = [next(values) for _ in self.cut.cotangents]
        outputs = [next(values) for _ in others]
        terms = [[self._shared(next(values))] if x in has_rest else [] for x in self.outer.values()]
        return cotangents, terms, outputs

    def _backward(
        self, micro: MicroBatch, cotangents: list[Any], saved: list[Array], beside: Message | None
    ) -> tuple[list[Any], list[list[Array]], list[list[Array]], list[Any]]:
        """Run this stage's layers backward.

        Returns:
            The arrays to send to the stage before; for each stack, then for each other weight, a
            list of terms to add to its gradient; and the arrays received while the layers ran.
        """
        cut, loop = self.cut, self.cut.backward
        assert loop is not None
        num = loop.num_carry
        travelling = dict(zip(cut.travelling, cotangents[num:], strict=True))
        values = Evaluation(cut.block, micro.given | travelling, micro.loops)
        inside = values(loop.inputs[: loop.num_constants])
        # Each layer takes its rows out of the ring: XLA would copy the slot of all layers.
        rings = dict(zip(map(cut.stacked, cut.saved), saved, strict=True))
        rows = dict.fromkeys(rings, jnp.arange(self.layers.num, dtype=jnp.int32))
        layers = self._layers(loop, values, rows)
        scanned = loop.inputs[loop.first_stack :]
        ring_of = [rings.get(x) if isinstance(x, Value) else None for x in scanned]

        def taken(ring: Array | None, x: Any) -> Any:
            return x if ring is None else ring[micro.index % len(ring), x]

        # Gradients are masked where they are computed, before operations that only move them.
        made_of = [x.source for x in cut.stack_gradients.values() if x is not None]
        final = [before_moves(loop.body, loop.outputs.index(x)) for x in made_of]
        need_mask = {x for x in final if x not in self._zeros}

        def layer(carry: list[Any], layers: Layers) -> tuple[list[Any], list[Any]]:
            exists = micro.runs(layers[1])
            stacks = map(taken, ring_of, layers[0])
            changed = dict.fromkeys(need_mask, functools.partial(masked, exists))
            outputs = run_block(loop.body, [*inside, *carry, *stacks], changed, exists)
            for i, x in zip(map(loop.outputs.index, made_of), final, strict=True):
                # `changed` has no effect on inputs of the body.
                if x in need_mask and x not in loop.body.makers:
                    outputs[i] = masked(exists, jnp.asarray(outputs[i]))
                outputs[i] = self._shared(outputs[i])
            return outputs[:num], outputs[num:]

        carry, stacked, received = self._scan(loop, layer, cotangents[:num], layers, beside)
        made = dict(zip(loop.outputs, [*carry, *stacked], strict=True))
        of_stacks = [
            [] if x is None else [x.of(made[x.source])] for x in cut.stack_gradients.values()
        ]
        inputs = values.known | dict(zip(loop.outputs[:num], carry, strict=True))
        from_layers = [x for x in self.outer.values() if self.sums.has_layers(x)]

        def outer_terms() -> list[Any]:
            here = Evaluation(cut.block, inputs, micro.loops)
            here.run(cut.effects("end"), micro.exists)
            return self.sums.of_layers(from_layers, here)

        here = (self.stage == 0) & micro.exists
        terms = iter(self._where(here, outer_terms, [], from_layers))
        outer = [
            [self._shared(next(terms))] if x in from_layers else [] for x in self.outer.values()
        ]
        return [*carry, *cotangents[num:]], of_stacks, outer, received

    def _scan(
        self, loop: Loop, layer: Layer, carry: list[Any], layers: Layers, beside: Message | None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        return scan_beside(loop, passing_padding(layer), carry, layers, self.layers.num, beside)

    def _layers(self, loop: Loop, values: Evaluation, rows: Mapping[Value, Any]) -> Layers:
        """Return the stacks that a loop scans on this stage, and which layers are not padding.

        `rows` has stacks of this stage's layers; `values` computes stacks of all layers.
        """
        stacks = []
        for x in loop.inputs[loop.first_stack :]:
            if isinstance(x, Value) and x in rows:
                stacks.append(rows[x])
                continue
            if isinstance(x, Value) and (stack := self.cut.stacks.get(x)):
                stacks.append(stack.of(self.weights[stack.source]))
                continue
            stacks.append(self.layers.of(jnp.asarray(values([x])[0])))
        return stacks, self.layers.exist()

    def _where(
        self, condition: Array, made: Callable[[], list[Any]], others: list[Any], like: Any
    ) -> list[Any]:
        """Return `made()` if the condition holds; else the arrays `others`, followed by zeros."""
        # `like` has a value of the program for each result: its dtype, and the shape of the zeros.

        def typed(arrays: list[Any]) -> list[Any]:
            pairs = zip(arrays, like, strict=True)
            return [lax.convert_element_type(x, dtype_of(atom)) for x, atom in pairs]

        def without() -> list[Any]:
            return typed([*others, *map(zeros, like[len(others) :])])

        return lax.cond(condition, lambda: typed(made()), without)

    def _shared(self, x: Array) -> Array:
        """Return a gradient times `share`, in the dtype in which gradients are added up."""
        return x.astype(accumulator_dtype(x.dtype)) * self.share

    def _of_last_stage(self, x: Array) -> Array:
        """Send the last stage's array to all stages, and return it."""
        x = jnp.where(self.stage == self.num_stages - 1, x, jnp.zeros_like(x))
        with labelled("other"):
            # Booleans travel as integers: collectives add none.
            return all_reduce(x.astype(jnp.int32) if x.dtype == bool else x, STAGE).astype(x.dtype)


def _put(x: Array, row: Array, index: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, row.astype(x.dtype), index, 0)
