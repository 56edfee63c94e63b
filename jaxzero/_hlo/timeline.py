"""Predict the timeline of a compiled program as streams of compute, communication and host copies.

The timeline is a model with assumed rates, for comparing programs. Nothing is run. The time of a
kernel depends on its arithmetic and memory traffic only, and links have no traffic of other
programs. Instructions are simulated in the order of the compiler's schedule, on four streams.

- One stream computes.
- One stream runs the collectives, one after the other. An asynchronous collective begins at its
  `-start`, once the stream is free, and compute waits for it at its `-done`. An exchange kernel
  (see `cost`) that runs beside compute, by a `call-start`, is on this stream too: it takes the same
  links. In this module, an exchange is such a kernel.
- One stream copies from the host's memory, and one copies to it, in the same way. Compute waits at
  once for an instruction that reads or writes host memory and is not asynchronous.

The body of a loop is simulated once, with nothing in flight at its start, and multiplied by the
trip count.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

from .collectives import Collective
from .cost import (
    Rates,
    collective_of,
    collective_seconds,
    compute_seconds,
    exchanged_bytes,
    link_bytes,
)
from .instructions import Computation, Instruction, Program, parse
from .traffic import NO_WORK, Traffic, traffic

_Free = dict[str, float]  # for each stream but that of compute, the second at which it is idle


@dataclasses.dataclass
class Timeline:
    """The predicted seconds and bytes of one run on one device.

    Attributes:
        seconds: time from beginning to end.
        compute_seconds: time spent computing.
        communication_seconds: time of collectives and exchanges, hidden behind compute or not.
        exposed_seconds: time for which compute waits for collectives and exchanges.
        launches: number of runs of each collective by its name in HLO, and of exchanges by the name
            "exchange".
        local_bytes: bytes that a device receives inside its node.
        node_bytes: bytes that enter a node, for all its devices.
        asynchronous_bytes: bytes that a device receives in collectives and exchanges with compute
            between their start and their end.
        received_bytes: bytes that a device receives in all collectives and exchanges.
        host_bytes_in: bytes that a device reads from the host's memory.
        host_bytes_out: bytes that a device writes to the host's memory.
        host_seconds: time of copies from and to the host, hidden behind compute or not.
        host_exposed_seconds: time for which compute waits for copies from and to the host.
    """

    seconds: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    exposed_seconds: float = 0.0
    launches: Counter[str] = dataclasses.field(default_factory=Counter)
    local_bytes: float = 0.0
    node_bytes: float = 0.0
    asynchronous_bytes: float = 0.0
    received_bytes: float = 0.0
    host_bytes_in: float = 0.0
    host_bytes_out: float = 0.0
    host_seconds: float = 0.0
    host_exposed_seconds: float = 0.0

    @property
    def asynchronous_share(self) -> float:
        """The share of `asynchronous_bytes` in `received_bytes`; 1 if nothing is received."""
        return self.asynchronous_bytes / self.received_bytes if self.received_bytes else 1.0

    @property
    def hidden_share(self) -> float:
        """The share of `communication_seconds` for which compute does not wait."""
        total = self.communication_seconds
        return 1 - self.exposed_seconds / total if total else 1.0

    @property
    def host_hidden_share(self) -> float:
        """The share of `host_seconds` for which compute does not wait."""
        return 1 - self.host_exposed_seconds / self.host_seconds if self.host_seconds else 1.0

    def add(self, other: Timeline, times: int) -> None:
        """Add the figures of another timeline, run `times` times, to those of this one."""
        for field in dataclasses.fields(self):
            value = getattr(other, field.name)
            if field.name == "launches":
                self.launches.update({key: num * times for key, num in value.items()})
            else:
                setattr(self, field.name, getattr(self, field.name) + value * times)


@dataclasses.dataclass
class _Flight:
    """A collective, an exchange or a copy from or to the host, started and not yet awaited."""

    received: int | None  # bytes from other devices; None for a copy from or to the host
    end: float  # the second at which it ends
    compute_before: float  # seconds of compute before its start


def timeline(module: str | Program, rates: Rates) -> Timeline:
    """Predict the timeline of a compiled module.

    Args:
        module: the scheduled HLO of a module, or the `Program` that `parse` returns for it.
        rates: the rates of the machine.

    Raises:
        ValueError: the text cannot be read, or the trip count of a loop with collectives or host
            copies is not known. Other loops of unknown count are taken to run once.
    """
    program = parse(module) if isinstance(module, str) else module
    return Walk(program, rates).computation(program.entry)


class Walk:
    """Simulates the computations of a program, each of them once.

    Methods extend `line`, the timeline of a computation up to the current instruction. `free` has,
    for each stream other than compute, the second at which it has nothing more to do.

    Attributes:
        program: the parsed module.
        rates: the rates of the machine.
        timelines: by name, the timeline of each computation that has been simulated.
    """

    def __init__(self, program: Program, rates: Rates):
        self.program = program
        self.rates = rates
        self.timelines: dict[str, Timeline] = {}

    def computation(self, within: Computation) -> Timeline:
        """Return the timeline of one run of a computation.

        Raises:
            ValueError: the trip count of a loop with collectives or host copies is not known; or a
                transfer is started and never awaited.
        """
        if within.name not in self.timelines:
            self.timelines[within.name] = self._walk(within)
        return self.timelines[within.name]

    def _walk(self, within: Computation) -> Timeline:
        line = Timeline()
        free: _Free = defaultdict(float)
        flights: dict[str, _Flight] = {}
        for instruction in within.instructions:
            if instruction.op.endswith("-done") and instruction.operands[0] in flights:
                self._land(line, flights.pop(instruction.operands[0]))
                continue
            collective = collective_of(instruction, self.program)
            moved = traffic(instruction, within, self.program)
            begun, received = line.compute_seconds, None
            if collective is not None:
                received = collective.entering_bytes
                end = self._send(line, free, collective)
            elif num_bytes := self._exchanged(instruction, within):
                received = num_bytes
                end = self._exchange(line, free, instruction, num_bytes)
            elif instruction.op == "call-start":  # other compute on a stream of its own
                line.add(*self.inner(instruction, within))
                end = line.seconds
            elif moved.crossing:
                end = self._copy(line, free, moved)
                line.add(*self.inner(instruction, within))
            else:
                line.add(*self.inner(instruction, within))
                continue
            flight = _Flight(received, end, begun)
            if instruction.op.endswith("-start"):
                flights[instruction.name] = flight
            else:
                self._land(line, flight)
        if flights:
            raise ValueError(f"{sorted(flights)} in `{within.name}` are started and never awaited")
        return line

    def _send(self, line: Timeline, free: _Free, collective: Collective) -> float:
        """Put a collective on its stream, and count it in `line`.

        Returns:
            The second at which it ends, which is also put into `free`.
        """
        cost = collective_seconds(collective, self.rates)
        local, node = link_bytes(collective, self.rates)
        line.communication_seconds += cost
        line.launches[collective.op] += 1
        line.local_bytes += local
        line.node_bytes += node
        line.received_bytes += collective.entering_bytes
        free["collectives"] = max(line.seconds, free["collectives"]) + cost
        return free["collectives"]

    def _exchanged(self, instruction: Instruction, within: Computation) -> int:
        """Return the bytes that a device receives in an exchange; 0 for any other instruction."""
        starts = instruction.op == "call-start"
        return exchanged_bytes(instruction, within, self.program) if starts else 0

    def _exchange(
        self, line: Timeline, free: _Free, instruction: Instruction, received: int
    ) -> float:
        """Put an exchange of `received` bytes on the stream of collectives; count it in `line`.

        Returns:
            The second at which it ends, which is also put into `free`.
        """
        called = self.program.computations[instruction.called["to_apply"][0]]
        cost = self.computation(called).seconds
        line.communication_seconds += cost
        line.launches["exchange"] += 1
        line.local_bytes += received
        line.received_bytes += received
        free["collectives"] = max(line.seconds, free["collectives"]) + cost
        return free["collectives"]

    def _copy(self, line: Timeline, free: _Free, moved: Traffic) -> float:
        """Put a copy on the stream from the host, to the host, or both; count it in `line`.

        Returns:
            The second at which it ends. `free` gets the second at which each stream's part ends.
        """
        line.host_bytes_in += moved.from_host
        line.host_bytes_out += moved.to_host
        line.host_seconds += max(moved.from_host, moved.to_host) / self.rates.host
        end = 0.0
        for stream, num_bytes in (("from host", moved.from_host), ("to host", moved.to_host)):
            if num_bytes:
                free[stream] = max(line.seconds, free[stream]) + num_bytes / self.rates.host
                end = max(end, free[stream])
        return end

    def _land(self, line: Timeline, flight: _Flight) -> None:
        """Let compute wait until a transfer has ended, and count the wait in `line`."""
        waited = max(0.0, flight.end - line.seconds)
        line.seconds += waited
        if flight.received is None:
            line.host_exposed_seconds += waited
            return
        line.exposed_seconds += waited
        if line.compute_seconds > flight.compute_before:
            line.asynchronous_bytes += flight.received

    def inner(self, instruction: Instruction, within: Computation) -> tuple[Timeline, int]:
        """Return the timeline of one run of an instruction, and how often it runs.

        The timeline of a loop's run is that of its body, the timeline of a conditional is that of
        its slowest branch, and the timeline of a call is that of the called computation.
        """
        called, computations = instruction.called, self.program.computations
        if instruction.op == "while":
            body = self.computation(computations[called["body"][0]])
            if instruction.trips is None and (body.launches or body.host_seconds):
                raise ValueError(
                    "a loop with collectives or copies from or to the host has no known trip "
                    f"count: {instruction}"
                )
            return body, instruction.trips or 1
        if instruction.op == "conditional":
            branches = called.get("branch_computations", [])
            lines = [self.computation(computations[name]) for name in branches]
            return max(lines, key=lambda x: x.seconds, default=Timeline()), 1
        if instruction.op in ("call", "call-start"):
            return self.computation(computations[called["to_apply"][0]]), 1
        seconds = compute_seconds(instruction, within, self.program, self.rates)
        return Timeline(seconds=seconds, compute_seconds=seconds), 1


def durations(module: str | Program, rates: Rates) -> str:
    """Return the predicted duration of each instruction as a profile that XLA can read.

    The profile is text with a line for each instruction, with its name and its microseconds. XLA
    takes it in place of a measured one (`xla_gpu_pgle_profile_file_or_directory_path`). The
    `-start` of an asynchronous collective or copy has its whole duration, and its `-done` has 0.

    Args:
        module: the scheduled HLO of a module, or the `Program` that `parse` returns for it.
        rates: the rates of the machine.

    Raises:
        ValueError: the text cannot be read, or the trip count of a loop with collectives or host
            copies is not known. Other loops of unknown count are taken to run once.
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
