"""Match the operations of one function that was traced at several batch sizes.

The traces are blocks with the same operations in the same order, on arrays of different sizes.
Operations are matched by position, so that a plan made for the first trace, which has the largest
arrays, can be carried out with the operations of any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from .ir import Atom, Block, Constant, Loop, Operation, Value


@dataclasses.dataclass(frozen=True)
class Correspondence:
    """What corresponds to each atom and operation of the first trace, inside loops too.

    Attributes:
        atoms: for an atom of the first trace, that of each trace, itself first.
        operations: for an operation of the first trace, that of each trace, itself first.
    """

    atoms: Mapping[Atom, tuple[Atom, ...]]
    operations: Mapping[Operation, tuple[Operation, ...]]


def correspondence(blocks: Sequence[Block]) -> Correspondence:
    """Match the traces of a function, the one with the largest arrays first.

    Raises:
        NotImplementedError: the traces differ in more than sizes and constants.
    """
    atoms: dict[Atom, tuple[Atom, ...]] = {}
    operations: dict[Operation, tuple[Operation, ...]] = {}
    _match_blocks(blocks, atoms, operations, "its arguments")
    return Correspondence(atoms, operations)


def is_same_constant(atoms: Sequence[Atom]) -> bool:
    """Whether all are constants of one value; False for a value that is traced."""
    values = [atom.value for atom in atoms if isinstance(atom, Constant)]
    if len(values) < len(atoms):
        return False
    first = values[0]
    return all(x is first for x in values) or (
        all(isinstance(x, np.ndarray | np.generic | bool | int | float) for x in values)
        and all(np.array_equal(x, first) for x in values)
    )


def _match_blocks(blocks: Sequence[Block], atoms: dict, operations: dict, where: str) -> None:
    _match_atoms([block.inputs for block in blocks], atoms, where)
    if len({len(block.operations) for block in blocks}) > 1:
        counts = ", ".join(str(len(block.operations)) for block in blocks)
        raise _differs(where, f"it has {counts} operations")
    for group in zip(*(block.operations for block in blocks), strict=True):
        first, place = group[0], group[0].where
        names = {operation.name for operation in group}
        if len(names) > 1:
            raise _differs(place, " and ".join(sorted(names)))
        _match_atoms([operation.inputs for operation in group], atoms, place)
        _match_atoms([operation.outputs for operation in group], atoms, place)
        operations[first] = group
        if isinstance(first, Loop):
            if len({(x.num_constants, x.num_carry, x.is_reversed) for x in group}) > 1:
                raise _differs(place, "a loop carries other values")
            _match_blocks([x.body for x in group], atoms, operations, place)
    _match_atoms([block.outputs for block in blocks], atoms, where)


def _match_atoms(groups: Sequence[Sequence[Atom]], atoms: dict, where: str) -> None:
    """Match atoms by position, and check that earlier ones were matched alike."""
    if len({len(group) for group in groups}) > 1:
        raise _differs(where, "an operation has another number of inputs or outputs")
    for group in zip(*groups, strict=True):
        known = atoms.setdefault(group[0], group)
        if any(a is not b for a, b in zip(known, group, strict=True)):
            raise _differs(where, "an operation reads another value")
        if len({isinstance(atom, Value) for atom in group}) > 1:
            raise _differs(where, "a value is known while tracing for one of them only")
        if isinstance(group[0], Value):
            _match_shapes(group, where)


def _match_shapes(values: Sequence[Value], where: str) -> None:
    first, *others = values
    for other in others:
        is_like = other.dtype == first.dtype and len(other.shape) == len(first.shape)
        if not is_like or any(a > b for a, b in zip(other.shape, first.shape, strict=True)):
            shown = f"{first.dtype}{list(first.shape)}, then {other.dtype}{list(other.shape)}"
            raise _differs(where, f"an array is {shown}")


def _differs(where: str, what: str) -> NotImplementedError:
    return NotImplementedError(
        "`shares`: the function is traced once for each number of rows that a node has, and the "
        f"traces must differ in sizes only. At {where}: {what}. Take shares with which every node "
        "has two rows or more in a micro-batch, and decide nothing by the number of rows."
    )
