"""Find where each gradient is reduced: as close to the operation that makes it as pays off.

A full gradient should exist as briefly as possible. A reduction over devices is linear, so it
commutes with operations that move elements, with zero padding and with addition:

    reduce(pad(x) + y) = pad(reduce(x)) + reduce(y).

The search starts at the outputs and moves each reduction back over such operations where that saves
memory or bytes: into the body of a loop, which otherwise stacks full gradients; before the padding
of a slice's gradient to the size of the stack; and before a widening cast, where 16 bits carry the
same values. The operations that a reduction was moved over then run on shards.

The gradient of a loop's constant is a sum that the loop carries. Where the sums of a loop take too
much memory (`held_by_loops`), each iteration reduces its terms, and the loop carries a sum of
shards. A later loop may go on adding to the sum of an earlier loop.

Legend: a reduction `below` an operation is done on its inputs, one `above` it on its output.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from .._collectives import ReduceSpec
from .._program import (
    ADDITIONS,
    Atom,
    Block,
    CarriedSum,
    Loop,
    Operation,
    Value,
    addends,
    carried_sums,
    is_zero,
    movable_ops,
)
from .._sharding import DimSharding
from .held_by_loops import is_better_inside
from .param_uses import BlockUses


@dataclasses.dataclass(frozen=True)
class BlockGradients:
    """The places where a block reduces gradients.

    The integers are indices: of outputs of the block in `at_end`, of its operations elsewhere.
    """

    reduces: dict[Value, ReduceSpec]  # values reduced as soon as they are made
    on_shards: dict[int, DimSharding | None]  # operations that run on shards: their input's layout
    loops: dict[int, BlockGradients]  # reductions in the bodies of loops
    at_end: dict[int, ReduceSpec]  # outputs reduced last, because something reads them in full
    # In a loop's body, the carried sums that are sums of shards, by input of the body.
    sums: dict[Value, ReduceSpec] = dataclasses.field(default_factory=dict)


class _Gain(enum.IntEnum):
    """The gain of reducing an operation's input instead of its output; larger values gain more."""

    NONE = 0  # nothing: reduce above it
    CHEAPER = 1  # bytes: the input is narrower
    SMALLER = 2  # memory: no stack or sum of full gradients is made


def find_reduces(
    block: Block,
    uses: BlockUses,
    reduce_specs: Sequence[ReduceSpec | None],
    loop_constant_bytes: int | None = None,
    sums: Mapping[int, CarriedSum] | None = None,
) -> BlockGradients:
    """Choose where the gradient in each output is reduced: as early as that saves memory or bytes.

    Args:
        block: the program, or a loop's body.
        uses: the views of weights in the block, which are never computed.
        reduce_specs: for each output its reduction; None if it is not reduced.
        loop_constant_bytes: see `CommSchedule`.
        sums: in a loop's body, the outputs that are sums of reduced terms, by index.
    """
    search = _Search(block, uses, loop_constant_bytes)
    at_end = {}
    for i, (out, reduce_spec) in enumerate(zip(block.outputs, reduce_specs, strict=True)):
        if reduce_spec is None:
            continue
        if sums and i in sums:
            search.place_sum(sums[i], reduce_spec)
        elif isinstance(out, Value) and search.only_use(out) and out in search.maker:
            search.place(out, reduce_spec)
        else:
            at_end[i] = reduce_spec
    loops = {}
    for index, specs in search.loops.items():
        loop, used = block.operations[index], uses.loops[index].body
        assert isinstance(loop, Loop)
        inside = [specs.get(i) for i in range(len(loop.outputs))]
        sums = search.sums(index)
        loops[index] = find_reduces(loop.body, used, inside, loop_constant_bytes, sums)
    return BlockGradients(search.reduces, search.on_shards, loops, at_end, search.shard_sums)


