"""Analysis of the gradients: how far down, towards where it is made, each is reduced.

A gradient is reduced over devices as soon as it exists, so that it is whole for as
short as can be. Reduction is linear, so it commutes with moving elements about, with
zero padding and with addition: `reduce(pad(x) + y) = pad(reduce(x)) + reduce(y)`. It is
moved below such operations where that pays: into the body of a loop that would stack up
whole gradients, below the padding of a slice's gradient to the size of the stack, and
below a widening cast, where 16 bits carry the same values. The operations above it then
run on shards.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp

from .._collectives import ReduceSpec
from .._program import Atom, Block, Loop, Operation, Value, movable_ops
from .._sharding import DimSharding
from .param_uses import BlockUses


@dataclasses.dataclass(frozen=True)
class BlockGradients:
    """Where in a block gradients are reduced."""

    reduces: dict[Value, ReduceSpec]  # reduced as soon as made
    on_shards: dict[int, DimSharding | None]  # operations run on shards; how their input is cut
    loops: dict[int, BlockGradients]  # in the bodies of loops
    at_end: dict[int, ReduceSpec]  # outputs reduced last, because they are also needed whole


_ADDITIONS = ("add", "add_any")


class _Gain(enum.IntEnum):
    NONE = 0  # reduce here
    CHEAPER = 1  # fewer bytes on the wire below
    SMALLER = 2  # below, no whole stack of gradients is ever made


def find_reduces(
    block: Block, uses: BlockUses, reduce_specs: Sequence[ReduceSpec | None]
) -> BlockGradients:
    """Place the reduction of every demanded output.

    Args:
        block: the program, or a loop's body.
        uses: what is a view of a weight, and so never computed.
        reduce_specs: for each output, how it is wanted; None: as it is.
    """
    search = _Search(block, uses)
    at_end = {}
    for i, (out, reduce_spec) in enumerate(zip(block.outputs, reduce_specs, strict=True)):
        if reduce_spec is None:
            continue
        if isinstance(out, Value) and search.only_use(out) and out in search.maker:
            search.place(out, reduce_spec)
        else:
            at_end[i] = reduce_spec
    loops = {index: _body(block, uses, index, wanted) for index, wanted in search.loops.items()}
    return BlockGradients(search.reduces, search.on_shards, loops, at_end)


def _body(
    block: Block, uses: BlockUses, index: int, wanted: dict[int, ReduceSpec]
) -> BlockGradients:
    loop = block.operations[index]
    assert isinstance(loop, Loop)
    reduce_specs = [wanted.get(i) for i in range(len(loop.outputs))]
    return find_reduces(loop.body, uses.loops[index].body, reduce_specs)


class _Search:
    """Follows demanded values from the outputs down to where they are made."""

    def __init__(self, block: Block, uses: BlockUses):
        self.views = uses.views
        self.maker = {
            value: (index, operation)
            for index, operation in enumerate(block.operations)
            for value in operation.outputs
        }
        read = (atom for operation in block.operations for atom in operation.inputs)
        self.num_reads = Counter([*read, *block.outputs])
        self.reduces: dict[Value, ReduceSpec] = {}
        self.on_shards: dict[int, DimSharding | None] = {}
        self.loops: dict[int, dict[int, ReduceSpec]] = {}

    def only_use(self, atom: Atom) -> bool:
        return self.num_reads[atom] == 1 and atom not in self.views

    def place(self, value: Value, reduce_spec: ReduceSpec) -> None:
        """Reduce `value` here, or below, where that gains something."""
        if self._gain(value, reduce_spec.layout) == _Gain.NONE:
            self.reduces[value] = dataclasses.replace(
                reduce_spec, shape=value.shape, dtype=value.dtype
            )
            return
        index, operation = self.maker[value]
        if isinstance(operation, Loop):
            layout = reduce_spec.layout.moved(reduce_spec.layout.dim - 1)
            inside = dataclasses.replace(reduce_spec, name=f"{reduce_spec.name}[i]", layout=layout)
            self.loops.setdefault(index, {})[operation.outputs.index(value)] = inside
            return
        if operation.name in _ADDITIONS:
            terms, additions = self._terms(value)
            self.on_shards.update(dict.fromkeys(additions))
            for term in terms:
                self.place(term, reduce_spec)
            return
        below = _below(operation, reduce_spec.layout)
        assert below is not None
        self.on_shards[index] = below[1]
        self.place(below[0], dataclasses.replace(reduce_spec, layout=below[1]))

    def _terms(self, value: Value) -> tuple[list[Value], list[int]]:
        """What is added up to `value`, through additions of additions; and which those are.

        A weight that is used a thousand times has a chain of a thousand.
        """
        terms: list[Value] = []
        additions: list[int] = []
        waiting = [value]
        while waiting:
            index, operation = self.maker.get(waiting[-1], (-1, None))
            inputs = _addends(operation) if operation else []
            opened = waiting.pop()
            if inputs and (opened is value or self.only_use(opened)):
                additions.append(index)
                waiting += inputs
            else:
                terms.append(opened)
        return terms, additions

    def _gain(self, value: Value, layout: DimSharding) -> _Gain:
        """What is gained by reducing below the operation that makes `value`."""
        if value not in self.maker or not self.only_use(value):
            return _Gain.NONE
        _, operation = self.maker[value]
        if isinstance(operation, Loop):
            position = operation.outputs.index(value)
            stacked = position >= operation.num_carry and layout.dim != 0
            return _Gain.SMALLER if stacked else _Gain.NONE
        if operation.name in _ADDITIONS:
            terms, additions = self._terms(value)
            if not additions or not all(self.only_use(term) for term in terms):
                return _Gain.NONE
            gains = [self._gain(term, layout) for term in terms]
            return max(gains) if max(gains) == _Gain.SMALLER else min(gains)
        below = _below(operation, layout)
        if below is None or not self.only_use(below[0]):
            return _Gain.NONE
        gain = self._gain(*below)
        if _narrows(operation) and gain < _Gain.SMALLER:
            return _Gain.NONE
        return max(gain, _own_gain(operation))


def _own_gain(operation: Operation) -> _Gain:
    op = operation.view()
    if isinstance(op, movable_ops.Pad):
        return _Gain.SMALLER
    source = operation.source
    if isinstance(op, movable_ops.ConvertDtype) and source is not None:
        narrower = source.dtype.itemsize < operation.outputs[0].dtype.itemsize
        return _Gain.CHEAPER if narrower else _Gain.NONE
    return _Gain.NONE


def _narrows(operation: Operation) -> bool:
    op = operation.view()
    return isinstance(op, movable_ops.ConvertDtype) and op.narrows


def _addends(operation: Operation) -> list[Value]:
    """The inputs of an addition of two arrays of one shape; else nothing."""
    if operation.name not in _ADDITIONS:
        return []
    arrays = [atom for atom in operation.inputs if isinstance(atom, Value)]
    alike = len(arrays) == 2 and arrays[0].shape == arrays[1].shape
    return arrays if alike else []


def _below(operation: Operation, layout: DimSharding) -> tuple[Value, DimSharding] | None:
    """The input whose reduction gives that of the output, and how it is cut; or None."""
    op, source = operation.view(), operation.source
    if op is None or source is None or isinstance(op, movable_ops.Slice):
        return None
    if operation.name == "reduce_precision":
        return None
    if isinstance(op, movable_ops.ConvertDtype):
        ends = (source.dtype, operation.outputs[0].dtype)
        if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in ends):
            return None  # rounding to integers does not commute with a sum
    inner = op.back(layout, source.shape)
    return None if inner is None else (source, inner)
