"""Find the values of a block that depend on weights and constants alone, not on the batch.

They are *fixed*: as long as the weights are, they can be computed again wherever they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from .elementwise import is_elementwise
from .ir import Atom, Barrier, Block, Constant, Loop, Operation, Value, exchanged_or_effect

# A result with so many times fewer bytes than what it is made of is small: it is kept.
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
        weights: for each fixed value, the weights that it is made of; empty for constants.
        views: fixed values that are a weight with movable operations, as in `Operation.view`.
        makers: for each value, the index and operation that it is made by.
    """

    def __init__(
        self, block: Block, given: Mapping[Value, Weights], views: Iterable[Value], *, scalars: bool
    ):
        """Walk a block.

        Args:
            block: a program, or the body of a loop.
            given: its inputs that are fixed.
            views: its inputs that are weights.
            scalars: whether all scalars count as fixed, and made of nothing: a program computes
                them once, and keeps them at no cost.
        """
        self.block = block
        self.weights = {**given}
        self.views = {*views}
        self.makers: dict[Value, tuple[int, Operation]] = {}
        if scalars:
            self.weights |= {x: frozenset() for x in block.inputs if _is_scalar(x)}
        for index, operation in enumerate(block.operations):
            self.makers |= dict.fromkeys(operation.outputs, (index, operation))
            self._walk(operation)
            if scalars:
                self.weights |= {x: frozenset() for x in operation.outputs if _is_scalar(x)}

    def of(self, atom: Atom) -> Weights | None:
        """The weights that an atom is made of; None if it is not fixed."""
        return frozenset() if isinstance(atom, Constant) else self.weights.get(atom)

    def _walk(self, operation: Operation) -> None:
        if isinstance(operation, Barrier):
            for given, out in zip(operation.inputs, operation.outputs, strict=True):
                if (found := self.of(given)) is not None:
                    self.weights[out] = found
                if given in self.views:
                    self.views.add(out)
            return
        found = [self.of(atom) for atom in operation.inputs]
        if isinstance(operation, Loop) or any(x is None for x in found):
            return
        if operation.name == "axis_index" or exchanged_or_effect(operation):
            return
        union = frozenset().union(*(x for x in found if x is not None))
        self.weights |= dict.fromkeys(operation.outputs, union)
        if operation.source in self.views and operation.view() is not None:
            self.views |= {*operation.outputs}


def is_cheap(operation: Operation) -> bool:
    """Whether it takes little work to compute again."""
    known = is_elementwise(operation) or operation.name in _CHEAP
    return known and operation.products <= _MOST_PRODUCTS * math.prod(operation.outputs[0].shape)


def is_large(fixed: Fixed, value: Value) -> bool:
    """Whether a value is made of weights alone, and not much smaller than the largest of them.

    A vector, such as `1 + scale` of a norm, is not: to keep it costs less than another gather.
    """
    weights = fixed.of(value)
    if not weights or sum(size > 1 for size in value.shape) < 2:
        return False
    return value.num_bytes * SMALL >= max(x.num_bytes for x in weights)


def _is_scalar(value: Value) -> bool:
    return value.is_array and not value.shape
