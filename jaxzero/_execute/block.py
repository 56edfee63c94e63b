"""Run a block: each instruction of the plan's list has a handler, which is called in order.

A block is a traced program or a loop body. Everything here runs while JAX traces the `shard_map`:
operations are copied, with the collectives that the list (`_plan.instructions`) puts between them.
`buckets` gathers weights and reduces gradients, `loops` runs loops. All decisions are in the list.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import (
    CommSpec,
    EncodedShards,
    alike_once,
    in_loop,
    in_region,
    labelled,
    note_moves,
    reduce_gradient,
)
from .._mesh import emit, in_host, is_simulating
from .._plan import BlockPlan, ShardedParam, View, instructions, instructions_of, pipeline
from .._program import Barrier, Constant, Operation, Value, may_be_copied, movable_ops
from .buckets import (
    Bind,
    GatherSources,
    GradientBuckets,
    after_decode,
    decode_bucket,
    encode_bucket,
    gather_next_axis,
    tied,
    with_barrier,
)
from .loop_inputs import ByLag, LeafUpdate, LoopState
from .loops import run_loop, start_loop
from .mean_gradients import host_mean
from .ticks import Tick


def run_block(
    plan: BlockPlan,
    comm: CommSpec,
    inputs: Sequence[Any],
    sources: Mapping[ShardedParam, EncodedShards],
    updates: Mapping[int, LeafUpdate],
) -> tuple[list[Any], GatherSources, dict[int, list[Array]]]:
    """Run a block: execute its list of instructions on arrays.

    Args:
        plan: the block, with its gathers and reductions.
        comm: axes and codecs of the collectives.
        inputs: an array for each input of the block; inputs that are views of weights are ignored.
        sources: for each weight that the block uses, the shard or node slice to gather it from.
        updates: by index of the leaf, the updates that the block's loops may make.

    Returns:
        The block's outputs; the sources after the run, where node slices that the program kept have
        replaced shards; and the new stacks of each updated leaf, as in `LeafUpdate.stacks`. An
        output with a reduction is this device's shard of the sum, in `accumulator_dtype`. An output
        that is the gradient of an updated leaf is None.
    """
    runner = BlockRunner(plan, comm, updates)
    here = runner.by_lag[0]
    here.update({pipeline.shards(x): source for x, source in sources.items()})
    here.update(zip(plan.block.inputs, inputs, strict=True))
    with alike_once():
        runner.execute(instructions_of(plan))
    outputs = [runner.output(i, 0) for i in range(len(plan.block.outputs))]
    return outputs, {x: here[pipeline.shards(x)] for x in sources}, runner.updated


class BlockRunner:
    """One run of a block, or of a loop's body in one tick.

    Attributes:
        by_lag: the arrays that exist so far, by the lag of the iteration that they belong to (0
            outside of loops). The key of an array of the program is its `Value`, of any other a
            `_plan.pipeline.Key`.
        starts: the loops of this block whose first gathers have started, with their state.
        updated: new stacks of the leaves that a loop of this block has updated.
    """

    def __init__(
        self,
        plan: BlockPlan,
        comm: CommSpec,
        updates: Mapping[int, LeafUpdate],
        by_lag: ByLag | None = None,
        tick: Tick | None = None,
    ):
        self.plan, self.comm, self.tick = plan, comm, tick
        self.gradients = GradientBuckets(plan, comm)
        self.updates = updates
        self.by_lag: ByLag = collections.defaultdict(dict, by_lag or {})
        self.starts: dict[int, LoopState] = {}
        self.updated: dict[int, list[Array]] = {}
        self._full: dict[tuple[ShardedParam, tuple[movable_ops.Op, ...]], Any] = {}
        self._loop_tie: instructions.Tie | None = None  # of the loop that runs now

    def inside(self, body: BlockPlan, by_lag: ByLag, tick: Tick) -> BlockRunner:
        """Return a runner of the body of a loop in this block, for one tick."""
        return BlockRunner(body, self.comm, {}, by_lag, tick)

    def execute(self, listed: Iterable[instructions.Instruction]) -> None:
        """Execute instructions in their order."""
        for is_plain, run in itertools.groupby(listed, self._is_plain):
            if is_plain:
                plain = list(run)
                runs = (x for x in plain if type(x) is instructions.Run)
                operations = (self.plan.block.operations[each.at] for each in runs)
                equations = ((x.equation, x.inputs, x.outputs) for x in operations)
                self.by_lag[0].update(emit(equations, self.read))
                run = (x for x in plain if type(x) is instructions.Drop)  # all have been read
            for each in run:
                with self._region(each.at):
                    self._execute((each,))

    def _execute(self, listed: Iterable[instructions.Instruction]) -> None:
        for instruction in listed:
            if type(instruction) in _HANDLERS:
                _HANDLERS[type(instruction)](self, instruction)
            else:
                assert self.tick is not None
                self.tick.do(instruction)

    def _region(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Return a context that records host copies as part of forward or of backward."""
        if self.plan.last_forward is None:
            return contextlib.nullcontext()
        return in_region("forward" if index <= self.plan.last_forward else "backward")

    # Barriers: see [Note: ties] in `_plan.ties`.

    def tie_to(self, value: Value | None, arrays: list[Any]) -> list[Any]:
        """Return `arrays`, available only once the array of `value` is available."""
        if value is None or value not in self.by_lag[0] or not arrays:
            return arrays
        return tied(arrays, self.by_lag[0][value])[0]

    def tie_loop(self, carry: list[Any]) -> list[Any]:
        """Pass the initial carry of the loop that runs now through the barrier of its tie."""
        assert self._loop_tie is not None
        return self._tie(self._loop_tie, carry)

    def _tie(self, tie: instructions.Tie | None, arrays: list[Any]) -> list[Any]:
        """Pass `arrays` through a tie's barrier; in a tick before a loop, through `before_loop`."""
        if self.tick is not None and self.tick.before_loop is not None:
            return self.tick.before_loop(arrays)
        if tie is None or not arrays:
            return arrays
        self._execute(tie.before)
        here = self.by_lag[0]
        operands: Any
        if tie.value is not None:
            operands = tied(arrays, here[tie.value])[0]
        else:
            operands = arrays, [here[pipeline.gradient(i)] for i in tie.buckets]
        others = [here["reduced", x] for x in tie.reduced], [here[x] for x in tie.copied]
        # With these operands, gradients of the previous tie are in host memory by now. XLA would
        # copy all of them at the end of the step.
        operands, (gradients, copies) = lax.optimization_barrier((operands, others))
        if tie.value is None:
            operands, sent = operands
            here.update(zip(map(pipeline.gradient, tie.buckets), sent, strict=True))
        here.update(zip(tie.copied, copies, strict=True))
        here.update({("reduced", x): y for x, y in zip(tie.reduced, gradients, strict=True)})
        self._execute(tie.after)
        return operands

    def _ties(self, tie: instructions.Tie | None) -> Bind:
        """Return a tie's barrier as a function; only its first call runs the tie's instructions."""
        left = [tie]

        def bind(arrays: list[Any]) -> list[Any]:
            if left and arrays:
                return self._tie(left.pop(), arrays)
            again = None if tie is None else instructions.Tie(tie.value)
            return self._tie(again, arrays)

        return bind

    def _pin(self, value: Value | None) -> Bind:
        """Return a barrier as a function: later readers of `value` wait for its argument."""

        def bind(arrays: list[Any]) -> list[Any]:
            here = self.by_lag[0]
            if value is None or value not in here or not arrays:
                return arrays
            arrays, here[value] = tied(arrays, here[value])
            return arrays

        return bind

    # Weights.

    def _fetch(self, each: instructions.Fetch) -> None:
        here = self.by_lag[0]
        sources = {x: here[pipeline.shards(x)] for x in self.plan.fetched(each.group)}
        sources = {x: source for x, source in sources.items() if in_host(source.data)}
        data = self._tie(each.tie, [x.data for x in sources.values()])
        here["fetched", each.group] = {
            weight: dataclasses.replace(x, data=d).on_device(weight.name, windowed=True)
            for (weight, x), d in zip(sources.items(), data, strict=True)
        }

    def _encode(self, each: instructions.Encode) -> None:
        there, group = self.by_lag[each.lag], self.plan.gather_groups[each.group]
        sources = self._sources(each.group, each.lag)
        tie, pin = functools.partial(self._tie, each.tie), self._pin(each.pin)
        fetched = there.pop(("fetched", each.group), None)
        buckets = encode_bucket(group, sources, self.comm, tie, pin, fetched)
        there[pipeline.message(each.group)] = buckets
        kept = (x.weight for x in group.gathers if x.keeps)
        there.update({pipeline.shards(x): sources[x] for x in kept})

    def _send(self, each: instructions.Send) -> None:
        there, group = self.by_lag[each.lag], self.plan.gather_groups[each.group]
        key, axis = pipeline.message(each.group), self.plan.gather_axes[each.axis]
        buckets = with_barrier(there[key], self._pin(each.pin))
        if each.after_decode:
            buckets = after_decode(group, buckets, self._full)
        there[key] = gather_next_axis(group, buckets, self.comm, axis)

    def _decode(self, each: instructions.Decode) -> None:
        group, here = self.plan.gather_groups[each.group], self.by_lag[0]
        buckets, sources = here[pipeline.message(each.group)], self._sources(each.group, 0)
        weights = decode_bucket(group, buckets, sources, self.comm)
        keys = ((x.weight, x.ops) for x in group.gathers)
        self._full.update(zip(keys, weights, strict=True))

    def _sources(self, group: int, lag: int) -> GatherSources:
        weights = (x.weight for x in self.plan.gather_groups[group].gathers)
        return {x: self.by_lag[lag][pipeline.shards(x)] for x in weights}

    def _drop(self, each: instructions.Drop) -> None:
        for key in each.weights:
            del self._full[key]

    def _start_loop(self, each: instructions.StartLoop) -> None:
        start_loop(self, each.loop, self._ties(each.tie))

    def read(self, atom: Value | Constant, lag: int = 0) -> Any:
        """Return the array of a value; for a view of a weight, apply it to the full weight."""
        if isinstance(atom, Constant):
            return atom.value
        if (view := self.plan.uses.views.get(atom)) is None:
            return self.by_lag[lag][atom]
        x, after = self._full_weight(view)
        for op in after:
            x = op.apply(x)
        return x

    def _full_weight(self, view: View) -> tuple[Any, tuple[movable_ops.Op, ...]]:
        """Return a view's gathered weight, and the view's operations still to be applied to it."""
        weight = view.weight
        before, after = movable_ops.before_gather(view.ops, weight.layout, weight.shape)
        return self._full[weight, before], after

    # Operations.

    def _is_plain(self, each: instructions.Instruction) -> bool:
        """Return whether an instruction drops weights, or copies an equation to the trace."""
        if type(each) is not instructions.Run or is_simulating():
            return type(each) is instructions.Drop
        operation, views = self.plan.block.operations[each.at], self.plan.uses.views
        applied = (self._full_weight(views[x])[1] for x in operation.inputs if x in views)
        return may_be_copied(operation) and not any(applied)

    def _run(self, each: instructions.Run) -> None:
        operation = self.plan.block.operations[each.at]
        # Views of weights have no array in a barrier, which is bound without them.
        views = self.plan.uses.views if isinstance(operation, Barrier) else {}
        inputs = [self.read(atom) for atom in operation.inputs if atom not in views]
        outputs = operation.bind(inputs)
        if operation.name == "device_put":
            note_moves(inputs, outputs)
        self._write(operation, outputs)

    def _run_loop(self, each: instructions.RunLoop) -> None:
        self._loop_tie = each.tie
        with in_loop(each.at):
            outputs = run_loop(self, each.at)
        self._write(self.plan.block.operations[each.at], outputs)

    def _write(self, operation: Operation, outputs: Sequence[Any]) -> None:
        """Store the outputs of an operation; a barrier has no arrays for outputs that are views."""
        kept = operation.outputs
        if isinstance(operation, Barrier):
            pairs = zip(operation.inputs, kept, strict=True)
            kept = [out for given, out in pairs if given not in self.plan.uses.views]
        self.by_lag[0].update(zip(kept, outputs, strict=True))

    def _run_on_shards(self, each: instructions.RunOnShards) -> None:
        operation = self.plan.block.operations[each.operation]
        terms = operation.inputs if operation.source is None else [operation.source]
        added = self.plan.gradients.sums if each.operation in self.plan.added else ()  # by a loop
        arrays = [self.read(x, each.lag) for x in terms if x not in added]
        there = self.by_lag[each.lag]
        there[operation.outputs[0]] = self.gradients.on_shards(each.operation, arrays)

    def _zeros(self, each: instructions.Zeros) -> None:
        spec = self.plan.gradients.reduces[each.value]
        self.by_lag[0][each.value] = self.gradients.zeros(each.value, spec)

    def _delay(self, each: instructions.Delay) -> None:
        """Make the constant that a scatter adds to just before the scatter runs.

        The gradient of an embedding starts from zeros as large as the table. They depend on
        nothing, so without a barrier XLA makes them early and holds them until the scatter.
        """
        here, maker = self.by_lag[0], self.plan.block.operations[each.constant]
        target = maker.outputs[0]
        constant = jnp.asarray(self.read(maker.inputs[0]), target.dtype)
        constant, here[each.value] = lax.optimization_barrier((constant, here[each.value]))
        here[target] = maker.bind([constant])[0]

    def _finish_loss(self, each: instructions.FinishLoss) -> None:
        here = self.by_lag[0]
        (here[each.loss],) = self._pin(each.pin)([here[each.loss]])

    # Gradients.

    def _encode_gradients(self, each: instructions.EncodeGradients) -> None:
        here, values = self.by_lag[0], self.plan.reduce_groups[each.group].values
        gradients, key = [here.pop(value) for value in values], pipeline.gradient(each.group)
        if each.after_sent and key in (before := self.by_lag[1]):
            gradients, before[key] = lax.optimization_barrier((gradients, before[key]))
        here[key] = self.gradients.encode(each.group, gradients)

    def _reduce(self, each: instructions.Reduce) -> None:
        there, key = self.by_lag[each.lag], pipeline.gradient(each.group)
        bucket = there[key]
        if each.after is not None:
            bucket, _ = tied(bucket, (self.by_lag[0][each.after],))
        there[key] = self.gradients.reduce_next(each.group, each.axis, bucket)

    def _pin_gradients(self, each: instructions.PinGradients) -> None:
        there, keys = self.by_lag[each.lag], [pipeline.gradient(i) for i in each.groups]
        pinned = self._pin(each.pin)([there[x] for x in keys])
        there.update(zip(keys, pinned, strict=True))

    def _hold(self, each: instructions.Hold) -> None:
        self._pin(each.pin)(self._tie(each.tie, [jnp.zeros(())]))

    def _finish(self, each: instructions.Finish) -> None:
        there = self.by_lag[each.lag]
        done = self.gradients.finish(each.group, there.pop(pipeline.gradient(each.group)))
        there.update({("reduced", value): x for value, x in done.items()})

    def _store(self, each: instructions.Store) -> None:
        there = self.by_lag[each.lag]
        x = there.pop(("reduced", each.value))
        if each.value in self.plan.host_gradients:
            leaf = self.plan.host_gradients[each.value]
            x = host_mean(x, leaf.dtype, self.comm.divisor, leaf.path)
        there[each.value] = x

    def output(self, i: int, lag: int) -> Any:
        """Return output `i` of the block; a gradient that is not reduced yet is reduced here."""
        x = jax.tree.map(jnp.asarray, self.read(self.plan.block.outputs[i], lag))
        spec = self.plan.gradients.at_end.get(i)
        if spec is None:
            return x
        with labelled("gradients", spec.name):
            return reduce_gradient(x, spec, self.comm)


_HANDLERS: dict[type[instructions.Instruction], Callable[[BlockRunner, Any], None]] = {
    instructions.Fetch: BlockRunner._fetch,
    instructions.Encode: BlockRunner._encode,
    instructions.Send: BlockRunner._send,
    instructions.Decode: BlockRunner._decode,
    instructions.Drop: BlockRunner._drop,
    instructions.StartLoop: BlockRunner._start_loop,
    instructions.Run: BlockRunner._run,
    instructions.RunLoop: BlockRunner._run_loop,
    instructions.RunOnShards: BlockRunner._run_on_shards,
    instructions.Zeros: BlockRunner._zeros,
    instructions.Delay: BlockRunner._delay,
    instructions.FinishLoss: BlockRunner._finish_loss,
    instructions.EncodeGradients: BlockRunner._encode_gradients,
    instructions.Reduce: BlockRunner._reduce,
    instructions.PinGradients: BlockRunner._pin_gradients,
    instructions.Hold: BlockRunner._hold,
    instructions.Finish: BlockRunner._finish,
    instructions.Store: BlockRunner._store,
}
