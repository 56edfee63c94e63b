"""Compute values made of weights alone again in backward, instead of keeping them from forward.

A masked or normalised weight is as large as the weight. Differentiation keeps it for backward, so
that of a model with unrolled layers all would be held at once. In backward its weights are gathered
again, and dropped after their last use, as any weight is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from .dependence import Fixed, is_cheap, is_large
from .ir import Atom, Block, Operation, Value


def recompute_in_backward(block: Block, weights: Collection[Value], loss: Value) -> Block:
    """Copy the operations that make large values of weights alone to their first use in backward.

    Args:
        block: the program.
        weights: its inputs that are sharded weights.
        loss: the value whose operation ends forward.
    """
    fixed = Fixed(block, {x: frozenset({x}) for x in weights}, weights, scalars=True)
    if loss not in fixed.makers:
        return block
    end = fixed.makers[loss][0] + 1
    copier = _Copier(fixed, end)
    later = [y for operation in block.operations[end:] for y in copier.add(operation)]
    if not copier.copies:
        return block
    return dataclasses.replace(block, operations=(*block.operations[:end], *later))


class _Copier:
    """Operations of backward, with the copies that they read."""

    def __init__(self, fixed: Fixed, end: int):
        self.fixed = fixed
        self.end = end  # the first operation of backward
        self.copies: dict[Atom, Value] = {}

    def add(self, operation: Operation) -> list[Operation]:
        """The operation after the copies that it is the first to read."""
        made: list[Operation] = []
        inputs = tuple(self._read(atom, made) for atom in operation.inputs)
        if inputs != operation.inputs:
            operation = dataclasses.replace(operation, inputs=inputs)
        return [*made, operation]

    def _read(self, atom: Atom, made: list[Operation]) -> Atom:
        if atom in self.copies or not isinstance(atom, Value):
            return self.copies.get(atom, atom)
        index, operation = self.fixed.makers.get(atom, (self.end, None))
        if index >= self.end or operation is None or not self._is_copied(atom, operation):
            return atom
        inputs = tuple(self._read(x, made) for x in operation.inputs)
        outputs = tuple(map(Value, operation.outputs))
        made.append(dataclasses.replace(operation, inputs=inputs, outputs=outputs))
        self.copies.update(zip(operation.outputs, outputs, strict=True))
        return self.copies[atom]

    def _is_copied(self, value: Value, operation: Operation) -> bool:
        return is_cheap(operation) and value not in self.fixed.views and is_large(self.fixed, value)
