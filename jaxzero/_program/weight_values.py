"""Find the values of a block that depend only on weights and constants, not on the batch.

They are called *fixed*: they do not change during a step, so they can be computed again wherever
they are needed. A loop's body can compute one layer of a fixed stack from layers of weights, so
that the stack need not exist (`StackValues`).

A masked or normalised weight is as large as the weight. Differentiation keeps it for backward, so a
model with unrolled layers would hold the masked weights of all layers at once.
`recompute_in_backward` lets backward compute these again: the weights are gathered again, and
dropped after their last use.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from .copies import Copies
from .ir import Atom, Barrier, Block, Constant, Loop, Operation, Value, exchanged_or_effect
from .operation_kinds import LayerForm, dtype_of, is_elementwise, layer_form, shape_of

# A result with this many times fewer bytes than the weights that it is made of is small: kept.
SMALL = 4
_CHEAP = {
    *("broadcast_in_dim", "concatenate", "dot_general", "expand_dims", "iota", "pad", "reduce_and"),
    *("reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reshape", "reshard"),
    *("rev", "slice", "split", "squeeze", "transpose"),
}

Weights = frozenset[Value]

# A matrix product with at most so many multiplications for each element of its result, such as one
# of low rank, costs little beside the products of weights with the tokens of a batch.
_MOST_PRODUCTS = 256


class Fixed:
    """The fixed values of a block.

    Attributes:
        weights: for each fixed value, the weights that it is computed from; empty for constants.
        views: fixed values that are a weight after movable operations, as in `Operation.view`.
        makers: for each value, the index of the operation that makes it, and this operation.
    """

    def __init__(
        self, block: Block, given: Mapping[Value, Weights], views: Iterable[Value], *, scalars: bool
    ):
        """Find the fixed values of a block.

        Args:
            block: a program, or the body of a loop.
            given: the inputs that are fixed, with the weights that they are computed from.
            views: the inputs that are weights.
            scalars: whether every scalar counts as fixed, computed from no weights: a program
                computes it once, and keeps it at no cost.
        """
        self.block = block
        self.weights = {**given}
        self.views = {*views}
        self.makers: dict[Value, tuple[int, Operation]] = {}
        if scalars:
            self.weights |= {x: frozenset() for x in block.inputs if _is_scalar(x)}
        for index, operation in enumerate(block.operations):
            self._walk(operation)
            for x in operation.outputs:
                self.makers[x] = index, operation
                if scalars and _is_scalar(x):
                    self.weights[x] = frozenset()

    def of(self, atom: Atom) -> Weights | None:
        """Return the weights that an atom is computed from; None if it is not fixed."""
        return frozenset() if isinstance(atom, Constant) else self.weights.get(atom)

    def _walk(self, operation: Operation) -> None:
        if isinstance(operation, Barrier):
            for given, out in zip(operation.inputs, operation.outputs, strict=True):
                if (weights := self.of(given)) is not None:
                    self.weights[out] = weights
                if given in self.views:
                    self.views.add(out)
            return
        made_of: list[Weights] = []
        for atom in operation.inputs:
            if (weights := self.of(atom)) is None:
                return
            made_of.append(weights)
        if isinstance(operation, Loop):
            return
        if operation.name == "axis_index" or exchanged_or_effect(operation):
            return
        self.weights |= dict.fromkeys(operation.outputs, frozenset().union(*made_of))
        if operation.source in self.views and operation.view() is not None:
            self.views |= {*operation.outputs}


def fixed_of(block: Block, weights: Collection[Value]) -> Fixed:
    """Find the fixed values of a program or a loop's body, given the inputs that are weights."""
    return Fixed(block, {x: frozenset({x}) for x in weights}, weights, scalars=True)


def is_cheap(operation: Operation) -> bool:
    """Return whether an operation takes little work to compute again."""
    known = is_elementwise(operation) or operation.name in _CHEAP
    return known and operation.products <= _MOST_PRODUCTS * math.prod(operation.outputs[0].shape)


def is_large(fixed: Fixed, value: Value) -> bool:
    """Return whether a value is computed from weights alone, and not much smaller than they are.

    A vector, such as `1 + scale` of a norm, is not large: keeping it costs less than another
    gather.
    """
    weights = fixed.of(value)
    if not weights or sum(size > 1 for size in value.shape) < 2:
        return False
    return value.num_bytes * SMALL >= max(x.num_bytes for x in weights)


