"""Run one tick of a loop: the handlers of the instructions that only loops have.

Handlers connect an iteration with arrays outside of the loop: shards of weights, node slices, rows
and outputs of the program, and leaves that are updated layer by layer, without stored gradients.

[Note: write, then fetch] XLA writes into a stack in its place only if nothing reads the old stack
any more, so a write and a fetch from the same stack cannot overlap. The write comes first: its data
are known when the tick begins, so XLA begins with it, and fetches the next layer while the rest of
the tick computes. If the fetch came first, XLA would wait for it before it computes anything. The
fetch also waits for a product, one that depends on a quarter of the iteration's work. Where
collectives start early (`compiler_options`), XLA would otherwise start the fetch at once and wait
for the write before it, 2.9 ms in each iteration (Llama-7B, ZeRO-3, 2 x 8 H200, predicted). A
product that is merely late in the program's order will not do: XLA computes it first, and then
fetches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import EncodedShards, copy_to_device, copy_to_host
from .._plan import instructions, pipeline
from .._program import Value
from .buckets import Bind, number_after
from .loop_inputs import LoopInputs, LoopState, at
from .mean_gradients import host_mean, mean_of_one_microbatch


class Tick:
    """One tick of a loop.

    Args:
        loop: the loop.
        state: the state before the tick; `run` turns it into the state before the next tick.
        number: the number of the tick; in tick `t` the operations of iteration `t` run.
        ticks: the ticks that run as one loop, this one among them.
        carry: the carry of the program's loop, before the tick.
        rows: an iteration's elements of the stacks that the program scans.
        before_loop: the barrier that copies and messages pass if the tick comes before the loop.

    Attributes:
        carry: after `run`, the carry of the next iteration.
        collected: for each stack, the element that the tick writes to it.
    """

    def __init__(
        self,
        loop: LoopInputs,
        state: LoopState,
        number: Any,
        ticks: range,
        *,
        carry: Sequence[Any] = (),
        rows: Sequence[Any] | None = None,
        before_loop: Bind | None = None,
    ):
        self.loop = loop
        self.state = state
        self.number = number
        self.ticks = ticks
        self.carry = list(carry)
        self.rows = rows
        self.before_loop = before_loop
        self.collected: dict[pipeline.Key, Any] = {}
        self.runner = loop.outer.inside(loop.plan.body, state.by_lag, self)
        self._known: dict[Any, Array] = {}  # the tick's number, made to depend on a value

    def run(
        self,
        listed: Sequence[instructions.Instruction],
        entries: Iterable[pipeline.Entry] | None = None,
    ) -> None:
        """Execute some instructions, and advance the state to the next tick.

        Args:
            listed: the instructions.
            entries: the entries of the state that the next tick needs; None: the plan says which,
                if `number` is an integer.
        """
        after = self.loop.pipeline.found_by(self.number + 1) if entries is None else entries
        self._entries = list(after)
        self.runner.execute(listed)
        num, by_lag = self.loop.loop.num_carry, self.runner.by_lag
        if any(isinstance(x, instructions.Begin) for x in listed):
            self.carry = [by_lag[0][pipeline.output(i)] for i in range(num)]
        self.state.by_lag = {}
        for key, lag in self._entries:
            if key in by_lag.get(lag - 1, {}):
                self.state.by_lag.setdefault(lag, {})[key] = by_lag[lag - 1][key]

    def do(self, each: instructions.Instruction) -> None:
        """Execute an instruction of a kind that only loops have."""
        _HANDLERS[type(each)](self, each)

    def _iteration(self, each: instructions.Instruction, when: Value | None = None) -> Any:
        """Return the iteration that an instruction works on.

        With `when`, the number depends on that value (`number_after`), so that copies at this
        iteration's place in a stack wait for it.
        """
        number = self.number
        if when is not None and when in self.runner.by_lag[0]:
            if when not in self._known:
                self._known[when] = number_after(number, self.runner.read(when))
            number = self._known[when]
        return number - each.lag

    def _index(self, each: instructions.Instruction, when: Value | None = None) -> Array:
        """Return the position in the stacks of the iteration that an instruction works on.

        With `when`, it depends on that value, and in a tick before the loop on the barrier
        `before_loop`: XLA cannot begin a copy at this position earlier.
        """
        index = self.loop.layer_index(self._iteration(each, when))
        return self.before_loop([index])[0] if self.before_loop else index

    def _if_it_exists(self, each: instructions.Instruction, new: Array, old: Array) -> Array:
        """Return `new`, or `old` in ticks where the instruction has no iteration of the loop."""
        iteration, length = self._iteration(each), self.loop.loop.length
        if self.ticks.start < each.lag:
            new = jnp.where(iteration >= 0, new, old)
        if self.ticks.stop - each.lag > length:
            new = jnp.where(iteration < length, new, old)
        return new

    # Weights.

    def _take_shards(self, each: instructions.TakeShards) -> None:
        index, there = self.loop.layer_index(self._iteration(each)), self.runner.by_lag[each.lag]
        for weight in each.weights:
            if weight in self.loop.constants:
                there[pipeline.shards(weight)] = self.loop.constants[weight]
                continue
            stack = self.loop.stacks[weight]
            kept = stack.kept and self.state.stacks.get(("slices", weight), stack.kept.data)
            there[pipeline.shards(weight)] = _layer_of(stack, index, kept)

    def _fetch_shards(self, each: instructions.FetchShards) -> None:
        stack = self.loop.stacks[each.weight]
        for number, leaf in self.loop.updates.items():
            stacks = self.state.stacks.get(("state", number))  # None before the loop
            if stacks and leaf.stacks[0] is stack.data:  # the loop updates what it reads
                stack = dataclasses.replace(stack, data=stacks[0])
        kept = None if stack.kept is None else stack.kept.data
        shards = _layer_of(stack, self._index(each, each.when), kept)
        there = self.runner.by_lag[each.lag]
        there[pipeline.shards(each.weight)] = shards.on_device(each.weight.name, windowed=True)

    def _take_slices(self, each: instructions.TakeSlices) -> None:
        index, there = self.loop.layer_index(self._iteration(each)), self.runner.by_lag[each.lag]
        for weight in each.weights:
            data = at(self.state.stacks["slices", weight], index)
            slices = dataclasses.replace(self.state.slices[weight], data=data)
            there[pipeline.shards(weight)] = slices

    def _keep_slices(self, each: instructions.KeepSlices) -> None:
        index = self.loop.layer_index(self._iteration(each))
        for weight in each.weights:
            slices = self.runner.by_lag[each.lag][pipeline.shards(weight)]
            struct = jax.ShapeDtypeStruct(slices.data.shape, slices.data.dtype)
            self.state.slices[weight] = slices.described(struct)
            key, data = ("slices", weight), slices.data
            if self.before_loop is not None:
                self.state.early.append((weight, index, data))
                continue
            self.collected[key] = data
            if key not in self.state.stacks:
                continue
            stack = self.state.stacks[key]
            if self.loop.stacks[weight].kept is not None:
                # Past the end the last layer is sent again. It has the difference already.
                data = self._if_it_exists(each, data, at(stack, index))
            self.state.stacks[key] = put(stack, data, index)

    # Rows and outputs of the program.

    def _fetch_row(self, each: instructions.FetchRow) -> None:
        x = at(self.loop.rows[each.stack], self.loop.layer_index(self._iteration(each)))
        x = copy_to_device(x, "activations", "", windowed=True)
        self.runner.by_lag[each.lag][pipeline.row(each.stack)] = x

    def _begin(self, each: instructions.Begin) -> None:
        here, rows = self.runner.by_lag[0], list(self.rows or self.loop.rows_at(self.number))
        for i in each.rows:
            rows[i] = here[pipeline.row(i)]
        inputs = [*self.loop.inputs, *self.carry, *rows]
        here.update(zip(self.loop.plan.body.block.inputs, inputs, strict=True))
        for weight, stack in self.loop.stacks.items():  # `decode` reads their codec and layout
            if pipeline.shards(weight) not in here:
                struct = jax.ShapeDtypeStruct(stack.data.shape[1:], stack.data.dtype)
                here[pipeline.shards(weight)] = stack.layer(stack.described(struct).data)

    def _output(self, each: instructions.Output) -> None:
        number, plan, comm = each.output, self.loop.plan, self.runner.comm
        value = self.runner.output(number, each.lag)
        if number in plan.updates:
            dtype = self.loop.updates[number].stacks[0].dtype
            value = mean_of_one_microbatch(value, dtype, comm.divisor)
        elif number in plan.means:
            value = mean_of_one_microbatch(value, plan.means[number].dtype, comm.divisor)
        elif number in plan.host_gradients:
            leaf = plan.host_gradients[number]
            value = host_mean(value, leaf.dtype, comm.divisor, f"{leaf.path}[i]")
        self.runner.by_lag[each.lag][pipeline.output(number)] = value

    def _collect(self, each: instructions.Collect) -> None:
        # In ticks before its first iteration, this writes to the first place, which that iteration
        # overwrites.
        key = pipeline.output(each.output)
        value = self.collected[key] = self.runner.by_lag[each.lag][key]
        if key in self.state.stacks:
            index, stack = self.loop.layer_index(self._iteration(each)), self.state.stacks[key]
            if each.output in self.loop.plan.sums:
                before = jax.tree.map(lambda y: at(y, index), stack)
                added = jax.tree.map(lambda x, y: x.astype(y.dtype) + y, value, before)
                value = jax.tree.map(functools.partial(self._if_it_exists, each), added, before)
            self.state.stacks[key] = jax.tree.map(lambda y, x: put(y, x, index), stack, value)

    # Updates.

    def _fetch_state(self, each: instructions.FetchState) -> None:
        leaf, index = self.loop.updates[each.output], self._index(each, each.when)
        stacks = self.state.stacks["state", each.output]
        self.runner.by_lag[each.lag][pipeline.state(each.output)] = [
            copy_to_device(at(stack, index), "update", f"{name}[i]", windowed=True)
            if reads
            else None
            for stack, name, reads in zip(stacks, leaf.names, leaf.reads, strict=True)
        ]

    def _update(self, each: instructions.Update) -> None:
        leaf, there = self.loop.updates[each.output], self.runner.by_lag[each.lag]
        index, stacks = self._index(each, each.when), [*self.state.stacks["state", each.output]]
        before = there[pipeline.state(each.output)]
        # The bits of a mean that is stored: XLA may not merge factors of the mean and the update.
        gradient = lax.optimization_barrier(there[pipeline.output(each.output)])
        new = leaf.new_layers(gradient, before)
        for i, (x, old, name) in enumerate(zip(new, before, leaf.names, strict=True)):
            if x is None:
                continue
            x = x if old is None else self._if_it_exists(each, x, old)
            x = copy_to_host(x, "update", f"{name}[i]", windowed=True)
            stacks[i] = put(stacks[i], x, index)
        self.state.stacks["state", each.output] = stacks

    # Barriers.

    def _hold_states(self, each: instructions.HoldStates) -> None:
        """Make writes to a stack wait for copies out of it: else XLA does not write in place."""
        del each
        keys = [("state", i) for i in self.loop.updates]
        places = [(there, x) for there in self.runner.by_lag.values() for x in keys if x in there]
        held = [self.state.stacks[x] for x in keys], [there[x] for there, x in places]
        stacks, copies = lax.optimization_barrier(held)
        self.state.stacks.update(zip(keys, stacks, strict=True))
        for (there, x), value in zip(places, copies, strict=True):
            there[x] = value

    def _join_copies(self, each: instructions.JoinCopies) -> None:
        """Make the carry wait for this tick's copies, which then overlap with the tick's work."""
        del each
        here, by_lag = self.runner.by_lag[0], self.runner.by_lag
        outputs = [pipeline.output(i) for i in range(self.loop.loop.num_carry)]
        places = [(by_lag[lag - 1], key) for key, lag in self._entries if _is_copy(key)]
        places = [(there, key) for there, key in places if key in there]
        held = [here[x] for x in outputs], [there[key] for there, key in places]
        carry, copies = lax.optimization_barrier(held)
        here.update(zip(outputs, carry, strict=True))
        for (there, key), x in zip(places, copies, strict=True):
            there[key] = x


_HANDLERS: dict[type[instructions.Instruction], Callable[[Tick, Any], None]] = {
    instructions.TakeShards: Tick._take_shards,
    instructions.FetchShards: Tick._fetch_shards,
    instructions.TakeSlices: Tick._take_slices,
    instructions.KeepSlices: Tick._keep_slices,
    instructions.FetchRow: Tick._fetch_row,
    instructions.Begin: Tick._begin,
    instructions.Output: Tick._output,
    instructions.Collect: Tick._collect,
    instructions.FetchState: Tick._fetch_state,
    instructions.Update: Tick._update,
    instructions.HoldStates: Tick._hold_states,
    instructions.JoinCopies: Tick._join_copies,
}


def _is_copy(key: pipeline.Key) -> bool:
    return key[0] in ("shards", "row", "state")


def _layer_of(stack: EncodedShards, index: Array, kept: Array | None) -> EncodedShards:
    """Return one layer of a stack of shards, in the memory that holds the stack."""
    return stack.layer(at(stack.data, index), None if kept is None else at(kept, index))


def put(stack: Array, x: Array, index: Array) -> Array:
    """Return a stack whose element at `index` is replaced by `x`."""
    return lax.dynamic_update_index_in_dim(stack, x, index, 0)
