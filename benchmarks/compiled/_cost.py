"""Predict the time of an instruction of a compiled program by a cost model, not by measurement.

Compute takes the maximum of its operations at the rate `flops` and its memory traffic at the rate
`memory`. A collective takes 10 us plus the maximum of the time for the bytes that a device receives
inside its node and of the time for the bytes that enter the node, each of them counted once.
"""

from __future__ import annotations

import dataclasses
import math
import re

from ._hlo import Collective, Shape, collectives
from ._instructions import Computation, Instruction, Program

_FREE = {
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
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s(?:=|":)[{\[]([\d," ]*)[}\]]')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one device, and of a node's link to others; per second.

    Attributes:
        flops: usable in matrix products, 16-bit.
        memory: bytes of its own memory.
        local: bytes received from devices of the node.
        node: bytes that enter a node of `num_local` devices.
        launch: seconds to start a collective.
    """

    flops: float = 700e12
    memory: float = 4.3e12
    local: float = 400e9
    node: float = 50e9
    num_local: int = 8
    launch: float = 10e-6


def compute_seconds(
    instruction: Instruction, within: Computation, program: Program, rates: Rates
) -> float:
    """How long an instruction that is no collective and no loop keeps a device."""
    if instruction.op in _FREE or instruction.op.endswith("-done"):
        return 0.0
    if instruction.op == "async-start":
        inner = program.computations[instruction.called["calls"][0]]
        return sum(compute_seconds(x, inner, program, rates) for x in inner.instructions)
    flops = _flops(instruction, within)
    traffic = sum(_operand_bytes(instruction, within)) + instruction.num_bytes
    if instruction.op in ("fusion", "fusion-start"):
        inner = program.computations[instruction.called["calls"][0]]
        flops = sum(_flops(x, inner) for x in inner.instructions)
        traffic = _fusion_bytes(instruction, within, inner)
    elif instruction.op == "dynamic-slice":
        traffic = 2 * instruction.num_bytes
    elif instruction.op == "dynamic-update-slice":
        traffic = 2 * within.by_name[instruction.operands[1]].num_bytes
    elif instruction.op == "broadcast":
        traffic = instruction.num_bytes
    return max(flops / rates.flops, traffic / rates.memory)


def collective_of(instruction: Instruction, program: Program) -> Collective | None:
    """The collective that an instruction runs or starts."""
    if instruction.op.endswith("-done"):
        return None
    if instruction.op == "async-start":
        inner = program.computations[instruction.called["calls"][0]]
        found = [collective_of(x, program) for x in inner.instructions]
        return next(filter(None, found), None)
    found = collectives(f"%x = {instruction.text}")
    return found[0] if found else None


def link_bytes(collective: Collective, rates: Rates) -> tuple[float, float]:
    """Bytes that a device receives from its node, and that enter a node, in one run."""
    if collective.op == "collective-permute":
        held = collective.entering_bytes
        apart = [a // rates.num_local != b // rates.num_local for a, b in collective.groups]
        return held, held * rates.num_local * sum(apart) / len(apart)
    group = collective.groups[0]
    nodes = len({device // rates.num_local for device in group})
    mine = len(group) // nodes
    in_node = collective.entering_bytes if nodes == 1 else collective.from_parts(mine)
    entering = collective.from_parts(nodes) * (rates.num_local / mine)
    return in_node, entering if nodes > 1 else 0


def collective_seconds(collective: Collective, rates: Rates) -> float:
    """How long a collective keeps its links."""
    local, node = link_bytes(collective, rates)
    return rates.launch + max(local / rates.local, node / rates.node)


def _operand_bytes(instruction: Instruction, within: Computation) -> list[int]:
    return [within.by_name[x].num_bytes for x in instruction.operands if x in within.by_name]


def _flops(instruction: Instruction, within: Computation) -> float:
    """Of a matrix product: two for each element of the result and of the contracted dims."""
    is_gemm = instruction.op == "dot" or "__cublas" in instruction.text
    match = _CONTRACTED.search(instruction.text) if is_gemm else None
    if match is None:
        return 0.0
    left = _shape_of(instruction.operands[0], within)
    dims = [int(dim) for dim in re.findall(r"\d+", match[1])]
    return 2.0 * instruction.results[0].size * math.prod(left.dims[dim] for dim in dims)


def _shape_of(name: str, within: Computation) -> Shape:
    return within.by_name[name].results[0]


def _fusion_bytes(instruction: Instruction, within: Computation, inner: Computation) -> int:
    """What a fusion reads and writes: of what it only slices or updates, that part."""
    total = 0
    parameters = [x for x in inner.instructions if x.op == "parameter"]
    for parameter in parameters:
        users = inner.users.get(parameter.name, [])
        first = [x for x in users if x.operands[0] == parameter.name]  # and no index of it
        sliced = [x for x in first if x.op in ("dynamic-slice", "slice", "gather")]
        updated = [x for x in first if x.op == "dynamic-update-slice"]
        if users and len(sliced) + len(updated) == len(users):
            total += sum(x.num_bytes for x in sliced)
        else:
            total += parameter.num_bytes
    root = inner.root
    roots = [inner.by_name[x] for x in root.operands] if root.op == "tuple" else [root]
    for x in roots:
        while x.op in ("bitcast", "copy") and x.operands:
            x = inner.by_name[x.operands[0]]
        if x.op == "dynamic-update-slice":
            total += _shape_of(x.operands[1], inner).num_bytes
        else:
            total += x.num_bytes
    return total