def _is_scalar(value: Value) -> bool:
    return value.is_array and not value.shape


class Saved(NamedTuple):
    """A stack that a loop computes from weights alone, each layer from one layer of the weights."""

    loop: Loop
    output: Atom  # of its body
    operations: tuple[Operation, ...]  # of its body that make the output


class StackValues:
    """The stacks of weights in a block, and which of them can be computed layer by layer."""

    def __init__(self, fixed: Fixed):
        self.fixed = fixed
        self._forms: dict[Operation, LayerForm | None] = {}
        self._lazy: dict[Value, bool] = {}
        self._saved: dict[Value, Saved | None] = {}
        self._bodies: dict[Loop, Fixed] = {}

    def form(self, operation: Operation) -> LayerForm | None:
        """Return `layer_form(operation)`, computed once."""
        if operation not in self._forms:
            self._forms[operation] = layer_form(operation)
        return self._forms[operation]

    def maker(self, value: Value) -> Operation | None:
        """Return the operation that makes a value; None for an input of the block."""
        return self.fixed.makers.get(value, (0, None))[1]

    def is_lazy(self, atom: Atom) -> bool:
        """Return whether a stack of weights can be computed layer by layer.

        It is False for a view of a weight, as the loop scans the weight itself.
        """
        if not isinstance(atom, Value) or atom in self.fixed.views:
            return False
        return self.saved(atom) is not None or (bool(self.fixed.of(atom)) and self.expands(atom))

    def is_layered(self, value: Value) -> bool:
        """Return whether a loop can get one layer of a stack without the whole stack.

        It can if the stack is lazy (`is_lazy`), or if it is a view of a weight by operations that
        act on each layer by itself.
        """
        if value not in self.fixed.views:
            return self.is_lazy(value)
        operation = self.maker(value)
        if operation is None or not value.shape:
            return bool(value.shape)
        source = self.passed(value) or operation.source
        known = isinstance(operation, Barrier) or self.form(operation) is not None
        return known and source is not None and self.is_layered(source)

    def is_free(self, atom: Atom, sliced: bool) -> bool:
        """Return whether no large array has to be made if a loop's body reads an atom.

        `sliced` says that the loop scans the atom, so that each iteration reads one layer.
        """
        if sliced and isinstance(atom, Value) and self.is_layered(atom):
            return True
        return self.fixed.of(atom) == frozenset()

    def passed(self, value: Value) -> Value | None:
        """Return the value that a barrier passes on as `value`; None for other values."""
        operation = self.maker(value)
        if not isinstance(operation, Barrier):
            return None
        given = operation.inputs[operation.outputs.index(value)]
        return given if isinstance(given, Value) else None

    def expands(self, value: Value) -> bool:
        """Return whether a fixed stack is computed layer by layer where it is read, never whole."""
        if value not in self._lazy:
            self._lazy[value] = self._expands(value)
        return self._lazy[value]

    def _expands(self, value: Value) -> bool:
        if (passed := self.passed(value)) is not None:
            return self.is_layered(passed)
        operation = self.maker(value)
        if operation is None or isinstance(operation, Loop):
            return False
        form = self.form(operation)
        if form is None or not is_cheap(operation):
            return False
        inputs = zip(operation.inputs, form.sliced, strict=True)
        if self.fixed.of(value):
            return all(self.is_free(atom, sliced) for atom, sliced in inputs)
        return all(self._is_smaller(atom, sliced, value) for atom, sliced in inputs)

    def _is_smaller(self, atom: Atom, sliced: bool, value: Value) -> bool:
        """Return whether `atom` is small enough to compute layers of the constant `value` from it.

        A stack whose own layers are computed is small enough: it is never made.
        """
        if sliced and isinstance(atom, Value) and self.expands(atom):
            return True
        size = math.prod(shape_of(atom)) * dtype_of(atom).itemsize
        return size * 2 <= value.num_bytes

    def saved(self, value: Value) -> Saved | None:
        """Return how a loop's body makes a stack that is large and computed from weights alone.

        Return None for all other values. Differentiation keeps such stacks for backward.
        """
        if value not in self._saved:
            self._saved[value] = self._find_saved(value)
        return self._saved[value]

    def is_of_weights(self, value: Value) -> bool:
        """Return whether a value is a large stack that a loop makes of weights, but no view."""
        loop = self.maker(value)
        if not isinstance(loop, Loop) or (i := loop.outputs.index(value)) < loop.num_carry:
            return False
        out, body = loop.body.outputs[i], self._body(loop)
        return isinstance(out, Value) and out not in body.views and is_large(body, out)

    def innermost_maker(self, value: Value) -> Operation:
        """Return the operation that makes a value; if a loop does, the operation in its body."""
        operation = self.fixed.makers[value][1]
        if isinstance(operation, Loop):
            out = operation.body.outputs[operation.outputs.index(value)]
            makers = self._body(operation).makers
            return makers[out][1] if out in makers else operation
        return operation

    def is_large(self, value: Value) -> bool:
        """Return `is_large` of a value of this block."""
        return is_large(self.fixed, value)

    def _find_saved(self, value: Value) -> Saved | None:
        loop = self.maker(value)
        if not isinstance(loop, Loop) or not self.is_of_weights(value):
            return None
        out = loop.body.outputs[loop.outputs.index(value)]
        assert isinstance(out, Value)
        operations = _cone(self._body(loop), out)
        return Saved(loop, out, operations) if all(map(is_cheap, operations)) else None

    def _body(self, loop: Loop) -> Fixed:
        """Find the fixed values of a loop's body, given the fixed values outside."""
        if loop not in self._bodies:
            first, given, views = loop.first_stack, {}, set()
            pairs = zip(loop.inputs, loop.body.inputs, strict=True)
            for i, (outside, inside) in enumerate(pairs):
                weights = self.fixed.of(outside)
                if weights == frozenset() and not loop.num_constants <= i < first:
                    given[inside] = weights
                elif weights and i >= first:
                    given[inside] = frozenset({inside})
                    if outside in self.fixed.views:
                        views.add(inside)
            self._bodies[loop] = Fixed(loop.body, given, views, scalars=False)
        return self._bodies[loop]