class _Search:
    """Follow reduced values from the outputs of a block to the operations that make them."""

    def __init__(self, block: Block, uses: BlockUses, loop_constant_bytes: int | None):
        self.block = block
        self.operations = block.operations
        self.views = uses.views
        self.loop_constant_bytes = loop_constant_bytes
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
        self.shard_sums: dict[Value, ReduceSpec] = {}
        self._sums: dict[int, dict[int, CarriedSum]] = {}  # by loop

    def only_use(self, atom: Atom) -> bool:
        """Return whether a value is read only once, so that nothing else needs it in full."""
        return self.num_reads[atom] == 1 and atom not in self.views

    def place(self, value: Value, reduce_spec: ReduceSpec) -> None:
        """Reduce `value` where it is made, or move its reduction to inputs of that operation."""
        if self._gain(value, reduce_spec.layout) == _Gain.NONE:
            self.reduces[value] = dataclasses.replace(
                reduce_spec, shape=value.shape, dtype=value.dtype
            )
            return
        index, operation = self.maker[value]
        if isinstance(operation, Loop):
            position, inside = operation.outputs.index(value), reduce_spec
            if position >= operation.num_carry:
                layout = reduce_spec.layout.moved(reduce_spec.layout.dim - 1)
                name = f"{reduce_spec.name}[i]"
                inside = dataclasses.replace(reduce_spec, name=name, layout=layout)
            else:
                start = operation.inputs[operation.num_constants + position]
                if isinstance(start, Value) and not self._is_zero(start):
                    self.place(start, reduce_spec)
            self.loops.setdefault(index, {})[position] = inside
            return
        if operation.name in ADDITIONS:
            terms, additions = self._terms(value)
            self.on_shards.update(dict.fromkeys(additions))
            for term in terms:
                self.place(term, reduce_spec)
            return
        below = _below(operation, reduce_spec.layout)
        assert below is not None
        self.on_shards[index] = below[1]
        self.place(below[0], dataclasses.replace(reduce_spec, layout=below[1]))

    def place_sum(self, carried: CarriedSum, reduce_spec: ReduceSpec) -> None:
        """Reduce the terms of a loop's carried sum, so that the loop carries a sum of shards."""
        self.on_shards.update(dict.fromkeys(carried.additions))
        self.shard_sums[carried.before] = reduce_spec
        for term in carried.terms:
            self.place(term, reduce_spec)

    def sums(self, index: int) -> dict[int, CarriedSum]:
        """Return the carried sums of loop `index` whose terms are reduced, by index of output."""
        if index not in self._sums:
            loop = self.operations[index]
            assert isinstance(loop, Loop)
            sums = carried_sums(loop, self._starts_sum)
            arrays = [x for x in sums.values() if x.before.is_array]
            size = sum(x.before.num_bytes for x in arrays)
            at_once = max((_most_at_once(loop.body, x) for x in arrays), default=0)
            is_inside = is_better_inside(loop, size, at_once, self.loop_constant_bytes)
            self._sums[index] = sums if is_inside else {}
        return self._sums[index]

    def _starts_sum(self, atom: Atom) -> bool:
        """Return whether a sum of shards can start from `atom`: zero, or another sum of shards."""
        if self._is_zero(atom):
            return True
        index, operation = (
            self.maker.get(atom, (-1, None)) if isinstance(atom, Value) else (-1, None)
        )
        if not isinstance(operation, Loop) or not self.only_use(atom):
            return False
        return operation.outputs.index(atom) in self.sums(index)

    def _is_zero(self, atom: Atom) -> bool:
        return is_zero(atom, self.block.makers)

    def _terms(self, value: Value) -> tuple[list[Value], list[int]]:
        """Return the terms of the sum `value`, and the indices of the additions that compute it.

        Nested additions are opened in a loop, without recursion: a weight that is used a thousand
        times has a chain of a thousand.
        """
        terms: list[Value] = []
        additions: list[int] = []
        pending = [value]
        while pending:
            index, operation = self.maker.get(pending[-1], (-1, None))
            inputs = addends(operation) if operation else []
            term = pending.pop()
            if inputs and (term is value or self.only_use(term)):
                additions.append(index)
                pending += inputs
            else:
                terms.append(term)
        return terms, additions

    def _gain(self, value: Value, layout: DimSharding) -> _Gain:
        """Return the gain of reducing the inputs of `value`'s operation instead of `value`.

        `layout` is the split of the reduced `value`.
        """
        if value not in self.maker or not self.only_use(value):
            return _Gain.NONE
        _, operation = self.maker[value]
        if isinstance(operation, Loop):
            position = operation.outputs.index(value)
            is_sum = position < operation.num_carry
            moves = position in self.sums(self.maker[value][0]) if is_sum else layout.dim != 0
            return _Gain.SMALLER if moves else _Gain.NONE
        if operation.name in ADDITIONS:
            terms, additions = self._terms(value)
            if not additions or not all(self.only_use(term) for term in terms):
                return _Gain.NONE
            gains = [self._gain(term, layout) for term in terms]
            # Reducing the terms sends several arrays in place of their sum. It pays if one term
            # then takes less memory, or if every term sends fewer bytes.
            return max(gains) if max(gains) == _Gain.SMALLER else min(gains)
        below = _below(operation, layout)
        if below is None or not self.only_use(below[0]):
            return _Gain.NONE
        gain = self._gain(*below)
        if _narrows(operation) and gain < _Gain.SMALLER:
            return _Gain.NONE  # below a narrowing cast more bytes are sent
        return max(gain, _own_gain(operation))


def _most_at_once(body: Block, carried: CarriedSum) -> int:
    """Return the bytes of a carried sum's largest term.

    A term that an inner loop makes as a stack counts with the bytes of one layer.
    """
    layers: dict[Value, int] = {}
    for operation in body.operations:
        source = operation.source
        if isinstance(operation, Loop):
            layers |= dict.fromkeys(operation.outputs[operation.num_carry :], operation.length)
        elif source is not None and source in layers and operation.view() is not None:
            layers[operation.outputs[0]] = layers[source]
    return max(x.num_bytes // layers.get(x, 1) for x in carried.terms)


def _own_gain(operation: Operation) -> _Gain:
    """Return the gain of moving a reduction from an operation's output to its input, no further.

    There is a gain if the operation pads the array, or casts it to a wider dtype.
    """
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


def _below(operation: Operation, layout: DimSharding) -> tuple[Value, DimSharding] | None:
    """Find the input of an operation that can be reduced in place of its output.

    Args:
        operation: the operation.
        layout: the split of the reduced output.

    Returns:
        The input and the split of the reduced input; None if there is no such input.
    """
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
