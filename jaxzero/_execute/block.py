"""Run a block: a handler for each kind of instruction, in the order of the plan's list.

A block is a traced program or a loop body. Everything here runs while JAX traces the `shard_map`:
the operations of the block are bound again, one by one, with the collectives that the list
(`_plan.instructions`) puts between them. Nothing is decided here. `weight_buckets` gathers weights,
`gradient_buckets` reduces gradients, `loop` runs the loops of a block.
"""

from __future__ import annotations

import contextlib
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
    ReduceBucket,
    in_loop,
    in_region,
    labelled,
    note_moves,
    reduce_gradient,
)
from .._plan import BlockPlan, ShardedParam, deferred_instructions, instructions, instructions_of
from .._program import Barrier, Constant, Operation, Value, movable_ops
from .gradient_buckets import GradientBuckets
from .loop import loop_prologue, run_loop
from .loop_layers import Prologue
from .mean_gradients import host_mean
from .ties import tied
from .update_in_loop import LeafUpdate
from .weight_buckets import Bind, GatherSources, WeightBuckets


def run_block(
    plan: BlockPlan,
    comm: CommSpec,
    inputs: Sequence[Any],
    sources: Mapping[ShardedParam, EncodedShards],
    updates: Mapping[int, LeafUpdate],
) -> tuple[list[Any], GatherSources, dict[int, list[Array]]]:
    """Run a block.

    Args:
        plan: the block, with its gathers and reductions.
        comm: axes and codecs of the collectives.
        inputs: an array for each input of the block; those for views of weights are ignored.
        sources: for each weight that the block uses, the shard or node slice to gather it from.
        updates: of the leaves that the loops of the block may update, by index of the leaf.

    Returns:
        The block's outputs; the gather sources after the run, in which node slices that the
        program kept have replaced shards; and the new stacks of each updated leaf, as in
        `LeafUpdate.stacks`. An output with a reduction is this device's shard of the sum, in
        `accumulator_dtype`; that of an updated leaf is None.
    """
    runner = BlockRunner(WeightBuckets(plan, comm, sources), updates)
    return runner.run(inputs), runner.weights.sources, runner.updated


