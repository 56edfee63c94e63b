"""Run a planned block again: gather weights before their use, reduce gradients as they are made.

Everything here runs inside the `shard_map`, while it is traced. The plan says what to do; this
module only does it, operation by operation. `weight_buckets` holds the weights, `gradient_buckets`
the gradients, and `loop` runs the loops of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import (
    CommSpec,
    EncodedShards,
    HalfBatchSum,
    ReduceBucket,
    ReduceSpec,
    accumulator_dtype,
    labelled,
    reduce_gradient,
)
from .._plan import BlockPlan, ShardedParam
from .._program import Barrier, Constant, Loop, Operation, Value, movable_ops
from .gathers import Held
from .gradient_buckets import GradientBuckets, Reduced
from .loop import Prologue, loop_prologue, run_loop
from .weight_buckets import InFlight, WeightBuckets


def run_block(
    plan: BlockPlan,
    comm: CommSpec,
    inputs: Sequence[Any],
    held: Mapping[ShardedParam, EncodedShards],
) -> tuple[list[Any], Held]:
    """Run a block.

    Args:
        plan: what to gather and reduce in it.
        comm: over which axes, in which codecs.
        inputs: one for each of the block's inputs; what is passed for a view is ignored.
        held: this device's shard of every weight that the block uses.

    Returns:
        The block's outputs, and what is held in the end. An output that is to be reduced is
        this device's shard of the sum, in `accumulator_dtype`; one that is handed on as a
        view is None.
    """
    runner = BlockRunner(plan, comm, held)
    return runner.run(inputs), runner.weights.held


class BlockRunner:
    """One run of one block."""

    def __init__(
        self,
        plan: BlockPlan,
        comm: CommSpec,
        held: Mapping[ShardedParam, EncodedShards],
        in_flight: InFlight | None = None,
        next_held: Mapping[ShardedParam, EncodedShards] | None = None,
    ):
        self.plan = plan
        self.comm = comm
        self.weights = WeightBuckets(plan, comm, held, in_flight, next_held)
        self.gradients = GradientBuckets(plan, comm)
        self.prologues: dict[int, Prologue] = {}  # of the loops in this block
        self.env: dict[Value, Any] = {}
        self._tied_to: Value | None = None  # what the last gather waited for
        self._constants = {
            op.outputs[0]: op
            for op in plan.block.operations
            if op.name == "broadcast_in_dim" and isinstance(op.inputs[0], Constant)
        }
        self._readers: dict[Value, list[int]] = {}  # the operations on shards
        self._missing: dict[int, int] = {}
        for index in plan.gradients.on_shards:
            inputs = {x for x in plan.block.operations[index].inputs if isinstance(x, Value)}
            self._missing[index] = len(inputs)
            for value in inputs:
                self._readers.setdefault(value, []).append(index)

    def inside(
        self,
        plan: BlockPlan,
        held: Mapping[ShardedParam, EncodedShards],
        in_flight: InFlight | None = None,
        next_held: Mapping[ShardedParam, EncodedShards] | None = None,
    ) -> BlockRunner:
        """A run of the body of a loop of this block."""
        return BlockRunner(plan, self.comm, held, in_flight, next_held)

    def run(self, inputs: Sequence[Any], handed_on: frozenset[int] = frozenset()) -> list[Any]:
        """The outputs; those that are handed on as views, or deferred, are None."""
        block, plan = self.plan.block, self.plan
        for value, x in zip(block.inputs, inputs, strict=True):
            self._write(value, x)
        for index in range(len(block.operations) + 1):
            self._gather(index)
            if index < len(block.operations):
                self._run(index, block.operations[index])
                self.weights.drop(index)
        while self.gradients.in_flight:
            self.gradients.reduce_in_flight()
        self._settle(self.gradients.take_reduced())
        deferred = plan.deferred_values()
        return [
            None if i in handed_on or atom in deferred else self._output(i, atom)
            for i, atom in enumerate(block.outputs)
        ]

    def settle(self, buckets: Mapping[int, ReduceBucket]) -> dict[int, Any]:
        """The deferred outputs, by number, given the reduced buckets of an iteration."""
        for number, bucket in buckets.items():
            self.gradients.finish(number, bucket)
        self._settle(self.gradients.take_reduced())
        deferred = self.plan.deferred_values()
        outputs = enumerate(self.plan.block.outputs)
        return {i: self._output(i, atom) for i, atom in outputs if atom in deferred}

    # Barriers: see [Note: ties] in `schedule`. XLA removes from a barrier what nothing else reads,
    # before or behind it; so a bound array is read from behind the barrier where it can be.

    def tie(self, value: Value | None, arrays: list[Any]) -> list[Any]:
        """`arrays`, but not before `value` exists, nor before what was reduced since the last tie.

        Buckets in flight are reduced over their next axis first.
        """
        if value is None or value not in self.env or not arrays:
            return arrays
        reduced: Reduced = []
        if self._tied_to != value:
            self._tied_to = value
            reduced = self.gradients.take_reduced()
            self.gradients.reduce_in_flight((self.env[value],))
        return self._after((arrays, self.env[value]), reduced)[0]

    def pin(self, value: Value | None, arrays: list[Any]) -> list[Any]:
        """`arrays`, made before anything else reads on what they waited for."""
        if value is None or value not in self.env or not arrays:
            return arrays
        arrays, self.env[value] = lax.optimization_barrier((arrays, self.env[value]))
        return arrays

    def tie_loop(self, carry: list[Any]) -> list[Any]:
        """What a loop starts with, but not before buckets in flight are reduced over an axis more.

        After the first axis they are much smaller, and the loop may take long.
        """
        gradients = self.gradients
        gradients.reduce_in_flight()
        reduced = gradients.take_reduced()
        in_flight = [bucket for *_, bucket in gradients.in_flight]
        carry, sent = self._after((carry, in_flight), reduced)
        pairs = zip(gradients.in_flight, sent, strict=True)
        gradients.in_flight = [(*one[:2], bucket) for one, bucket in pairs]
        gradients.reduce_in_flight()
        return carry

    def _after(self, operands: tuple[Any, Any], reduced: Reduced) -> tuple[Any, Any]:
        """`operands`, but not before gradients are reduced, which are read from here on."""
        operands, arrays = lax.optimization_barrier((operands, [x for _, x in reduced]))
        self._settle([(value, x) for (value, _), x in zip(reduced, arrays, strict=True)])
        return operands

    # Weights.

    def _gather(self, index: int) -> None:
        self.weights.send(index, self.tie, self.pin)
        for number, loop in self.plan.loops.items():
            if loop.issue == index and loop.is_pipelined and loop.continues is None:
                tie = functools.partial(self.tie, loop.tie)
                self.prologues[number] = loop_prologue(self, number, tie)
        self.weights.receive(index)

    def read(self, atom: Value | Constant) -> Any:
        """The array that a value stands for."""
        if isinstance(atom, Constant):
            return atom.value
        view = self.plan.uses.views.get(atom)
        return self.env[atom] if view is None else self.weights.full(view.weight, view.ops)

    # Gradients.

    def _write(self, value: Value, x: Any) -> None:
        if self.gradients.holds(value):
            self.gradients.add(value, x)
        else:
            self._made(value, x)

    def _settle(self, reduced: Reduced) -> None:
        """Continue with gradients that are reduced."""
        for value, x in reduced:
            self._made(value, x)

    def _made(self, value: Value, x: Any) -> None:
        """Note a value, and run the operations on shards that waited for it."""
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
        """An operation above a reduction, on the shards that the reduction gave."""
        op, source = operation.view(), operation.source
        if source is None:  # an addition
            return jax.tree.map(_add, *(self.read(atom) for atom in operation.inputs))
        x = self.read(source)
        if isinstance(op, movable_ops.ConvertDtype):  # the sum keeps its type until the end
            return x
        assert op is not None
        return jax.tree.map(lambda x: movable_ops.apply_on_shard((op,), x, layout, source.shape), x)

    def _zeros(self, value: Value, spec: ReduceSpec) -> Any:
        """The shard of a gradient that is nothing but zeros needs no reduction."""
        shape = list(spec.layout.pad_shape(value.shape))
        for axis in spec.hops:
            if axis in self.comm.axes:
                shape[spec.layout.dim] //= self.comm.sizes[axis]
        zeros = jnp.zeros(shape, accumulator_dtype(value.dtype))
        is_halved = self.comm.halves and self.comm.halves_axis in spec.hops
        return HalfBatchSum(zeros, zeros) if is_halved else zeros

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
            return  # `_made` runs it, when its inputs are reduced
        if isinstance(operation, Loop):
            outputs = run_loop(self, index, operation)
        elif isinstance(operation, Barrier):
            pairs = zip(operation.inputs, operation.outputs, strict=True)
            held = [(given, out) for given, out in pairs if given not in views]
            results = operation.bind([self.read(given) for given, _ in held])
            for (_, out), x in zip(held, results, strict=True):
                self._write(out, x)
            return
        elif operation.outputs and operation.outputs[0] in views:
            return
        elif operation.outputs and operation.outputs[0] in self.plan.zeros:
            value = operation.outputs[0]
            self._made(value, self._zeros(value, self.plan.gradients.reduces[value]))
            return
        else:
            if operation.name.startswith("scatter"):
                self._make_target(operation)
            outputs = operation.bind([self.read(atom) for atom in operation.inputs])
        for value, x in zip(operation.outputs, outputs, strict=True):
            if value not in views:
                self._write(value, x)

    def _make_target(self, operation: Operation) -> None:
        """Make the constant that a scatter starts from where the scatter runs.

        It waits for nothing, so XLA would make it early, and a table's gradient is as large as
        the table.
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


def _add(one: Array, other: Array) -> Array:
    """In the wider of two types."""
    dtype = jnp.promote_types(one.dtype, other.dtype)
    return one.astype(dtype) + other.astype(dtype)
