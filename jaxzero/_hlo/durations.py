"""Durations of a compiled program's instructions, as a profile that XLA's scheduler for GPUs reads.

XLA calls the use of such a profile profile-guided latency estimation (PGLE). Its option
`xla_gpu_pgle_profile_file_or_directory_path` names a file with the protocol buffer
`tensorflow.profiler.ProfiledInstructionsProto`, in which instructions are known by their names.
Each compilation of a program gives them the same names.
"""

from __future__ import annotations

from .cost import Rates, collective_of, collective_seconds
from .instructions import Computation, Instruction, Program, parse
from .timeline import Walk
from .traffic import NO_WORK, traffic


def durations(module: str | Program, rates: Rates) -> str:
    """The predicted duration of each instruction in microseconds, as a profile in text form.

    The duration of an asynchronous collective or copy is that of its start; its end has 0.

    Args:
        module: its scheduled HLO, or what `parse` has read of it.
        rates: of the machine.

    Raises:
        ValueError: the text cannot be read, or a loop's trip count is not known.
    """
    program = parse(module) if isinstance(module, str) else module
    walk = Walk(program, rates)
    computations = program.computations.values()
    fused = {
        name for c in computations for x in c.instructions for name in x.called.get("calls", ())
    }
    return "".join(
        f'costs {{ name: "{x.name}" cost_us: {_seconds(x, within, walk) * 1e6:.6g} }}\n'
        for within in computations
        if within.name not in fused
        for x in within.instructions
        if x.op not in NO_WORK
    )


def _seconds(instruction: Instruction, within: Computation, walk: Walk) -> float:
    if instruction.op.endswith("-done"):
        return 0.0
    collective = collective_of(instruction, walk.program)
    if collective is not None:
        return collective_seconds(collective, walk.rates)
    moved = traffic(instruction, within, walk.program)
    copies = max(moved.from_host, moved.to_host) / walk.rates.host
    line, times = walk.inner(instruction, within)
    return max(copies, line.seconds * times)
