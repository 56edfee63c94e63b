"""The pass: run a planned program again, gathering at use and reducing where produced.

Everything here runs inside the `shard_map`, under tracing. What to do is in the plan;
this module only does it. `_arrivals` gathers units, `_emit_loop` runs loops.
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
    HalvedSum,
    Outbox,
    Parcel,
    Pieces,
    Summand,
    Wire,
    accumulator_dtype,
    advance,
    hop_axes,
    labelled,
    reduce,
    start,
)
from .._plan import BlockPlan, Demand, Gather, Unit, Weight
from .._program import Barrier, Constant, Loop, Operation, Value
from .._program import movable_ops as views
from .gathers import Held, bound, pass_on, receive, write
from .loop import Prefetched, first_layers, run_loop

Sums = list[tuple[Value, Any]]  # gradients, each with its sum over devices


def emit(
    plan: BlockPlan, wire: Wire, inputs: Sequence[Any], held: Mapping[Weight, Pieces]
) -> tuple[list[Any], Held]:
    """Run a block.

    Args:
        plan: what to gather and reduce in it.
        wire: how.
        inputs: one for each of the block's inputs; what is passed for a view is ignored.
        held: what this device has of every weight that the block sees.

    Returns:
        The block's outputs, and what is held in the end. A demanded output is this
        device's shard of the sum over its hops, in `accumulator_dtype`; one that is
        handed on as a view is None.
    """
    emitter = Emitter(plan, wire, held)
    return emitter.run(inputs), emitter.held


class Emitter:
    """One run of one block.

    Attributes:
        held: what is held of each weight; the slices that were kept replace the shards.
        on_way: of each unit, by number, what has arrived after each hop; in a loop, of the
            layers that come next after the first hops, and of this layer after the last.
        upcoming: the same for the next iteration.
        next_held: what is held of the layer that is sent over its first hop now.
        outboxes: late gradients, by number of the unit.
    """

    def __init__(
        self,
        plan: BlockPlan,
        wire: Wire,
        held: Mapping[Weight, Pieces],
        on_way: Mapping[int, list[list[Parcel]]] | None = None,
        next_held: Mapping[Weight, Pieces] | None = None,
    ):
        self.plan = plan
        self.wire = wire
        self.held: Held = dict(held)
        self.next_held: Held = dict(next_held or {})
        self.on_way: dict[int, list[list[Parcel]]] = dict(on_way or {})
        self.prefetched: dict[int, Prefetched] = {}  # of the loops in this block
        self.upcoming: dict[int, list[list[Parcel]]] = {}
        self.outboxes: dict[int, Outbox] = {}
        self.env: dict[Value, Any] = {}
        self._gathered: dict[tuple, tuple[Gather, Any]] = {}
        self._due: list[tuple[int, int, Outbox]] = []  # unit, next hop, what it sends
        self._tied_to: Value | None = None  # what the last gather waited for
        self._unsent: dict[int, dict[Value, Any]] = {}
        self._sums: Sums = []  # reduced since the last gather
        self._sends: dict[int, list[tuple[int, int]]] = {}  # (unit, hop) by operation
        self._needs: dict[int, list[int]] = {}
        for number, unit in enumerate(plan.units):
            self._needs.setdefault(unit.at, []).append(number)
            for hop, issue in enumerate(unit.issues):
                self._sends.setdefault(issue, []).append((number, hop))
        self._constants = {
            op.outputs[0]: op
            for op in plan.block.operations
            if op.name == "broadcast_in_dim" and isinstance(op.inputs[0], Constant)
        }
        self._unit_of = {x: i for i, unit in enumerate(plan.reduces) for x in unit.values}
        self._readers: dict[Value, list[int]] = {}  # the operations on shards
        self._missing: dict[int, int] = {}
        for index in plan.gradients.on_shards:
            inputs = {x for x in plan.block.operations[index].inputs if isinstance(x, Value)}
            self._missing[index] = len(inputs)
            for value in inputs:
                self._readers.setdefault(value, []).append(index)

    def run(self, inputs: Sequence[Any], handed_on: frozenset[int] = frozenset()) -> list[Any]:
        """The outputs; those that are handed on as views, or late, are None."""
        block, plan = self.plan.block, self.plan
        for value, x in zip(block.inputs, inputs, strict=True):
            self._write(value, x)
        for index in range(len(block.operations) + 1):
            self._send(index)
            self._receive(index)
            if index < len(block.operations):
                self._run(index, block.operations[index])
                self._drop(index)
        while self._due:
            self._advance_due()
        self._settle(self._sums)
        late = plan.late_values()
        return [
            None if i in handed_on or atom in late else self._output(i, atom)
            for i, atom in enumerate(block.outputs)
        ]

    def settle(self, outboxes: Mapping[int, Outbox]) -> dict[int, Any]:
        """The late outputs, by number, of what an iteration left, once it is reduced."""
        for number, outbox in outboxes.items():
            self._reduced(number, outbox)
        self._settle(self._sums)
        late = self.plan.late_values()
        outputs = enumerate(self.plan.block.outputs)
        return {i: self._output(i, atom) for i, atom in outputs if atom in late}

    # What waits for what: see [Note: ties] in `_schedule`. XLA takes out of a barrier what nothing
    # else reads, before or behind it; so what is bound is read on from behind it where it can be.

    def tie(self, value: Value | None, arrays: list[Any]) -> list[Any]:
        """The same arrays, but not before a value exists, and what was reduced before the
        last tie. What is due to be reduced is sent on first."""
        if value is None or value not in self.env or not arrays:
            return arrays
        sums: Sums = []
        if self._tied_to != value:
            self._tied_to = value
            sums, self._sums = self._sums, []
            self._advance_due((self.env[value],))
        return self._with_sums((arrays, self.env[value]), sums)[0]

    def pin(self, value: Value | None, arrays: list[Any]) -> list[Any]:
        """The same arrays, made before anything else reads on what they waited for."""
        if value is None or value not in self.env or not arrays:
            return arrays
        arrays, self.env[value] = lax.optimization_barrier((arrays, self.env[value]))
        return arrays

    def tie_loop(self, carry: list[Any]) -> list[Any]:
        """What a loop starts with, but not before gradients have done one more hop: the first
        leaves messages that are much smaller, and the loop may take long."""
        self._advance_due()
        sums, self._sums = self._sums, []
        carry, sent = self._with_sums((carry, [outbox for *_, outbox in self._due]), sums)
        self._due = [(*one[:2], outbox) for one, outbox in zip(self._due, sent, strict=True)]
        self._advance_due()
        return carry

    def _with_sums(self, operands: tuple[Any, Any], sums: Sums) -> tuple[Any, Any]:
        """Have gradients reduced before `operands` exist, and use them as they are then."""
        operands, reduced = lax.optimization_barrier((operands, [x for _, x in sums]))
        self._settle([(value, x) for (value, _), x in zip(sums, reduced, strict=True)])
        return operands

    # Weights.

    def _send(self, index: int) -> None:
        for number, hop in self._sends.get(index, ()):
            unit = self.plan.units[number]
            sent = self.upcoming if unit.ahead else self.on_way
            sent.setdefault(number, []).append(self._send_hop(number, unit, hop))
        for number, loop in self.plan.loops.items():
            if loop.issue == index and loop.is_pipelined and loop.continues is None:
                tie = functools.partial(self.tie, loop.tie)
                self.prefetched[number] = first_layers(self, number, tie)

    def _send_hop(self, number: int, unit: Unit, hop: int) -> list[Parcel]:
        """Send a unit over a hop; in a loop each hop is that of another layer."""
        pin = functools.partial(self.pin, unit.ties[hop])
        if hop:
            parcels = bound(self.on_way[number][hop - 1], pin)
        else:
            held = self.next_held if unit.ahead else self.held
            tie = functools.partial(self.tie, unit.ties[hop])
            parcels = write(unit, held, self.wire, tie, pin)
        return pass_on(unit, parcels, self.wire, self.plan.num_hops - hop)

    def _receive(self, index: int) -> None:
        for number in self._needs.get(index, ()):
            unit = self.plan.units[number]
            arrays = receive(unit, self.on_way[number][-1], self.held, self.wire)
            for one, x in zip(unit.gathers, arrays, strict=True):
                self._gathered[one.weight, one.ops] = one, x

    def _drop(self, index: int) -> None:
        """Forget what is not needed later; a later unit may have brought it again already."""
        over = [key for key, (one, _) in self._gathered.items() if one.until == index]
        for key in over:
            del self._gathered[key]

    def read(self, atom: Value | Constant) -> Any:
        """What a value is."""
        if isinstance(atom, Constant):
            return atom.value
        view = self.plan.uses.views.get(atom)
        if view is None:
            return self.env[atom]
        weight = view.weight
        before, after = views.before_gather(view.ops, weight.layout, weight.shape)
        _, x = self._gathered[weight, before]
        for op in after:
            x = op.apply(x)
        return x

    # Gradients.

    def _write(self, value: Value, x: Any) -> None:
        number = self._unit_of.get(value)
        if number is None:
            self._made(value, x)
            return
        unit, unsent = self.plan.reduces[number], self._unsent.setdefault(number, {})
        unsent[value] = x
        if len(unsent) < len(unit.values):
            return
        values = self._unsent.pop(number)
        names = [self.plan.gradients.reduces[value].name for value in unit.values]
        with labelled("gradients", *names):
            outbox = start([values[x] for x in unit.values], self._summands(number), self.wire)
        if unit.late:
            self.outboxes[number] = outbox
        elif self.plan.overlaps:
            self._due.append((number, 0, outbox))
        else:
            self._reduced(number, self.reduce_rest(number, 0, outbox))

    def _advance(self, number: int, hop: int, outbox: Outbox) -> None:
        """Do one hop of what is due."""
        outbox, hop = self.reduce_hop(number, hop, outbox), hop + 1
        if hop == self.num_reduce_hops(number):
            self._reduced(number, outbox)
        else:
            self._due.append((number, hop, outbox))

    def _advance_due(self, ties: tuple[Any, ...] = ()) -> None:
        due, self._due = self._due, []
        for number, hop, outbox in due:
            if hop and ties:  # the first is sent as soon as it is written
                outbox, _ = lax.optimization_barrier((outbox, ties))
            self._advance(number, hop, outbox)

    def num_reduce_hops(self, number: int) -> int:
        """How many hops a unit's gradients take."""
        return len(hop_axes(self._summands(number), self.wire))

    def reduce_hop(self, number: int, hop: int, outbox: Outbox) -> Outbox:
        """Send a unit's gradients over one hop."""
        demands, values = self.plan.gradients.reduces, self.plan.reduces[number].values
        with labelled("gradients", *(demands[x].name for x in values)):
            return advance(outbox, self._summands(number), hop, self.wire)

    def reduce_rest(self, number: int, hop: int, outbox: Outbox) -> Outbox:
        """Send a unit's gradients over `hop` and all that follow."""
        for i in range(hop, self.num_reduce_hops(number)):
            outbox = self.reduce_hop(number, i, outbox)
        return outbox

    def _reduced(self, number: int, outbox: Outbox) -> None:
        values = self.plan.reduces[number].values
        self._sums += [(value, outbox.rest[i]) for i, value in enumerate(values)]

    def _settle(self, sums: Sums) -> None:
        """Make reduced gradients known."""
        for value, x in sums:
            self._made(value, x)

    def _summands(self, number: int) -> list[Summand]:
        demands = self.plan.gradients.reduces
        return [
            Summand(value.shape, value.dtype, demands[value].layout, demands[value].hops)
            for value in self.plan.reduces[number].values
        ]

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
        if isinstance(op, views.Cast):  # the sum keeps its type until the end
            return x
        assert op is not None
        return jax.tree.map(lambda x: views.apply_on_shard((op,), x, layout, source.shape), x)

    def _zeros(self, value: Value, demand: Demand) -> Any:
        """The shard of a gradient that is nothing but zeros needs no reduction."""
        shape = list(demand.layout.pad_shape(value.shape))
        for axis in demand.hops:
            if axis in self.wire.axes:
                shape[demand.layout.dim] //= self.wire.sizes[axis]
        zeros = jnp.zeros(shape, accumulator_dtype(value.dtype))
        is_halved = self.wire.halves and self.wire.halves_axis in demand.hops
        return HalvedSum(zeros, zeros) if is_halved else zeros

    def _output(self, i: int, atom: Value | Constant) -> Any:
        x = jax.tree.map(jnp.asarray, self.read(atom))
        demand = self.plan.gradients.at_end.get(i)
        if demand is None:
            return x
        with labelled("gradients", demand.name):
            return reduce(x, demand.layout, self.wire, demand.hops)

    # Operations.

    def _run(self, index: int, operation: Operation) -> None:
        known = self.plan.uses.views
        if index in self.plan.gradients.on_shards:
            return  # when what it reads is there
        if isinstance(operation, Loop):
            outputs = run_loop(self, index, operation)
        elif isinstance(operation, Barrier):
            pairs = zip(operation.inputs, operation.outputs, strict=True)
            held = [(given, out) for given, out in pairs if given not in known]
            results = operation.bind([self.read(given) for given, _ in held])
            for (_, out), x in zip(held, results, strict=True):
                self._write(out, x)
            return
        elif operation.outputs and operation.outputs[0] in known:
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
            if value not in known:
                self._write(value, x)

    def _make_target(self, operation: Operation) -> None:
        """Make what is scattered into, if it is one constant, where that is done: with nothing to
        wait for, XLA would make it early, and a table's gradient is as large as the table."""
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
