"""Run the loops of a block, whose ticks `_plan.pipeline` describes.

Legend: a `tick` is a turn of the loop, an `iteration` counts from 0 in the order of execution, an
`index` is the position of an iteration in the stacks, which runs backwards in a reversed loop.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import recording, repeated
from .._mesh import empty_in_host, num_token_parts
from .._plan import instructions, pipeline
from .buckets import Bind
from .loop_inputs import ByLag, LoopInputs, LoopState, Runner
from .ticks import Tick, put


def start_loop(outer: Runner, index: int, tie: Bind) -> None:
    """Send the gathers of a loop's first iterations before the loop.

    `tie` is a barrier that the copies from host memory and the messages pass.
    """
    loop = LoopRun(outer, index)
    state = LoopState()
    for number in range(loop.pipeline.first_tick, 0):
        ticks = range(number, number + 1)
        listed = [x for x in loop.pipeline.first_gathers if loop.pipeline.has_iteration(x, ticks)]
        Tick(loop, state, number, ticks, before_loop=tie).run(listed)
    outer.starts[index] = state


def run_loop(outer: Runner, index: int) -> list[Any]:
    """Run a loop of a block; return its outputs, with None for those that are views of weights."""
    return LoopRun(outer, index).run()


class LoopRun(LoopInputs):
    """One run of a loop, where the loop is operation `index` of the block that `outer` runs."""

    def _slices_before(self) -> dict[pipeline.Key, Array]:
        """Return the stacks of node slices from the previous step that this loop overwrites."""
        listed = self.pipeline.instructions
        keeps = (x for x in listed if isinstance(x, instructions.KeepSlices))
        kept = {weight for each in keeps for weight in each.weights}
        before = {x: self.stacks[x].kept for x in self.stacks if x in kept}
        return {
            ("slices", x): slices.data
            for x, slices in before.items()
            if slices is not None and self.carries(("slices", x))
        }

    def run(self) -> list[Any]:
        """Run the loop; return its outputs, with None for views of weights and updated leaves."""
        loop, carry = self.loop, self.read_inputs()
        state = self.outer.starts.pop(self.index, None) or LoopState()
        state.stacks |= self._slices_before()
        for weight, index, data in state.early:
            empty = functools.partial(lax.empty, (loop.length, *data.shape), data.dtype)
            stack = state.stacks.get(("slices", weight))
            stack = empty() if stack is None else stack
            state.stacks["slices", weight] = put(stack, data, index)
        state.stacks |= {("state", i): list(x.stacks) for i, x in self.updates.items()}
        sums = {i: self.outer.read(x) for i, x in self.plan.sums.items()}
        state.stacks |= {pipeline.output(i): x for i, x in sums.items()}
        shapes = self._shapes(carry, state)
        self._add_stacks(state, shapes)
        stacked: dict[pipeline.Key, Any] = {}  # what the loop over the ticks itself stacks
        for start, stop in itertools.pairwise(self.pipeline.cuts):
            ticks = range(start, stop)
            self._enter(state, ticks, shapes)
            carry, state, stacked = self._repeat(carry, state, ticks)
        self._pass_on(state)
        for number in range(loop.length, self.pipeline.last_tick):
            ticks = range(number, number + 1)
            # Gathers for iterations past the end belong to the loop that goes on with them.
            listed = [x for x in self.pipeline.in_ticks(ticks) if x.lag > 0]
            Tick(self, state, number, ticks).run(listed)
        by_key = state.stacks | stacked
        self._keep_slices(by_key, state)
        for number, leaf in self.plan.updates.items():
            self.outer.updated[leaf] = by_key["state", number]
        return [
            *carry,
            *(by_key.get(pipeline.output(i)) for i in range(len(carry), len(loop.outputs))),
        ]

    @functools.cached_property
    def is_cut(self) -> bool:
        """Whether the ticks run as several loops; then all of them carry every stack."""
        return len(self.pipeline.cuts) > 2

    def carries(self, key: pipeline.Key) -> bool:
        """Return whether the loop carries the stack of `key`, and writes each element into it.

        Otherwise `lax.scan` stacks the elements, as outputs of the ticks. A stack is carried in
        these cases: an element is made after its iteration's own tick; the loop reads the stack or
        adds to it; the ticks run as several loops; or the stack lies in host memory, where JAX 0.10
        writes the outputs of a reversed loop in the wrong order.
        """
        kind, i = key
        if kind == "slices":
            return self.is_cut or i in self.pipeline.kept
        late = self._collected_late | self.plan.sums.keys()
        return self.is_cut or i in late or i in self.plan.host_gradients

    @functools.cached_property
    def _collected_late(self) -> set[int]:
        listed = self.pipeline.instructions
        return {x.output for x in listed if isinstance(x, instructions.Collect) and x.lag}

    def _shapes(self, carry: list[Any], state: LoopState) -> dict[Any, Any]:
        """Return the shapes of the arrays that ticks make, found by tracing one iteration.

        The trace runs from the iteration's own tick to the last tick that works on it. An array
        that ticks pass on has the key of its entry in the state. An element that ticks write to a
        stack of outputs or node slices has the stack's key.
        """
        last = max((x.lag for x in self.pipeline.instructions), default=0)
        if not last and not self.is_cut and not self.plan.host_gradients:
            return {}
        keys: list[Any] = []

        def life() -> list[Any]:
            by_key: dict[Any, Any] = {}
            current = state.copy()
            self._enter(current, range(1), {})
            for number in range(last + 1):
                ticks = range(number, number + 1)
                # In tick 0 also what is gathered or copied ahead, for the shapes of later entries.
                lags = range(number if number else self.pipeline.first_lag, number + 1)
                tick = Tick(self, current, number, ticks, carry=carry)
                tick.run([x for x in self.pipeline.in_ticks(ticks) if x.lag in lags])
                by_key |= tick.collected
                left = current.by_lag.get(number + 1, {})
                by_key |= {(key, number + 1): x for key, x in left.items()}
            keys.extend(by_key)
            return list(by_key.values())

        with recording(None):  # its collectives must not be counted
            shapes = jax.eval_shape(life)
        return dict(zip(keys, shapes, strict=True))

    def _add_stacks(self, state: LoopState, shapes: Mapping[Any, Any]) -> None:
        """Add empty stacks for those outputs and node slices that the loop carries."""
        for key, layer in shapes.items():
            if key[0] in ("output", "slices") and key not in state.stacks and self.carries(key):
                empty = functools.partial(self._empty_stack, key)
                state.stacks[key] = jax.tree.map(empty, layer)

    def _empty_stack(self, key: pipeline.Key, layer: Any) -> Array:
        shape, (kind, number) = (self.loop.length, *layer.shape), key
        if kind == "output" and number in self.plan.host_gradients:
            return empty_in_host(shape, layer.dtype, number)
        # Along `tokens` the compiler makes `lax.empty` in full, and of zeros only the needed parts.
        return (lax.empty if num_token_parts() == 1 else jnp.zeros)(shape, layer.dtype)

    def _enter(self, state: LoopState, ticks: range, shapes: Mapping[Any, Any]) -> None:
        """Add to the state those entries that a loop over `ticks` carries and that are missing.

        Two kinds of entries are missing. Copies from host memory that no gather has needed are made
        here. Arrays of iterations before the first one are zeros. But where the loop updates a
        leaf, the array is a copy of the leaf's first layer: the loop writes this layer back
        unchanged while there is no gradient yet.
        """
        entries, read_later = self.pipeline.carried(ticks), self.pipeline.found_by(ticks.start)
        for _, lag in entries:  # the tick below shares these with the state
            state.by_lag.setdefault(lag, {})
        tie = functools.partial(self.outer.tie_to, self.plan.tie)
        first = Tick(self, state, ticks.start, ticks, before_loop=tie)
        for key, lag in entries:
            there = state.by_lag[lag]
            if key in there:
                continue
            copies = self.pipeline.copies.get(key)
            is_before = ticks.start < lag and key[0] == "state"
            if copies is not None and ((key, lag) in read_later or is_before):
                first.do(dataclasses.replace(copies, lag=lag))
            elif shapes:
                there[key] = jax.tree.map(_zeros, self._shape_of(state, shapes, key, lag))

    def _shape_of(
        self, state: LoopState, shapes: Mapping[Any, Any], key: pipeline.Key, lag: int
    ) -> Any:
        """Return the traced shape of the value of `key`, at `lag` or at the nearest lag."""
        if key[0] == "state":
            leaf = self.updates[key[1]]
            layers = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaf.stacks)
            return [x if reads else None for x, reads in zip(layers, leaf.reads, strict=True)]
        others = [there[key] for there in state.by_lag.values() if key in there]
        lags = [x for other, x in shapes if other == key]
        if not lags:
            return others[0]
        return shapes[key, min(lags, key=lambda x: (x > lag, abs(x - lag)))]

    def _repeat(
        self, carry: list[Any], state: LoopState, ticks: range
    ) -> tuple[list[Any], LoopState, dict[pipeline.Key, Any]]:
        """Run some ticks as a loop.

        XLA unrolls a loop of one tick. Barriers then keep it from fusing the tick's operations with
        those around it, so that this tick has the same bits as the others.

        Returns:
            The program's carry and the state after the ticks, and the stacks that are not carried.
        """
        entries, keys = self.pipeline.carried(ticks), list(state.stacks)
        listed = list(self.pipeline.in_ticks(ticks))
        hold = lax.optimization_barrier if self.is_cut and len(ticks) == 1 else _same
        collected: list[pipeline.Key] = []

        def body(given: list[Any], scanned: Any) -> tuple[list[Any], list[Any]]:
            number, rows = scanned
            if self.is_cut:
                number, given = hold((number, given))
                given, rows = hold((given, self.rows_at(number)))
            values, stacks, carried = _split(given, len(entries), len(keys))
            by_lag: ByLag = {}
            for (key, lag), x in zip(entries, values, strict=True):
                by_lag.setdefault(lag, {})[key] = x
            current = LoopState(by_lag, dict(zip(keys, stacks, strict=True)), state.slices)
            tick = Tick(self, current, number, ticks, carry=carried, rows=rows)
            tick.run(listed, entries)
            collected[:] = [x for x in tick.collected if not self.carries(x)]
            after = [
                # In ticks that send nothing more, an entry keeps what was sent last.
                *(
                    current.by_lag.get(lag, {}).get(key, x)
                    for (key, lag), x in zip(entries, values, strict=True)
                ),
                *(current.stacks[key] for key in keys),
                *tick.carry,
            ]
            outputs = [tick.collected[x] for x in collected]
            return hold((after, outputs)) if self.is_cut else (after, outputs)

        values = [state.by_lag[lag][key] for key, lag in entries]
        before = [*values, *(state.stacks[key] for key in keys), *carry]
        traced, note = repeated(body, len(ticks))
        numbers = jnp.arange(ticks.start, ticks.stop)
        # A reversed scan reads from the end; ticks are counted up nevertheless.
        numbers = numbers[::-1] if self.loop.is_reversed else numbers
        rows = None if self.is_cut else self.device_rows
        after, outputs = self.loop.scan(traced, before, (numbers, rows), len(ticks))
        note()
        values, stacks, carry = _split(after, len(entries), len(keys))
        by_lag, found = {}, self.pipeline.found_by(ticks.stop)
        for (key, lag), x in zip(entries, values, strict=True):
            if (key, lag) in found:
                by_lag.setdefault(lag, {})[key] = x
        state = LoopState(by_lag, dict(zip(keys, stacks, strict=True)), state.slices)
        return carry, state, dict(zip(collected, outputs or [], strict=True))

    def _pass_on(self, state: LoopState) -> None:
        """Pass the gathers in flight at the end to the backward loop that continues with them."""
        for number, other in self.outer.plan.loops.items():
            if other.continues != self.index:
                continue
            same = {x.view: x.layer for x in self.outer.plan.uses.loops[number].stacks}
            names = {
                pipeline.shards(x.layer): pipeline.shards(same[x.view])
                for x in self.uses.stacks
                if x.view in same
            }
            self.outer.starts[number] = LoopState(
                {
                    lag: {
                        names.get(k, k): x
                        for k, x in there.items()
                        if k[0] in ("shards", "message")
                    }
                    for lag, there in state.by_lag.items()
                    if lag <= 0
                }
            )

    def _keep_slices(self, found: Mapping[pipeline.Key, Any], state: LoopState) -> None:
        """Let later gathers start from the stacks of node slices in `found`, not from shards."""
        for stack in self.uses.stacks:
            if ("slices", stack.layer) in found:
                data = found["slices", stack.layer]
                kept = state.slices[stack.layer].stack(data)
                self.outer.by_lag[0][pipeline.shards(stack.view.weight)] = kept


def _split(x: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Cut a list into three: its first `first` elements, the next `second`, and the rest."""
    return x[:first], x[first : first + second], x[first + second :]


def _zeros(x: Any) -> Array:
    return jnp.zeros(x.shape, x.dtype)


def _same(x: Any) -> Any:
    return x
