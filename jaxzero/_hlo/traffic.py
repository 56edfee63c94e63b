"""Count the bytes that an instruction of a compiled program moves, separately for each memory.

XLA writes an array's memory into its layout: `S(5)` is the host's memory, and a layout without it
is the device's. Bytes cross the link to the host if they are copied between the two memories, or if
an instruction reads or writes them in a host array. The link is slower than the device's memory by
two orders of magnitude, and other hardware moves its bytes; so they are counted apart.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from .collectives import Shape
from .instructions import Computation, Instruction, Program

NO_WORK = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
}
_CALLERS = {"while", "conditional", "call", "call-start"}  # what they call does the work
_MOVES = {"copy", "copy-start", "slice", "dynamic-slice", "dynamic-update-slice"}
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PLACEMENTS = {  # custom calls that say where an array is, and copy nothing
    "AllocateBuffer",
    "CreateBuffer",
    "PinToDevice",
    "PinToDeviceSram",
    "Pin",
    "Unpin",
    "annotate_device_placement",
}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes that one run of an instruction moves.

    Attributes:
        device: bytes that it reads from and writes to the device's memory, without the device's
            side of a copy from or to the host.
        from_host: bytes that it reads from the host's memory.
        to_host: bytes that it writes to the host's memory.
    """

    device: int = 0
    from_host: int = 0
    to_host: int = 0

    @property
    def crossing(self) -> int:
        """The bytes over the link to the host, in both directions together."""
        return self.from_host + self.to_host

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.device + other.device,
            self.from_host + other.from_host,
            self.to_host + other.to_host,
        )


def traffic(instruction: Instruction, within: Computation, program: Program) -> Traffic:
    """Return the bytes that an instruction itself moves.

    A fusion moves the bytes that it reads and writes as a whole. Bytes that the body of a loop, or
    any other called computation, moves are not counted.

    Args:
        instruction: an instruction that is no collective.
        within: the computation that holds it.
        program: the program.
    """
    op = instruction.op
    if op in NO_WORK or op in _CALLERS or op.endswith("-done"):
        return Traffic()
    if op == "async-start":
        inner = program.computations[instruction.called["calls"][0]]
        return sum((traffic(x, inner, program) for x in inner.instructions), Traffic())
    inner = None
    if op in ("fusion", "fusion-start"):
        inner = program.computations[instruction.called["calls"][0]]
        total = _between(_read_by_fusion(inner), _written_by_fusion(inner))
    else:
        total = _between(_read(instruction, within), _written(instruction, within))
    target = _TARGET.search(instruction.text)
    if op == "custom-call" and target and target[1] in _PLACEMENTS:
        return Traffic(total.device)
    if total.crossing and all(map(_only_moves, inner.instructions if inner else [instruction])):
        return dataclasses.replace(total, device=0)
    return total


# Arrays, or slices of arrays: of each the bytes, and whether it is in the host's memory.
_Parts = list[tuple[int, bool]]


def _between(read: _Parts, written: _Parts) -> Traffic:
    return Traffic(
        sum(num for num, on_host in read + written if not on_host),
        sum(num for num, on_host in read if on_host),
        sum(num for num, on_host in written if on_host),
    )


def _parts(shapes: Iterable[Shape]) -> _Parts:
    return [(shape.num_bytes, shape.on_host) for shape in shapes]


def _read(instruction: Instruction, within: Computation) -> _Parts:
    """Return the arrays, or slices of arrays, that an instruction other than a fusion reads.

    Each array or slice is given by its bytes, and by whether it is in the host's memory.
    """
    operands = [within.by_name[x].results for x in instruction.operands if x in within.by_name]
    if instruction.op == "broadcast":
        return []
    if instruction.op == "dynamic-slice":
        return [(instruction.num_bytes, operands[0][0].on_host)]
    if instruction.op == "dynamic-update-slice":
        return _parts(operands[1])
    if instruction.op == "slice" and operands[0][0].on_host:
        return [(instruction.num_bytes, True)]
    return _parts(shape for results in operands for shape in results)


def _written(instruction: Instruction, within: Computation) -> _Parts:
    """Return what an instruction other than a fusion writes, in the form of `_read`."""
    if instruction.op == "dynamic-update-slice":
        update = within.by_name[instruction.operands[1]]
        return [(update.num_bytes, instruction.results[0].on_host)]
    if instruction.op == "copy-start":  # its results are (destination, source, context)
        return _parts(instruction.results[:1])
    return _parts(instruction.results)


def _read_by_fusion(inner: Computation) -> _Parts:
    """Return the arrays, or slices of arrays, that a fusion reads, in the form of `_read`.

    A parameter is read in full, unless the fusion only slices it or updates it in place: then only
    the slices are read. `inner` is the computation of the fusion.
    """
    parts = []
    for parameter in inner.instructions:
        if parameter.op != "parameter":
            continue
        names, users = _users(parameter, inner)
        first = [x for x in users if x.operands[0] in names]  # and do not use it as an index
        sliced = [x for x in first if x.op in ("dynamic-slice", "slice", "gather")]
        updated = [x for x in first if x.op == "dynamic-update-slice"]
        if users and len(sliced) + len(updated) == len(users):
            num_bytes = sum(x.num_bytes for x in sliced)
            parts.append((num_bytes, parameter.results[0].on_host))
        else:
            parts += _parts(parameter.results)
    return parts


def _users(parameter: Instruction, inner: Computation) -> tuple[set[str], list[Instruction]]:
    """Find the instructions of a fusion that use one of its parameters.

    Returns:
        The names of the parameter and of its bitcasts; and the instructions that use any of these.
    """
    names = {parameter.name}
    users = inner.users.get(parameter.name, [])
    while any(x.op == "bitcast" for x in users):
        names |= {x.name for x in users if x.op == "bitcast"}
        users = [
            user
            for x in users
            for user in (inner.users.get(x.name, []) if x.op == "bitcast" else [x])
        ]
    return names, users


def _written_by_fusion(inner: Computation) -> _Parts:
    """Return the arrays, or slices of arrays, that a fusion writes, in the form of `_read`.

    A result is written in full, unless the fusion updates it in place: then only the updated slice
    is written. `inner` is the computation of the fusion.
    """
    root, parts = inner.root, []
    for result in [inner.by_name[x] for x in root.operands] if root.op == "tuple" else [root]:
        source = result
        while source.op in ("bitcast", "copy") and source.operands:
            source = inner.by_name[source.operands[0]]
        updates = source.op == "dynamic-update-slice"
        shape = inner.by_name[source.operands[1]].results[0] if updates else None
        parts.append((shape.num_bytes if shape else source.num_bytes, result.results[0].on_host))
    return parts


def _only_moves(instruction: Instruction) -> bool:
    """Return whether an instruction only moves elements, or computes scalars such as an index."""
    scalars = all(shape.size == 1 for shape in instruction.results)
    return instruction.op in _MOVES or instruction.op in NO_WORK or scalars