def _cone(fixed: Fixed, out: Value) -> tuple[Operation, ...]:
    """Return the operations that compute a value from the block's inputs, in program order."""
    by_index: dict[int, Operation] = {}
    pending: list[Atom] = [out]
    while pending:
        atom = pending.pop()
        if isinstance(atom, Value) and atom in fixed.makers:
            index, operation = fixed.makers[atom]
            if index not in by_index:
                by_index[index] = operation
                pending += operation.inputs
    return tuple(by_index[index] for index in sorted(by_index))


def kept_values(
    block: Block, weights: Collection[Value], last_forward: int | None
) -> list[tuple[Value, Operation]]:
    """Find the large values made of weights alone that a program keeps, and what makes each.

    Args:
        block: a program.
        weights: the inputs of the program that are sharded weights.
        last_forward: the index of the last operation of forward; None in a loop's body.

    Returns:
        Values of forward that backward reads, and stacks that a loop computes from weights alone;
        each with the operation that makes it.
    """
    values = StackValues(fixed_of(block, weights))
    read_by = {x: i for i, operation in enumerate(block.operations) for x in operation.inputs}
    kept = []
    for index, operation in enumerate(block.operations):
        for value in operation.outputs:
            if value not in read_by:
                continue
            if isinstance(operation, Loop):
                is_kept = values.is_of_weights(value)
            else:
                ends = last_forward is not None and index <= last_forward < read_by[value]
                is_kept = ends and values.is_large(value) and value not in values.fixed.views
            if is_kept:
                kept.append((value, values.innermost_maker(value)))
    return kept


def recompute_in_backward(block: Block, weights: Collection[Value], loss: Value) -> Block:
    """Let backward compute large values of weights again, right before it first reads them.

    Args:
        block: the program.
        weights: the inputs of the program that are sharded weights.
        loss: the value whose operation ends forward.
    """
    fixed = fixed_of(block, weights)
    if loss not in fixed.makers:
        return block
    end = fixed.makers[loss][0] + 1
    copied = [
        operation
        for operation in block.operations[:end]
        if is_cheap(operation) and any(_is_copied(fixed, x) for x in operation.outputs)
    ]
    if not copied:
        return block
    later = Copies(copied)
    for operation in block.operations[end:]:
        later.add(operation)
    return dataclasses.replace(block, operations=(*block.operations[:end], *later.operations))


def _is_copied(fixed: Fixed, value: Value) -> bool:
    return value not in fixed.views and is_large(fixed, value)
