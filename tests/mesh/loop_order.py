"""Find collectives of a compiled module that XLA:CPU may run beside a loop with collectives."""

from __future__ import annotations

from typing import Any

from tests import zoo

COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}


def side_by_side(text: str) -> list[str]:
    """Pairs of a loop (or conditional) with collectives and something else with collectives.

    Neither of a pair depends on data of the other. XLA:CPU runs the collectives of a computation
    in turn, so two of these are no pair.
    """
    program = zoo.hlo_program(text)
    found = []
    for computation in program.computations.values():
        busy = [x for x in computation.instructions if _communicates(program, x)]
        before: dict[str, set[str]] = {}
        for x in computation.instructions:
            before[x.name] = {x.name}.union(*(before.get(name, ()) for name in x.operands))
        for i, first in enumerate(busy):
            for second in busy[i + 1 :]:
                is_loop = {first.op, second.op} - COLLECTIVES
                if is_loop and first.name not in before[second.name]:
                    found.append(f"{first.name} and {second.name} in {computation.name}")
    return found


def num_loops(text: str) -> int:
    """The number of loops and conditionals with collectives."""
    program = zoo.hlo_program(text)
    instructions = [x for each in program.computations.values() for x in each.instructions]
    return sum(x.op not in COLLECTIVES and _communicates(program, x) for x in instructions)


def _communicates(program: Any, instruction: Any) -> bool:
    if instruction.op in COLLECTIVES:
        return True
    names = [name for names in instruction.called.values() for name in names]
    return any(
        _communicates(program, x)
        for name in names
        if name in program.computations
        for x in program.computations[name].instructions
    )
