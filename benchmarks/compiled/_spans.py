"""Which collectives of a compiled program cross between nodes, and which loops they span."""

from __future__ import annotations

import dataclasses

from jaxzero._hlo.cost import Rates, collective_of, link_bytes
from jaxzero._hlo.instructions import Computation, Instruction, Program, parse


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A collective between nodes.

    Attributes:
        name: of the instruction.
        op: such as "all-gather".
        node_bytes: bytes that enter a node each time it runs.
        trips: how often it runs.
        spans: trip counts of the loops between its start and its end.
    """

    name: str
    op: str
    node_bytes: float
    trips: int
    spans: tuple[int, ...]


def crossings(text: str, num_local: int) -> list[Crossing]:
    """The collectives of a scheduled module that cross between nodes of `num_local` devices.

    Raises:
        ValueError: the text cannot be read, or the trip count of a loop is not known.
    """
    program = parse(text)
    return _crossings(program.entry, program, Rates(num_local=num_local), 1)


def num_asynchronous(text: str) -> int:
    """The collectives in the text that are started and awaited by two instructions."""
    program = parse(text)
    return sum(
        x.op.endswith("-start") and collective_of(x, program) is not None
        for computation in program.computations.values()
        for x in computation.instructions
    )


def _crossings(within: Computation, program: Program, rates: Rates, trips: int) -> list[Crossing]:
    found = []
    for position, x in enumerate(within.instructions):
        collective = collective_of(x, program)
        if collective is not None:
            node_bytes = link_bytes(collective, rates)[1]
            if node_bytes:
                spans = tuple(_loops_until_done(within, position))
                found.append(Crossing(x.name, collective.op, node_bytes, trips, spans))
        elif x.op == "while":
            inner = program.computations[x.called["body"][0]]
            found += _crossings(inner, program, rates, trips * _trips(x))
        elif x.op in ("call", "conditional"):
            names = x.called.get("branch_computations", x.called.get("to_apply", []))
            for name in names:
                found += _crossings(program.computations[name], program, rates, trips)
    return found


def _loops_until_done(within: Computation, position: int) -> list[int]:
    """The trip counts of the loops after an instruction and before the one that awaits it."""
    start, loops = within.instructions[position], []
    if not start.op.endswith("-start"):
        return []
    for x in within.instructions[position + 1 :]:
        if start.name in x.operands and x.op.endswith("-done"):
            return loops
        if x.op == "while":
            loops.append(_trips(x))
    raise ValueError(f"`{start.name}` is started and never awaited")


def _trips(loop: Instruction) -> int:
    if loop.trips is None:
        raise ValueError(f"the trip count of a loop is not known: {loop.name}")
    return loop.trips
