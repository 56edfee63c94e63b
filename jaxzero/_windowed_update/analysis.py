"""Find out which values of an update can be computed window by window.

A value is *of a leaf* if each of its elements is computed from scalars and from elements at the
same index of one windowed leaf's gradient, parameter and state. Any other value is *full*: it is
computed once, as without offload.

A reduction of a value of a leaf to a scalar is full, and needs a pass over all windows. Values that
depend on it can be computed only after that pass: the *level* of a value is the number of passes
that must come before it.

An update that cannot be computed window by window is refused here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

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
    operations_for,
    shape_of,
)
from .._sharding import LeafSpec
from .program import UpdateLayouts, UpdateProgram

_REMEDY = (
    "Keep the leaf in device memory: leave it out of the patterns of "
    "`jz.Offload(weights=..., gradients=..., optimizer=...)`."
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """The way in which a value of the update is computed.

    Attributes:
        leaf: the windowed leaf from whose windows it is computed; None: it is computed in full.
        level: the number of passes over the windows that must be done before it is computed.
    """

    leaf: int | None
    level: int


class WindowProgram(NamedTuple):
    """The operations that compute some values of one leaf from a window of its arrays.

    Attributes:
        wanted: the values to compute.
        operations: the operations, in program order.
        reads: the inputs of all operations, and `wanted`.
        scalars: those of `reads` that are full and have one element, including arrays that the
            optimizer closes over.
    """

    wanted: Sequence[Atom]
    operations: list[Operation]
    reads: dict[Atom, None]
    scalars: list[Atom]


class Analysis:
    """Tells of each value in an update whether it is computed from windows of a leaf, or in full.

    Args:
        program: the traced update.
        owners: for each input of the program, the windowed leaf that it belongs to, or None.
        params: the layouts of the parameters, for errors.

    Attributes:
        program: the traced update.
        reductions: for each level, the operations that reduce a value of a leaf, by leaf.

    Raises:
        NotImplementedError: a value of a windowed leaf cannot be computed window by window.
    """

    def __init__(
        self, program: UpdateProgram, owners: Sequence[int | None], params: Sequence[LeafSpec]
    ):
        self.program = program
        self._params = params
        self._kinds = {
            x: Kind(owner, 0) for x, owner in zip(program.block.inputs, owners, strict=True)
        }
        self._repeated: set[Value] = set()  # full values that repeat one scalar in every element
        levels: dict[int, dict[int, list[Operation]]] = collections.defaultdict(dict)
        for operation in program.block.operations:
            kind = self._kind(operation)
            if kind.leaf is not None and full_reduction(operation) is not None:
                levels[kind.level].setdefault(kind.leaf, []).append(operation)
                kind = Kind(None, kind.level + 1)
            self._kinds.update(dict.fromkeys(operation.outputs, kind))
            if kind.leaf is None and self._is_repeated(operation):
                self._repeated.update(operation.outputs)
        self.reductions = [levels.get(level, {}) for level in range(1 + max(levels, default=-1))]

    def leaf_of(self, atom: Atom) -> int | None:
        """Return the windowed leaf that a value is computed from; None if it is full."""
        return None if isinstance(atom, Constant) else self._kinds[atom].leaf

    def repeats_scalar(self, atom: Atom) -> bool:
        """Return True if a full value has the same scalar in every element."""
        return is_scalar(atom) or atom in self._repeated

    def window_program(self, wanted: Sequence[Atom]) -> WindowProgram:
        """Return the operations that compute `wanted` from a window of a leaf, and from scalars."""
        operations = operations_for(self.program.block, wanted, self._known)
        reads = dict.fromkeys([*wanted, *(x for op in operations for x in op.inputs)])
        scalars = [x for x in reversed(reads) if self._is_full_scalar(x)]
        return WindowProgram(wanted, operations, reads, scalars)

    @functools.cached_property
    def _known(self) -> set[Value]:
        """The values that are given when windows are computed: inputs, and full scalars."""
        return {*self.program.block.inputs, *filter(self._is_full_scalar, self._kinds)}

    def _is_full_scalar(self, atom: Atom) -> bool:
        is_given = isinstance(atom, Value) or isinstance(atom.value, jax.Array)
        return is_given and is_scalar(atom) and self.leaf_of(atom) is None

    def _kind(self, operation: Operation) -> Kind:
        """Return how the outputs of an operation are computed.

        For a reduction of a leaf, return the `Kind` of the value that is reduced.

        Raises:
            NotImplementedError: the operation cannot be computed from windows.
        """
        kinds = [self._kinds[atom] for atom in operation.inputs if isinstance(atom, Value)]
        level = max((kind.level for kind in kinds), default=0)
        leaves = sorted({kind.leaf for kind in kinds if kind.leaf is not None})
        if not leaves:
            return Kind(None, level)
        leaf = leaves[0]
        if len(leaves) > 1:
            other = self._params[leaves[1]].path
            self._refuse(operation, leaf, f"combines elements of it with those of `{other}`")
        if not is_reshape(operation):
            self._check_full_inputs(operation, leaf)
            if not is_elementwise(operation) and full_reduction(operation) is None:
                self._refuse(operation, leaf, "needs more than one element of it at a time")
        return Kind(leaf, level)

    def _check_full_inputs(self, operation: Operation, leaf: int) -> None:
        """Raise `NotImplementedError` if an operation on a windowed leaf reads a full array."""
        for atom in operation.inputs:
            if self.leaf_of(atom) is not None or self.repeats_scalar(atom):
                continue
            made = self._maker(atom)
            source = "" if made is None else f", made by `{made.name}` at {made.where}"
            shape = list(shape_of(atom))
            self._refuse(operation, leaf, f"combines it with an array of shape {shape}{source}")

    def _is_repeated(self, operation: Operation) -> bool:
        """Return True if the outputs of an operation have the same scalar in every element."""
        if not is_elementwise(operation) and not is_broadcast(operation):
            return is_reshape(operation) and self.repeats_scalar(operation.inputs[0])
        return all(map(self.repeats_scalar, operation.inputs))

    def _maker(self, atom: Atom) -> Operation | None:
        """Return the operation that `atom` comes from, to name it in messages; None for an input.

        It is the first that makes an array of the size of `atom`; later ones only change elements.
        """
        size = math.prod(shape_of(atom))
        while isinstance(atom, Value) and (operation := self.program.producer(atom)):
            same = [x for x in operation.inputs if math.prod(shape_of(x)) == size]
            if all(self.repeats_scalar(x) for x in same):
                return operation
            atom = next(x for x in same if not self.repeats_scalar(x))
        return None

    def _refuse(self, operation: Operation, leaf: int, what: str) -> NoReturn:
        raise NotImplementedError(
            f"This optimizer cannot update the leaf `{self._params[leaf].path}` one window at a "
            f"time, as leaves in host memory are: `{operation.name}` at {operation.where} {what}. "
            f"Keep this leaf in device memory: leave it out of the patterns of "
            "`jz.Offload(weights=..., gradients=..., optimizer=...)`, or give it an elementwise "
            "optimizer (`optax.multi_transform`)."
        )


def is_scalar(atom: Atom) -> bool:
    """Return True if a value or constant has one element."""
    return math.prod(shape_of(atom)) == 1


def check_outputs(analysis: Analysis, layouts: UpdateLayouts, owners: Sequence[int | None]) -> None:
    """Raise an error unless each array of a windowed leaf can be overwritten by its new value.

    Args:
        analysis: the analysis of the update.
        layouts: the layouts of the update's trees.
        owners: for each input of the program, the windowed leaf that it belongs to, or None.

    Raises:
        NotImplementedError: a new value cannot be written window by window.
    """
    num_gradients = len(layouts.gradients.leaves)
    leaves = layouts.leaves[num_gradients:]
    outputs = analysis.program.block.outputs
    of_outputs = owners[num_gradients : num_gradients + len(leaves)]
    for leaf, owner, new in zip(leaves, of_outputs, outputs, strict=True):
        made_of = analysis.leaf_of(new)
        if made_of not in (owner, None):
            source = layouts.params.leaves[made_of].path
            raise NotImplementedError(
                f"The optimizer computes `{leaf.path}` from elements of the leaf `{source}`, which "
                f"is in host memory, and that leaf's state does not include it. {_REMEDY}"
            )
        if owner is None:
            continue
        if made_of is None and not analysis.repeats_scalar(new):
            raise NotImplementedError(
                f"The optimizer computes `{leaf.path}`, which is in host memory, from other arrays "
                f"than those of its leaf. {_REMEDY}"
            )
        dtype = new.value.dtype if isinstance(new, Constant) else new.dtype
        if dtype != leaf.dtype:
            raise NotImplementedError(
                f"The optimizer changes the dtype of `{leaf.path}` from {leaf.dtype} to {dtype}; "
                f"an array in host memory is updated in its place. {_REMEDY}"
            )
