"""Run a planned block: gather weights before their use, reduce gradients as they are made.

A block is a traced program or a loop body. Everything here runs while JAX traces the `shard_map`:
the operations of the block are bound again, one by one, with the collectives that the plan puts
between them. `weight_buckets` gathers weights, `gradient_buckets` reduces gradients, `loop` runs
the loops of a block.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
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
from .._plan import BlockPlan, ShardedParam
from .._program import Barrier, Constant, Loop, Operation, Value, movable_ops
from .gathers import Bind, GatherSources
from .gradient_buckets import GradientBuckets, Reduced
from .loop import loop_prologue, run_loop
from .loop_layers import Prologue
from .mean_gradients import host_mean
from .row_segments import RowSegments
from .row_versions import RowVersions
from .ties import tied
from .update_in_loop import LeafUpdate
from .weight_buckets import WeightBuckets


def run_block(
    plan: BlockPlan,
    comm: CommSpec,
    inputs: Sequence[Any],
    sources: Mapping[ShardedParam, EncodedShards],
    updates: Mapping[int, LeafUpdate],
    versions: RowVersions | None = None,
) -> tuple[list[Any], GatherSources, dict[int, list[Array]]]:
    """Run a block.

    Args:
        plan: the block, with its gathers and reductions.
        comm: axes and codecs of the collectives.
        inputs: an array for each input of the block; those for views of weights are ignored.
        sources: for each weight that the block uses, the shard or node slice to gather it from.
        updates: of the leaves that the loops of the block may update, by index of the leaf.
        versions: of the program, if nodes have different numbers of rows.

    Returns:
        The block's outputs; the gather sources after the run, in which node slices that the
        program kept have replaced shards; and the new stacks of each updated leaf, as in
        `LeafUpdate.stacks`. An output with a reduction is this device's shard of the sum, in
        `accumulator_dtype`; that of an updated leaf is None.
    """
    runner = BlockRunner(WeightBuckets(plan, comm, sources), updates, versions)
    return runner.run(inputs), runner.weights.sources, runner.updated


class BlockRunner:
    """One run of a block; `weights` has its plan and gathers its weights."""

    def __init__(
        self,
        weights: WeightBuckets,
        updates: Mapping[int, LeafUpdate],
        versions: RowVersions | None,
    ):
        plan = weights.plan
        self.plan = plan
        self.comm = weights.comm
        self.weights = weights
        self.gradients = GradientBuckets(plan, weights.comm)
        self.updates = updates
        self.versions = versions
        self.segments = None
        if versions is not None:
            self.segments = RowSegments(plan, versions, self._after_gather)
        self.updated: dict[int, list[Array]] = {}  # new stacks of leaves that a loop has updated
        self.prologues: dict[int, Prologue] = {}  # of the loops in this block
        self.env: dict[Value, Any] = {}  # the array of every value that is not a view of a weight
        self._tied_to: Value | None = None  # the value that the last gather waited for
        self._leaving: list[Value] = []  # gradients on their way to host memory
        self._constants = {
            op.outputs[0]: op
            for op in plan.block.operations
            if op.name == "broadcast_in_dim" and isinstance(op.inputs[0], Constant)
        }
        # Operations that run on reduced shards, by the values that they read, and for each how
        # many of those values are not reduced yet. They run when the last one arrives, which is
        # later than their place in the program.
        self._readers: dict[Value, list[int]] = {}
        self._missing: dict[int, int] = {}
        for index in plan.gradients.on_shards:
            inputs = {x for x in plan.block.operations[index].inputs if isinstance(x, Value)}
            self._missing[index] = len(inputs)
            for value in inputs:
                self._readers.setdefault(value, []).append(index)

    def inside(self, weights: WeightBuckets) -> BlockRunner:
        """Make a runner for the body of a loop in this block, whose plan `weights` has."""
        return BlockRunner(weights, {}, self.versions)

    def run(
        self,
        inputs: Sequence[Any],
        view_outputs: frozenset[int] = frozenset(),
        reduce_early: Callable[[Bind], None] | None = None,
    ) -> list[Any]:
        """Run the block and return its outputs.

        Outputs in `view_outputs` (views of weights, which the caller reads from shards), and those
        that are deferred to the next iteration of a loop, are None.

        Args:
            inputs: an array for each input of the block.
            view_outputs: indices of outputs.
            reduce_early: reduces gradients of the last iteration over their first axis, and passes
                them through a barrier; it is called where the plan says so. None: those in flight.
        """
        block, plan = self.plan.block, self.plan
        reduce_early = reduce_early or self.gradients.reduce_first_axis
        for value, x in zip(block.inputs, inputs, strict=True):
            self._write(value, x)
        for index in range(len(block.operations) + 1):
            with self._region(index):
                if self.segments is not None:
                    for value, x in self.segments.end(index):
                        self._write(value, x)
                if index in plan.reduce_early:
                    reduce_early(functools.partial(self.pin, plan.reduce_early[index]))
                self._gather(index)
                if plan.loss_before and index == plan.loss_before[0]:
                    self._finish_loss(plan.loss_before[1])
                if index < len(block.operations):
                    self._run(index, block.operations[index])
                    self.weights.drop(index)
        self.gradients.reduce_rest_in_flight()
        with self._region(len(block.operations)):
            self._write_reduced(self.gradients.take_reduced())
        deferred = plan.deferred_values()
        return [
            None if i in view_outputs or atom in deferred else self._output(i, atom)
            for i, atom in enumerate(block.outputs)
        ]

    def _region(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Record copies from and to host memory as those of forward or backward."""
        if self.plan.last_forward is None:
            return contextlib.nullcontext()
        return in_region("forward" if index <= self.plan.last_forward else "backward")

    def deferred_outputs(self, buckets: Mapping[int, ReduceBucket]) -> dict[int, Any]:
        """Compute the deferred outputs of one iteration, by index of the output.

        Args:
            buckets: the fully reduced buckets of that iteration, by index of the reduce group.
        """
        for number, bucket in buckets.items():
            self.gradients.finish(number, bucket)
        self._write_reduced(self.gradients.take_reduced())
        deferred = self.plan.deferred_values()
        outputs = enumerate(self.plan.block.outputs)
        return {i: self._output(i, atom) for i, atom in outputs if atom in deferred}

    # Barriers: see [Note: ties] in `_plan.ties`.

    def tie(self, value: Value | None, arrays: list[Any]) -> list[Any]:
        """Return `arrays`, available only once `value` and recently reduced gradients are.

        These are the gradients reduced since the last tie to another value. At the first tie to
        `value`, every bucket in flight is also reduced over its next axis.
        """
        if value is None or value not in self.env or not arrays:
            return arrays
        reduced: Reduced = []
        if self._tied_to != value:
            self._tied_to = value
            reduced = self.gradients.take_reduced()
            self.gradients.reduce_in_flight((self.env[value],))
        return self._after(tied(arrays, self.env[value])[0], reduced)

    def tie_to(self, value: Value | None, arrays: list[Any]) -> list[Any]:
        """Return `arrays`, available only once `value` is."""
        if value is None or value not in self.env or not arrays:
            return arrays
        return tied(arrays, self.env[value])[0]

    def pin(self, value: Value | None, arrays: list[Any]) -> list[Any]:
        """Force `arrays` (encoded messages) to be computed before the next reader of `value`."""
        if value is None or value not in self.env or not arrays:
            return arrays
        arrays, self.env[value] = tied(arrays, self.env[value])
        return arrays

    def _finish_loss(self, value: Value) -> None:
        """Compute the loss before the first reader of `value`."""
        loss = self.plan.block.outputs[0]
        if isinstance(loss, Value) and loss in self.env:
            (self.env[loss],) = self.pin(value, [self.env[loss]])

    def tie_loop(self, carry: list[Any]) -> list[Any]:
        """Return a loop's initial carry, available only once buckets are reduced one axis further.

        A bucket is much smaller after its first axis. Without the barrier, XLA may keep the larger
        buckets until the loop, which may take long, has ended.
        """
        gradients = self.gradients
        gradients.reduce_in_flight()
        reduced = gradients.take_reduced()
        in_flight = [bucket for *_, bucket in gradients.in_flight]
        carry, sent = self._after((carry, in_flight), reduced)
        pairs = zip(gradients.in_flight, sent, strict=True)
        gradients.in_flight = [(number, done, bucket) for (number, done, _), bucket in pairs]
        gradients.reduce_in_flight()
        return carry

    def _after(self, operands: Any, reduced: Reduced) -> Any:
        """Return `operands`, available only once the gradients in `reduced` are.

        Gradients of the last such call have then arrived in host memory; otherwise XLA copies all
        of them at the end of the step.
        """
        leaving, self._leaving = self._leaving, []
        arrays = [x for _, x in reduced], [self.env[value] for value in leaving]
        operands, (arrays, copies) = lax.optimization_barrier((operands, arrays))
        self.env.update(zip(leaving, copies, strict=True))
        self._write_reduced([(value, x) for (value, _), x in zip(reduced, arrays, strict=True)])
        return operands

    # Weights.

    def _gather(self, index: int) -> None:
        self.weights.fetch(index, self.tie)
        self.weights.send(index, self.tie, self.pin)
        for number, loop in self.plan.loops.items():
            if loop.issue == index and loop.is_pipelined and loop.continues is None:
                tie = functools.partial(self.tie, loop.tie)
                self.prologues[number] = loop_prologue(self, number, tie)
        self.weights.receive(index)

    def read(self, atom: Value | Constant) -> Any:
        """The array of a value. For a view: the full weight, with the view's operations applied."""
        if self.segments is not None and self.segments.is_made_here(atom):
            return self.segments.array(atom, self._gathered)
        if isinstance(atom, Constant):
            return atom.value
        view = self.plan.uses.views.get(atom)
        return self.env[atom] if view is None else self.weights.full(view.weight, view.ops)

    def _gathered(self, value: Value) -> Any:
        """The array of a value. For a view: the full weight as it was gathered."""
        view = self.plan.uses.views.get(value)
        return self.env[value] if view is None else self.weights.gathered(view.weight, view.ops)[0]

    def _after_gather(self, value: Value) -> tuple[movable_ops.Op, ...]:
        weight, ops = self.plan.uses.views[value].weight, self.plan.uses.views[value].ops
        return movable_ops.before_gather(ops, weight.layout, weight.shape)[1]

    # Gradients.

    def _write(self, value: Value, x: Any) -> None:
        if self.gradients.holds(value):
            self.gradients.add(value, x)
        else:
            self._store(value, x)

    def _write_reduced(self, reduced: Reduced) -> None:
        """Store reduced gradients, and run the operations that waited for them."""
        for value, x in reduced:
            if value in self.plan.host_gradients:
                leaf = self.plan.host_gradients[value]
                x = host_mean(x, leaf.dtype, self.comm.divisor, leaf.path)
                self._leaving.append(value)
            self._store(value, x)

    def _store(self, value: Value, x: Any) -> None:
        """Store a value, and run each operation on shards that was waiting only for this input."""
        waiting = [(value, x)]
        while waiting:
            value, x = waiting.pop()
            self.env[value] = x
            for index in self._readers.get(value, ()):
                self._missing[index] -= 1
                if not self._missing[index]:
                    operation = self.plan.block.operations[index]
                    layout = self.plan.gradients.on_shards[index]
                    waiting.append((operation.outputs[0], self._on_shards(operation, layout)))

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

    def _output(self, i: int, atom: Value | Constant) -> Any:
        x = jax.tree.map(jnp.asarray, self.read(atom))
        spec = self.plan.gradients.at_end.get(i)
        if spec is None:
            return x
        with labelled("gradients", spec.name):
            return reduce_gradient(x, spec, self.comm)

    # Operations.

    def _run(self, index: int, operation: Operation) -> None:
        views = self.plan.uses.views
        if index in self.plan.gradients.on_shards:
            return  # `_store` runs it once its inputs are reduced
        if self.segments is not None and self.segments.takes(index):
            self.segments.add(index, self._gathered)
            return
        if isinstance(operation, Loop):
            with in_loop(index):
                outputs = run_loop(self, index)
        elif isinstance(operation, Barrier):
            pairs = zip(operation.inputs, operation.outputs, strict=True)
            # Views of weights have no array here; the barrier is bound without them.
            passed = [(given, out) for given, out in pairs if given not in views]
            results = operation.bind([self.read(given) for given, _ in passed])
            for (_, out), x in zip(passed, results, strict=True):
                self._write(out, x)
            return
        elif operation.outputs and operation.outputs[0] in views:
            return
        elif operation.outputs and operation.outputs[0] in self.plan.zeros:
            value = operation.outputs[0]
            spec = self.plan.gradients.reduces[value]
            self._store(value, self.gradients.zeros(value, spec))
            return
        else:
            if operation.name.startswith("scatter"):
                self._make_target(operation)
            inputs = [self.read(atom) for atom in operation.inputs]
            outputs = operation.bind(inputs)
            if operation.name == "device_put":
                note_moves(inputs, outputs)
        for value, x in zip(operation.outputs, outputs, strict=True):
            if value not in views:
                self._write(value, x)

    def _make_target(self, operation: Operation) -> None:
        """Delay the constant that a scatter adds to, until just before the scatter runs.

        The gradient of an embedding starts from zeros as large as the table. They depend on
        nothing, so without a barrier XLA makes them early and holds them until the scatter.
        """
        target, *_, scattered = operation.inputs
        if target not in self._constants or scattered not in self.env:
            return
        assert isinstance(target, Value) and isinstance(scattered, Value)
        maker = self._constants[target]
        constant = jnp.asarray(self.read(maker.inputs[0]), target.dtype)
        operands = (constant, self.env[scattered])
        constant, self.env[scattered] = lax.optimization_barrier(operands)
        self.env[target] = maker.bind([constant])[0]


def _add(x: Array, y: Array) -> Array:
    """Add in the wider of the two dtypes, since each term was reduced in a dtype of its own."""
    dtype = jnp.promote_types(x.dtype, y.dtype)
    return x.astype(dtype) + y.astype(dtype)
