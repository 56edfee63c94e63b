"""The time of kernels that handle messages: that pack, unpack, cast, transpose or add them up.

jaxzero names what it traces around a collective (`jaxzero/gather/...`, `jaxzero/reduce/...`), and
XLA keeps the names. A kernel that has one such operation on an array counts whole, also if XLA has
fused operations of the model into it. A matrix product does not count, although XLA may have fused
into it the reading or the writing of a message: it takes as long without. Neither does a copy that
XLA adds and names after an operation of the model; it shows in all time of compute.
"""

from __future__ import annotations

import re

from jaxzero._hlo import Program, Rates, Timeline
from jaxzero._hlo.cost import flops
from jaxzero._hlo.instructions import Computation, Instruction
from jaxzero._hlo.timeline import Walk
from jaxzero._hlo.traffic import NO_WORK

_OF_MESSAGE = re.compile(r'op_name="[^"]*jaxzero/(?:gather|reduce|exchange)/')


def message_seconds(program: Program, rates: Rates) -> float:
    """Seconds of compute of one run that go into kernels of messages.

    Raises:
        ValueError: a loop's trip count is not known.
    """
    every, others = Walk(program, rates), _OtherKernels(program, rates)
    total, rest = (walk.computation(program.entry).compute_seconds for walk in (every, others))
    return total - rest


class _OtherKernels(Walk):
    """Kernels of messages take no time."""

    def inner(self, instruction: Instruction, within: Computation) -> tuple[Timeline, int]:
        if handles_message(instruction, within, self.program):
            return Timeline(), 1
        return super().inner(instruction, within)


def handles_message(instruction: Instruction, within: Computation, program: Program) -> bool:
    """Whether an instruction that is no collective, loop or call is a kernel of messages."""
    if instruction.op in ("while", "conditional", "call", "call-start"):
        return False
    if flops(instruction, within, program):
        return False
    fused = instruction.op in ("fusion", "fusion-start")
    inner = program.computations[instruction.called["calls"][0]] if fused else None
    return any(
        x.op not in NO_WORK
        and any(shape.size > 1 for shape in x.results)
        and _OF_MESSAGE.search(x.text)
        for x in (inner.instructions if inner else [instruction])
    )
