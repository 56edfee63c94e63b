"""Find out which values of an update can be computed window by window.

A value is *of a leaf* if each of its elements is computed from the elements at the same index of
one windowed leaf's gradient, parameter and state, and from scalars. Any other value is *full*: it
is computed once, as without offload. The reduction of a value of a leaf to a scalar is full, and
has to be known before what depends on it: its *level* is the number of passes over the windows
that must come before.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jax

from .._program import (
    Atom,
    Constant,
    Operation,
    Value,
    full_reduction,
    is_broadcast,
    is_elementwise,
    is_reshape,
    shape_of,
)
from .._sharding import LeafSpec
from .program import UpdateProgram


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a value is computed: window by window of `leaf`, or in full if `leaf` is None."""

    leaf: int | None
    level: int


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The values of an update, by how they are computed.

    Attributes:
        program: the traced update.
        kinds: the kind of each value.
        repeated: for each full value whether it repeats one scalar in every element.
        reductions: for each level, the reductions of values of leaves, by leaf.
    """

    program: UpdateProgram
    kinds: Mapping[Value, Kind]
    repeated: Mapping[Value, bool]
    reductions: Sequence[Mapping[int, Sequence[Operation]]]

    def leaf_of(self, atom: Atom) -> int | None:
        """The windowed leaf that a value is computed from; None if it is full."""
        return None if isinstance(atom, Constant) else self.kinds[atom].leaf

    def repeats_scalar(self, atom: Atom) -> bool:
        """Whether a full value has one scalar in every element."""
        return is_scalar(atom) or (isinstance(atom, Value) and self.repeated.get(atom, False))

    def window_operations(self, wanted: Sequence[Atom]) -> tuple[list[Operation], list[Atom]]:
        """What computes `wanted` from a window.

        Returns:
            The operations in program order, and the scalars that they read, which are full values
            or arrays that the optimizer closes over.
        """
        known: set[Value] = set()
        scalars: dict[Atom, None] = {}
        waiting = list(wanted)
        positions = set()
        while waiting:
            atom = waiting.pop()
            if is_scalar(atom) and self.leaf_of(atom) is None:
                if isinstance(atom, Value) or isinstance(atom.value, jax.Array):
                    scalars[atom] = None
                continue
            if isinstance(atom, Constant) or atom in known:
                continue
            known.add(atom)
            position = self.program.producers.get(atom)
            if position is not None:
                positions.add(position)
                waiting += self.program.block.operations[position].inputs
        return [self.program.block.operations[i] for i in sorted(positions)], list(scalars)


def is_scalar(atom: Atom) -> bool:
    """Whether a value or constant has one element."""
    return math.prod(shape_of(atom)) == 1


def analyse(
    program: UpdateProgram, owners: Sequence[int | None], params: Sequence[LeafSpec]
) -> Analysis:
    """Find how each value of an update is computed.

    Args:
        program: the traced update.
        owners: for each input of the program the windowed leaf that it belongs to, or None.
        params: the leaves, for errors.

    Raises:
        NotImplementedError: a value of a windowed leaf cannot be computed window by window.
    """
    return _Analyser(program, owners, params).analyse()


class _Analyser:
    def __init__(
        self, program: UpdateProgram, owners: Sequence[int | None], params: Sequence[LeafSpec]
    ):
        self.program = program
        self.params = params
        self.kinds = {
            value: Kind(owner, 0) for value, owner in zip(program.block.inputs, owners, strict=True)
        }
        self.reductions: dict[int, dict[int, list[Operation]]] = {}
        self.repeated: dict[Value, bool] = {}  # whether a full value repeats one scalar

    def analyse(self) -> Analysis:
        for operation in self.program.block.operations:
            kind = self._kind(operation)
            self.kinds.update(dict.fromkeys(operation.outputs, kind))
            repeats = kind.leaf is None and self._repeats_scalar(operation)
            self.repeated.update(dict.fromkeys(operation.outputs, repeats))
        levels = range(1 + max(self.reductions, default=-1))
        return Analysis(
            self.program,
            self.kinds,
            self.repeated,
            [self.reductions.get(level, {}) for level in levels],
        )

    def _kind(self, operation: Operation) -> Kind:
        kinds = [self.kinds[atom] for atom in operation.inputs if isinstance(atom, Value)]
        level = max((kind.level for kind in kinds), default=0)
        leaves = sorted({kind.leaf for kind in kinds if kind.leaf is not None})
        if not leaves:
            return Kind(None, level)
        leaf = leaves[0]
        if len(leaves) > 1:
            other = self.params[leaves[1]].path
            self._refuse(operation, leaf, f"combines elements of it with those of `{other}`")
        if is_reshape(operation):
            return Kind(leaf, level)
        self._check_full_inputs(operation, leaf)
        if is_elementwise(operation):
            return Kind(leaf, level)
        if full_reduction(operation) is None:
            self._refuse(operation, leaf, "needs more than one element of it at a time")
        by_leaf = self.reductions.setdefault(level, collections.defaultdict(list))
        by_leaf[leaf].append(operation)
        return Kind(None, level + 1)

    def _check_full_inputs(self, operation: Operation, leaf: int) -> None:
        """Raise unless the operation reads nothing but values of the leaf and scalars."""
        for atom in operation.inputs:
            if isinstance(atom, Value) and self.kinds[atom].leaf is not None:
                continue
            if is_scalar(atom) or (isinstance(atom, Value) and self.repeated.get(atom)):
                continue
            made = self._maker(atom)
            source = "" if made is None else f", made by `{made.name}` at {made.where}"
            shape = list(shape_of(atom))
            self._refuse(operation, leaf, f"combines it with an array of shape {shape}{source}")

    def _repeats_scalar(self, operation: Operation) -> bool:
        if not is_elementwise(operation) and not is_broadcast(operation):
            return is_reshape(operation) and self._repeats(operation.inputs[0])
        return all(self._repeats(atom) for atom in operation.inputs)

    def _repeats(self, atom: Atom) -> bool:
        return is_scalar(atom) or (isinstance(atom, Value) and self.repeated.get(atom, False))

    def _maker(self, atom: Atom) -> Operation | None:
        """The operation that makes an array of its size, which later ones only change."""
        size = math.prod(shape_of(atom))
        while isinstance(atom, Value) and (operation := self.program.producer(atom)):
            same = [x for x in operation.inputs if math.prod(shape_of(x)) == size]
            if all(self._repeats(x) for x in same):
                return operation
            atom = next(x for x in same if not self._repeats(x))
        return None

    def _refuse(self, operation: Operation, leaf: int, what: str) -> NoReturn:
        raise NotImplementedError(
            f"This optimizer cannot update the leaf `{self.params[leaf].path}` one window at a "
            f"time, as leaves in host memory are: `{operation.name}` at {operation.where} {what}. "
            f"Keep this leaf in device memory: leave it out of the patterns of "
            "`jz.Offload(weights=..., gradients=..., optimizer=...)`, or give it an elementwise "
            "optimizer (`optax.multi_transform`)."
        )
