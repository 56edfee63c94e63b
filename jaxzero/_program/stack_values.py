"""Stacks that need not exist: a loop's body can compute a layer of them from layers of weights."""

from __future__ import annotations

import math
from typing import NamedTuple

from .dependence import Fixed, is_cheap, is_large
from .elementwise import dtype_of, shape_of
from .ir import Atom, Barrier, Loop, Operation, Value
from .layer_forms import LayerForm, layer_form


class Saved(NamedTuple):
    """A stack that a loop makes of weights alone, in each iteration from one layer of them."""

    loop: Loop
    output: Atom  # of its body
    operations: tuple[Operation, ...]  # of its body that make the output


class StackValues:
    """How each stack of a block is made, layer by layer."""

    def __init__(self, fixed: Fixed):
        self.fixed = fixed
        self._forms: dict[Operation, LayerForm | None] = {}
        self._lazy: dict[Value, bool] = {}
        self._saved: dict[Value, Saved | None] = {}
        self._bodies: dict[Loop, Fixed] = {}

    def form(self, operation: Operation) -> LayerForm | None:
        """`layer_form` of an operation."""
        if operation not in self._forms:
            self._forms[operation] = layer_form(operation)
        return self._forms[operation]

    def maker(self, value: Value) -> Operation | None:
        """The operation that makes a value; None for an input of the block."""
        return self.fixed.makers.get(value, (0, None))[1]

    def is_lazy(self, atom: Atom) -> bool:
        """Whether a stack can be computed layer by layer, and is made of weights.

        A view of a weight is not: the loop scans the weight itself.
        """
        if not isinstance(atom, Value) or atom in self.fixed.views:
            return False
        return self.saved(atom) is not None or (bool(self.fixed.of(atom)) and self.expands(atom))

    def is_layered(self, value: Value) -> bool:
        """Whether a stack is lazy, or a view of a weight whose operations act on each layer."""
        if value not in self.fixed.views:
            return self.is_lazy(value)
        operation = self.maker(value)
        if operation is None or not value.shape:
            return bool(value.shape)
        source = self.passed(value) or operation.source
        known = isinstance(operation, Barrier) or self.form(operation) is not None
        return known and source is not None and self.is_layered(source)

    def is_free(self, atom: Atom, sliced: bool) -> bool:
        """Whether a loop's body can read this atom without anything large being made for it."""
        if sliced and isinstance(atom, Value) and self.is_layered(atom):
            return True
        return self.fixed.of(atom) == frozenset()

    def passed(self, value: Value) -> Value | None:
        """The value that a barrier passes on as `value`; None for other values."""
        operation = self.maker(value)
        if not isinstance(operation, Barrier):
            return None
        given = operation.inputs[operation.outputs.index(value)]
        return given if isinstance(given, Value) else None

    def expands(self, value: Value) -> bool:
        """Whether layers of a fixed stack are to be computed, rather than taken from it."""
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
        """Whether to compute layers of `value`, made of constants, rather than to hold it."""
        if sliced and isinstance(atom, Value) and self.expands(atom):
            return True
        size = math.prod(shape_of(atom)) * dtype_of(atom).itemsize
        return size * 2 <= value.num_bytes

    def saved(self, value: Value) -> Saved | None:
        """How the body of a loop makes a stacked output; None unless of weights alone, and large.

        Differentiation keeps such stacks for backward.
        """
        if value not in self._saved:
            self._saved[value] = self._find_saved(value)
        return self._saved[value]

    def is_of_weights(self, value: Value) -> bool:
        """Whether a value is a large stack that a loop makes of weights alone, and not a view."""
        loop = self.maker(value)
        if not isinstance(loop, Loop) or (i := loop.outputs.index(value)) < loop.num_carry:
            return False
        out, body = loop.body.outputs[i], self._body(loop)
        return isinstance(out, Value) and out not in body.views and is_large(body, out)

    def innermost_maker(self, value: Value) -> Operation:
        """The operation that makes a value; of a stack that a loop makes, that in its body."""
        operation = self.fixed.makers[value][1]
        if isinstance(operation, Loop):
            out = operation.body.outputs[operation.outputs.index(value)]
            makers = self._body(operation).makers
            return makers[out][1] if out in makers else operation
        return operation

    def is_large(self, value: Value) -> bool:
        """Whether a value is made of weights alone, and not much smaller than they are."""
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
        """The fixed values of a loop's body, given what is fixed outside of it."""
        if loop not in self._bodies:
            first, given, views = loop.num_constants + loop.num_carry, {}, set()
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
    """The operations that make a value, in program order."""
    found: dict[int, Operation] = {}
    pending: list[Atom] = [out]
    while pending:
        atom = pending.pop()
        if isinstance(atom, Value) and atom in fixed.makers:
            index, operation = fixed.makers[atom]
            if index not in found:
                found[index] = operation
                pending += operation.inputs
    return tuple(found[index] for index in sorted(found))
