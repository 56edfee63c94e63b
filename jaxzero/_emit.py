"""The pass: run a planned program again, gathering at use and reducing where produced.

Everything here runs inside the `shard_map`, under tracing. What to do is in the plan;
this module only does it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _views as views
from ._codecs import Cast
from ._collectives import Wire, accumulator_dtype, gather, unpad
from ._gradients import Demand
from ._messages import unpack
from ._partition import Layout
from ._pieces import Pieces
from ._program import Barrier, Constant, Loop, Operation, Value
from ._reductions import reduce
from ._schedule import BlockPlan, Gather
from ._traffic import labelled, repeated
from ._uses import Stack, View, Weight

Held = Mapping[Weight, Pieces]


def emit(plan: BlockPlan, wire: Wire, inputs: Sequence[Any], held: Held) -> list[Any]:
    """Run a block.

    Args:
        plan: what to gather and reduce in it.
        wire: how.
        inputs: one for each of the block's inputs; what is passed for a view is ignored.
        held: what this device has of every weight that the block sees.

    Returns:
        The block's outputs. A demanded one is this device's shard of the sum over
        its hops, in `accumulator_dtype`; one that is handed on as a view is None.
    """
    return _Emitter(plan, wire, held).run(inputs)


class _Emitter:
    def __init__(self, plan: BlockPlan, wire: Wire, held: Held):
        self.plan = plan
        self.wire = wire
        self.held = held
        self.env: dict[Value, Any] = {}
        self.gathered: dict[tuple, Any] = {}
        self.reduced_before: list[Any] = []  # before the last tied gather
        self.reduced_since: list[Any] = []
        self.starts: dict[int, list[Gather]] = {}
        self.ends: dict[int, list[Gather]] = {}
        for planned in plan.gathers:
            self.starts.setdefault(planned.at, []).append(planned)
            self.ends.setdefault(planned.until, []).append(planned)

    def run(self, inputs: Sequence[Any], handed_on: frozenset[int] = frozenset()) -> list[Any]:
        block, end = self.plan.block, len(self.plan.block.operations)
        for value, x in zip(block.inputs, inputs, strict=True):
            self._write(value, x)
        for index, operation in enumerate(block.operations):
            self._gather(index)
            self._run(index, operation)
            self._drop(index)
        self._gather(end)
        return [
            None if i in handed_on else self._output(i, atom)
            for i, atom in enumerate(block.outputs)
        ]

    def _gather(self, index: int) -> None:
        for planned in self.starts.get(index, ()):
            weight, pieces = planned.weight, self.held[planned.weight]
            with labelled("weights", weight.name):
                if planned.tie is not None and planned.tie in self.env:
                    ties = (self.env[planned.tie], *self.reduced_before)
                    data, _ = lax.optimization_barrier((pieces.data, ties))
                    pieces = dataclasses.replace(pieces, data=data)
                    self.reduced_before, self.reduced_since = self.reduced_since, []
                self.gathered[weight, planned.ops] = _whole(pieces, planned.ops, weight, self.wire)

    def _drop(self, index: int) -> None:
        for planned in self.ends.get(index, ()):
            del self.gathered[planned.weight, planned.ops]

    def _read(self, atom: Value | Constant) -> Any:
        if isinstance(atom, Constant):
            return atom.value
        view = self.plan.uses.views.get(atom)
        if view is None:
            return self.env[atom]
        weight = view.weight
        before, after = views.before_gather(view.ops, weight.layout, weight.shape)
        x = self.gathered[weight, before]
        for op in after:
            x = op.apply(x)
        return x

    def _write(self, value: Value, x: Any) -> None:
        demand = self.plan.gradients.reduces.get(value)
        if demand is not None:
            x = self._reduce(x, demand)
            self.reduced_since.append(x)
        self.env[value] = x

    def _reduce(self, x: Any, demand: Demand) -> Any:
        with labelled("gradients", demand.name):
            return reduce(x, demand.layout, self.wire, demand.hops)

    def _output(self, i: int, atom: Value | Constant) -> Any:
        x = jnp.asarray(self._read(atom))
        demand = self.plan.gradients.at_end.get(i)
        return x if demand is None else self._reduce(x, demand)

    def _run(self, index: int, operation: Operation) -> None:
        known = self.plan.uses.views
        if isinstance(operation, Loop):
            outputs = self._loop(index, operation)
        elif index in self.plan.gradients.on_shards:
            outputs = [self._on_shards(operation, self.plan.gradients.on_shards[index])]
        elif isinstance(operation, Barrier):
            pairs = zip(operation.inputs, operation.outputs, strict=True)
            held = [(given, out) for given, out in pairs if given not in known]
            results = operation.bind([self._read(given) for given, _ in held])
            for (_, out), x in zip(held, results, strict=True):
                self._write(out, x)
            return
        elif operation.outputs and operation.outputs[0] in known:
            return
        elif zeros := self._zeros(operation):
            self.env[operation.outputs[0]] = zeros[0]
            return
        else:
            outputs = operation.bind([self._read(atom) for atom in operation.inputs])
        for value, x in zip(operation.outputs, outputs, strict=True):
            if value not in known:
                self._write(value, x)

    def _zeros(self, operation: Operation) -> list[Any]:
        """The shard of a gradient that is nothing but zeros needs no reduction."""
        if operation.name != "broadcast_in_dim":
            return []
        out, source = operation.outputs[0], operation.inputs[0]
        demand = self.plan.gradients.reduces.get(out)
        if demand is None or not (isinstance(source, Constant) and source.is_zero):
            return []
        shape = list(demand.layout.pad_shape(out.shape))
        for axis in demand.hops:
            if axis in self.wire.axes:
                shape[demand.layout.dim] //= self.wire.sizes[axis]
        return [jnp.zeros(shape, accumulator_dtype(out.dtype))]

    def _on_shards(self, operation: Operation, layout: Any) -> Any:
        """An operation above a reduction, on the shards that the reduction gave."""
        op, source = operation.view(), operation.source
        if source is None:  # an addition
            one, other = (self._read(atom) for atom in operation.inputs)
            dtype = jnp.promote_types(one.dtype, other.dtype)
            return one.astype(dtype) + other.astype(dtype)
        x = self._read(source)
        if isinstance(op, views.Cast):  # the sum keeps its type until the end
            return x
        assert op is not None
        return views.apply_on_shard((op,), x, layout, source.shape)

    def _loop(self, index: int, loop: Loop) -> list[Any]:
        plan = self.plan.loops[index]
        uses = self.plan.uses.loops[index]
        first = loop.num_constants + loop.num_carry
        layers = plan.uses.views
        inputs = [
            None if i >= first and inside in layers else self._read(outside)
            for i, (outside, inside) in enumerate(zip(loop.inputs, loop.body.inputs, strict=True))
        ]
        constants, carry, stacks = (
            inputs[: loop.num_constants],
            inputs[loop.num_constants : first],
            inputs[first:],
        )

        held = [self._stack(stack) for stack in uses.stacks]

        def body(carry, slices):
            stacks, data = slices
            layers = [pieces.layer(x) for pieces, x in zip(held, data, strict=True)]
            named = dict(zip((stack.layer for stack in uses.stacks), layers, strict=True))
            outputs = _Emitter(plan, self.wire, named).run(
                [*constants, *carry, *stacks], uses.handed_on
            )
            return outputs[: loop.num_carry], outputs[loop.num_carry :]

        traced, note = repeated(body, loop.length)
        data = [pieces.data for pieces in held]
        carry, stacked = loop.scan(traced, carry, (stacks, data))
        note()
        return [*carry, *stacked]

    def _stack(self, stack: Stack) -> Pieces:
        """What a loop scans of a stack, with the operations before it done."""
        view = stack.view
        pieces = self.held[view.weight]
        if pieces.codec is not None and pieces.lead and not view.ops:
            return pieces
        return _on_shard(pieces, view.ops, view.weight)[0]


def _whole(pieces: Pieces, ops: tuple[views.Op, ...], weight: Weight, wire: Wire) -> jax.Array:
    """Gather a weight, with `ops` done to it.

    What will be quantised is quantised as it is stored, and cast to the type of its use when
    it is decoded; of the operations only slices are worth doing first.
    """
    slices, rest = views.up_to_last_slice(ops)
    size = math.prod(View(weight, slices).shape)
    codecs = [wire.weight_codec(axis, size, weight.dtype) for axis in wire.gather_axes]
    after: tuple[views.Op, ...] = ()
    if pieces.codec is not None or any(codec and not isinstance(codec, Cast) for codec in codecs):
        ops, after = slices, rest
    if ops:
        pieces, layout = _on_shard(pieces, ops, weight)
    else:
        layout = weight.layout
    (full,) = unpack(gather([pieces], wire.gather_axes, [size], wire))
    first = after[0] if after else None
    x = unpad(full.join(first.dtype if isinstance(first, views.Cast) else None), layout)
    for op in after:
        x = op.apply(x)
    return x


def _on_shard(pieces: Pieces, ops: tuple[views.Op, ...], weight: Weight) -> tuple[Pieces, Layout]:
    """Do `ops` to this device's piece of a weight."""
    pushed = views.push(ops, weight.layout, weight.shape)
    assert pushed is not None
    x = views.apply_on_shard(ops, pieces.join(), weight.layout, weight.shape)
    return Pieces.plain(x, pushed[0].dim), pushed[0]