class BlockRunner:
    """One run of a block; `weights` has its plan and gathers its weights."""

    def __init__(self, weights: WeightBuckets, updates: Mapping[int, LeafUpdate]):
        plan = weights.plan
        self.plan = plan
        self.comm = weights.comm
        self.weights = weights
        self.gradients = GradientBuckets(plan, weights.comm)
        self.updates = updates
        self.updated: dict[int, list[Array]] = {}  # new stacks of leaves that a loop has updated
        self.prologues: dict[int, Prologue] = {}  # of the loops in this block
        self.env: dict[Value, Any] = {}  # the array of every value that is not a view of a weight
        self._reduce_previous: Callable[[Bind], None] | None = None
        self._loop_tie: instructions.Tie | None = None  # of the loop that runs now

    def inside(self, weights: WeightBuckets) -> BlockRunner:
        """Make a runner for the body of a loop in this block, whose plan `weights` has."""
        return BlockRunner(weights, {})

    def run(
        self,
        inputs: Sequence[Any],
        view_outputs: frozenset[int] = frozenset(),
        reduce_previous: Callable[[Bind], None] | None = None,
    ) -> list[Any]:
        """Run the block and return its outputs.

        Outputs in `view_outputs` (views of weights, which the caller reads from shards), and those
        that are deferred to the next iteration of a loop, are None.

        Args:
            inputs: an array for each input of the block.
            view_outputs: indices of outputs.
            reduce_previous: in a pipelined loop, reduces gradients of the last iteration over their
                first axis, and passes them through a barrier.
        """
        block, end = self.plan.block, len(self.plan.block.operations)
        self._reduce_previous = reduce_previous
        self.env.update(zip(block.inputs, inputs, strict=True))
        listed = instructions_of(self.plan, in_pipeline=reduce_previous is not None)
        by_place = {at: list(group) for at, group in itertools.groupby(listed, lambda x: x.at)}
        for at in range(end + 1):
            with self._region(at):
                self._execute(by_place.get(at, ()))
        deferred = self.plan.deferred_values()
        return [
            None if i in view_outputs or atom in deferred else self._output(i, atom)
            for i, atom in enumerate(block.outputs)
        ]

    def deferred_outputs(self, buckets: Mapping[int, ReduceBucket]) -> dict[int, Any]:
        """Compute the deferred outputs of one iteration, by index of the output.

        Args:
            buckets: the fully reduced buckets of that iteration, by index of the reduce group.
        """
        self.gradients.buckets.update(buckets)
        self._execute(deferred_instructions(self.plan, buckets))
        deferred = self.plan.deferred_values()
        outputs = enumerate(self.plan.block.outputs)
        return {i: self._output(i, atom) for i, atom in outputs if atom in deferred}

    def _execute(self, listed: Iterable[instructions.Instruction]) -> None:
        for each in listed:
            _HANDLERS[type(each)](self, each)

    def _region(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Record copies from and to host memory as those of forward or backward."""
        if self.plan.last_forward is None:
            return contextlib.nullcontext()
        return in_region("forward" if index <= self.plan.last_forward else "backward")

    # Barriers: see [Note: ties] in `_plan.ties`.

    def tie_to(self, value: Value | None, arrays: list[Any]) -> list[Any]:
        """Return `arrays`, available only once `value` is."""
        if value is None or value not in self.env or not arrays:
            return arrays
        return tied(arrays, self.env[value])[0]

    def tie_loop(self, carry: list[Any]) -> list[Any]:
        """Return the initial carry of the loop that runs now, behind the barrier of its tie."""
        assert self._loop_tie is not None
        return self._tie(self._loop_tie, carry)

    def _tie(self, tie: instructions.Tie | None, arrays: list[Any]) -> list[Any]:
        """Pass `arrays` through the barrier of a tie."""
        if tie is None or not arrays:
            return arrays
        self._execute(tie.before)
        buckets, reduced = self.gradients.buckets, self.gradients.reduced
        operands: Any = arrays
        if tie.value is not None:
            operands = tied(arrays, self.env[tie.value])[0]
        else:
            operands = arrays, [buckets[i] for i in tie.buckets]
        others = [reduced[x] for x in tie.reduced], [self.env[x] for x in tie.copied]
        # Gradients of the tie before have then arrived in host memory; otherwise XLA copies all of
        # them at the end of the step.
        operands, (gradients, copies) = lax.optimization_barrier((operands, others))
        if tie.value is None:
            operands, sent = operands
            buckets.update(zip(tie.buckets, sent, strict=True))
        self.env.update(zip(tie.copied, copies, strict=True))
        reduced.update(zip(tie.reduced, gradients, strict=True))
        self._execute(tie.after)
        return operands

    def _ties(self, tie: instructions.Tie | None) -> Bind:
        """The barrier of a tie as a function; calls after the first only wait for its value."""
        left = [tie]

        def bind(arrays: list[Any]) -> list[Any]:
            if left and arrays:
                return self._tie(left.pop(), arrays)
            again = None if tie is None else instructions.Tie(tie.value)
            return self._tie(again, arrays)

        return bind

    def _pin(self, value: Value | None) -> Bind:
        """A function that forces arrays to be computed before the next reader of `value`."""

        def bind(arrays: list[Any]) -> list[Any]:
            if value is None or not arrays:
                return arrays
            arrays, self.env[value] = tied(arrays, self.env[value])
            return arrays

        return bind

    # Weights.

    def _fetch(self, each: instructions.Fetch) -> None:
        self.weights.fetch(each.group, functools.partial(self._tie, each.tie))

    def _encode(self, each: instructions.Encode) -> None:
        tie = functools.partial(self._tie, each.tie)
        self.weights.encode(each.group, tie, self._pin(each.pin))

    def _send(self, each: instructions.Send) -> None:
        self.weights.send(each.group, each.axis, self._pin(each.pin))

    def _decode(self, each: instructions.Decode) -> None:
        self.weights.decode(each.group)

    def _drop(self, each: instructions.Drop) -> None:
        self.weights.drop(each.weights)

    def _start_loop(self, each: instructions.StartLoop) -> None:
        self.prologues[each.loop] = loop_prologue(self, each.loop, self._ties(each.tie))

    def read(self, atom: Value | Constant) -> Any:
        """The array of a value. For a view: the full weight, with the view's operations applied."""
        if isinstance(atom, Constant):
            return atom.value
        view = self.plan.uses.views.get(atom)
        return self.env[atom] if view is None else self.weights.full(view.weight, view.ops)

    # Operations.

    def _run(self, each: instructions.Run) -> None:
        operation = self.plan.block.operations[each.at]
        # Views of weights have no array in a barrier, which is bound without them.
        views = self.plan.uses.views if isinstance(operation, Barrier) else {}
        given = [atom for atom in operation.inputs if atom not in views]
        inputs = [self.read(atom) for atom in given]
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
        """Keep the arrays that an operation made; outputs of a barrier that are views have none."""
        made = operation.outputs
        if isinstance(operation, Barrier):
            pairs = zip(operation.inputs, made, strict=True)
            made = [out for given, out in pairs if given not in self.plan.uses.views]
        self.env.update(zip(made, outputs, strict=True))

    def _run_on_shards(self, each: instructions.RunOnShards) -> None:
        operation = self.plan.block.operations[each.operation]
        layout = self.plan.gradients.on_shards[each.operation]
        self.env[operation.outputs[0]] = self._on_shards(operation, layout)

    def _on_shards(self, operation: Operation, layout: Any) -> Any:
        """Run an operation that the plan moved after a reduction, on the reduced shards."""
        op, source = operation.view(), operation.source
        if source is None:  # an addition
            return jax.tree.map(_add, *(self.read(atom) for atom in operation.inputs))
        x = self.read(source)
        if isinstance(op, movable_ops.ConvertDtype):
            # Sums stay in `accumulator_dtype`; the mean is cast at the end of the step.
            return x
        assert op is not None
        return jax.tree.map(lambda x: movable_ops.apply_on_shard((op,), x, layout, source.shape), x)

    def _zeros(self, each: instructions.Zeros) -> None:
        spec = self.plan.gradients.reduces[each.value]
        self.env[each.value] = self.gradients.zeros(each.value, spec)

    def _delay(self, each: instructions.Delay) -> None:
        """Delay the constant that a scatter adds to, until just before the scatter runs.

        The gradient of an embedding starts from zeros as large as the table. They depend on
        nothing, so without a barrier XLA makes them early and holds them until the scatter.
        """
        maker = self.plan.block.operations[each.constant]
        target = maker.outputs[0]
        constant = jnp.asarray(self.read(maker.inputs[0]), target.dtype)
        operands = (constant, self.env[each.value])
        constant, self.env[each.value] = lax.optimization_barrier(operands)
        self.env[target] = maker.bind([constant])[0]

    def _finish_loss(self, each: instructions.FinishLoss) -> None:
        (self.env[each.loss],) = self._pin(each.pin)([self.env[each.loss]])

    # Gradients.

    def _encode_gradients(self, each: instructions.EncodeGradients) -> None:
        values = self.plan.reduce_groups[each.group].values
        self.gradients.encode(each.group, [self.env.pop(value) for value in values])

    def _reduce(self, each: instructions.Reduce) -> None:
        bucket = self.gradients.buckets[each.group]
        if each.tie is not None:
            bucket, _ = tied(bucket, (self.env[each.tie],))
        bucket = self.gradients.reduce_next(each.group, each.axis, bucket)
        self.gradients.buckets[each.group] = bucket

    def _pin_gradients(self, each: instructions.PinGradients) -> None:
        buckets = self.gradients.buckets
        pinned = self._pin(each.pin)([buckets[i] for i in each.groups])
        buckets.update(zip(each.groups, pinned, strict=True))

    def _reduce_previous_layer(self, each: instructions.ReducePrevious) -> None:
        assert self._reduce_previous is not None
        self._reduce_previous(self._pin(each.pin))

    def _finish(self, each: instructions.Finish) -> None:
        self.gradients.finish(each.group, self.gradients.buckets.pop(each.group))

    def _store(self, each: instructions.Store) -> None:
        x = self.gradients.reduced.pop(each.value)
        if each.value in self.plan.host_gradients:
            leaf = self.plan.host_gradients[each.value]
            x = host_mean(x, leaf.dtype, self.comm.divisor, leaf.path)
        self.env[each.value] = x

    def _output(self, i: int, atom: Value | Constant) -> Any:
        x = jax.tree.map(jnp.asarray, self.read(atom))
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
    instructions.ReducePrevious: BlockRunner._reduce_previous_layer,
    instructions.Finish: BlockRunner._finish,
    instructions.Store: BlockRunner._store,
}


def _add(x: Array, y: Array) -> Array:
    """Add in the wider of the two dtypes, since each term was reduced in a dtype of its own."""
    dtype = jnp.promote_types(x.dtype, y.dtype)
    return x.astype(dtype) + y.astype(dtype)
