"""Find the sums that a loop carries; differentiation sums the gradients of its constants so."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping

from .ir import ADDITIONS, Atom, Constant, Loop, Operation, Value


@dataclasses.dataclass(frozen=True)
class CarriedSum:
    """A value that a loop carries, starts from zero, and only adds to in each iteration."""

    before: Value  # the sum before an iteration: an input of the body
    additions: tuple[int, ...]  # operations of the body
    terms: tuple[Value, ...]  # what they add


def carried_sums(loop: Loop, is_zero: Callable[[Atom], bool]) -> dict[int, CarriedSum]:
    """The sums that a loop carries, by index of the output.

    Args:
        loop: the loop.
        is_zero: whether a value outside of it is known to be zero.
    """
    body, found = loop.body, {}
    readers: dict[Atom, list[int]] = {atom: [] for atom in (*body.inputs, *body.outputs)}
    for index, operation in enumerate(body.operations):
        for atom in operation.inputs:
            readers.setdefault(atom, []).append(index)
    num_outputs = Counter(body.outputs)
    first, made = loop.num_constants, {x for op in body.operations for x in op.outputs}
    for position in range(loop.num_carry):
        before, out = body.inputs[first + position], body.outputs[position]
        additions, terms, value = [], [], before
        while value is not out and len(readers[value]) == 1 and not num_outputs[value]:
            operation = body.operations[readers[value][0]]
            others = [x for x in addends(operation) if x is not value]
            if len(others) != 1 or others[0] not in made:
                break
            additions.append(readers[value][0])
            terms += others
            value = operation.outputs[0]
            readers.setdefault(value, [])
        alone = all(len(readers[x]) == 1 and not num_outputs[x] for x in terms)
        is_sum = value is out and not readers[value] and num_outputs[value] == 1
        if terms and is_sum and alone and is_zero(loop.inputs[first + position]):
            found[position] = CarriedSum(before, tuple(additions), tuple(terms))
    return found


def addends(operation: Operation) -> list[Value]:
    """The inputs of an addition of two arrays of equal shape; `[]` for any other operation."""
    if operation.name not in ADDITIONS:
        return []
    arrays = [atom for atom in operation.inputs if isinstance(atom, Value)]
    alike = len(arrays) == 2 and arrays[0].shape == arrays[1].shape
    return arrays if alike else []


def is_zero(atom: Atom, makers: Mapping[Value, Operation]) -> bool:
    """Whether an atom is the constant 0, or an array of zeros that one of `makers` makes."""
    if isinstance(atom, Constant):
        return atom.is_zero
    return atom in makers and makes_zeros(makers[atom])


def makes_zeros(operation: Operation) -> bool:
    """Whether an operation is a broadcast of the constant 0."""
    if operation.name != "broadcast_in_dim":
        return False
    source = operation.inputs[0]
    return isinstance(source, Constant) and source.is_zero
