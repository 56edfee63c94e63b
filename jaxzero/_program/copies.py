"""Copy operations, so that a value is computed again right before it is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .ir import Atom, Block, Loop, Operation, Value


class Copies:
    """Builds a list of operations that read the results of copies of the operations `repeated`.

    A copy stands right before the first operation that reads its result.

    Args:
        repeated: the operations to copy, in program order.
    """

    def __init__(self, repeated: Sequence[Operation]):
        self._order = {operation: i for i, operation in enumerate(repeated)}
        self._makers = {x: operation for operation in repeated for x in operation.outputs}
        self._made: dict[Value, Value] = {}
        self.operations: list[Operation] = []

    def read(self, value: Value, copied: Operation) -> Atom:
        """Return the value that a copy of `copied` reads in place of its input `value`.

        It is called for inputs that no operation of `repeated` makes. Here the result is `value`
        itself; a subclass may return another value.
        """
        del copied
        return value

    def add(self, operation: Operation) -> None:
        """Append an operation, changed to read copies, after the copies that are still missing."""
        for x in operation.values:
            self._copy(x)
        copies = {x: self.of(x) for x in operation.values}
        self.operations.append(operation.reading({x: y for x, y in copies.items() if y is not x}))

    def of(self, value: Value) -> Value:
        """Return the copy of a value, made if needed; the value itself if it is never copied."""
        self._copy(value)
        return self._made.get(value, value)

    def _copy(self, value: Value) -> None:
        """Append copies of the operations that compute a value, unless they are copied already."""
        needed: set[Operation] = set()
        waiting = [value]
        while waiting:
            current = waiting.pop()
            maker = self._makers.get(current)
            if maker is not None and current not in self._made and maker not in needed:
                needed.add(maker)
                waiting += maker.values
        for operation in sorted(needed, key=self._order.__getitem__):
            inputs = [self._input(x, operation) for x in operation.inputs]
            copy = _renewed(operation, inputs)
            self._made.update(zip(operation.outputs, copy.outputs, strict=True))
            self.operations.append(copy)

    def _input(self, atom: Atom, copied: Operation) -> Atom:
        if not isinstance(atom, Value):
            return atom
        return self._made[atom] if atom in self._makers else self.read(atom, copied)


def _renewed(operation: Operation, inputs: Iterable[Atom]) -> Operation:
    """Return a copy of an operation (with its body, if any) that reads `inputs`.

    It makes new values, since each value has one operation that makes it.
    """
    outputs = tuple(map(like, operation.outputs))
    operation = dataclasses.replace(operation, inputs=tuple(inputs), outputs=outputs)
    if isinstance(operation, Loop):
        operation = dataclasses.replace(operation, body=_renewed_block(operation.body))
    return operation


def like(value: Value, shape: tuple[int, ...] | None = None) -> Value:
    """Make a new value of the dtype of `value`, with the given shape or the shape of `value`."""
    new = Value(value)
    new.shape = value.shape if shape is None else shape
    return new


def _renewed_block(block: Block) -> Block:
    new: dict[Atom, Atom] = {x: like(x) for x in block.inputs}
    operations = []
    for operation in block.operations:
        copy = _renewed(operation, (new.get(x, x) for x in operation.inputs))
        new |= dict(zip(operation.outputs, copy.outputs, strict=True))
        operations.append(copy)
    inputs = tuple(x for x in map(new.get, block.inputs) if isinstance(x, Value))
    return Block(inputs, tuple(new.get(x, x) for x in block.outputs), tuple(operations))
