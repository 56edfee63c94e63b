"""List a compiled program's copies from and to host memory: bytes, runs, and what they overlap.

A copy can hide behind compute only if the compiler has scheduled its start and its end apart. The
figure for that is the share of the bytes with a matrix product between the two (`share_spanning`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator

from jaxzero._hlo.cost import collective_of, flops
from jaxzero._hlo.instructions import Computation, Instruction, Program, parse
from jaxzero._hlo.traffic import traffic

_SLICE = re.compile(r'"dynamic_slice_config":')
_FLAT = {"loop_index", "byte_offset", "byte_stride"}  # as the XLA of JAX 0.10.2 writes it


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """One instruction that reads or writes host memory.

    Attributes:
        name: of the instruction, or of the one that starts it.
        from_host: bytes that one run reads from host memory.
        to_host: bytes that one run writes to host memory; if `from_host` is not 0 either, it
            copies from host memory to host memory, by way of the device.
        trips: how often one execution of the program runs it.
        spans: whether a matrix product is scheduled between its start and its end.
        in_loop: whether a loop runs it.
        addresses: of its slices and updates of host memory, what the compiler has annotated
            (`dynamic_slice_config`, JSON); without, an address is computed at run time.
    """

    name: str
    from_host: int
    to_host: int
    trips: int
    spans: bool
    in_loop: bool
    addresses: tuple[str, ...]

    @property
    def total(self) -> int:
        """Bytes over the link to the host in one execution of the program."""
        return (self.from_host + self.to_host) * self.trips


def host_copies(text: str) -> list[HostCopy]:
    """Every copy from or to host memory, in scheduled order, a loop's body at the loop.

    Each branch of a conditional counts as run.

    Args:
        text: the scheduled HLO of a compiled program.

    Raises:
        ValueError: the text cannot be read, a copy is started and never awaited, or it is in a
            loop with no known trip count.
    """
    program = parse(text)
    return list(_copies(program.entry, program, 1, in_loop=False))


def share_spanning(text: str) -> float:
    """Of the bytes from and to host memory, those with a matrix product meanwhile.

    Raises:
        ValueError: as `host_copies`, or there are no such bytes.
    """
    copies = host_copies(text)
    if not copies:
        raise ValueError("`text` has no copies from or to host memory, so no share of them.")
    return sum(x.total for x in copies if x.spans) / sum(x.total for x in copies)


def host_to_host(text: str) -> list[HostCopy]:
    """The copies from host memory to host memory.

    XLA adds one where a program may not write into the buffer it reads, such as a host argument
    that is not donated and is returned with an update; a whole stack may be copied for one row.
    """
    return [x for x in host_copies(text) if x.from_host and x.to_host]


def slice_strides(text: str) -> dict[str, int | None]:
    """For each slice or update of host memory in a loop, the stride that is annotated.

    It is in bytes, of one turn of the loop; None: the address is computed at run time. The XLA of
    JAX 0.10.2 annotates the slice of a scan in reverse with the positive stride of a scan forward,
    and so reads the wrong layers; a negative stride, or None, is right there.

    Raises:
        ValueError: as `host_copies`, or an annotation cannot be read or has several strides.
    """
    found = {}
    for x in host_copies(text):
        if x.in_loop:
            strides = {_stride(address) for address in x.addresses}
            if len(strides) > 1:
                raise ValueError(f"`{x.name}` has slices of several strides: {sorted(strides)}")
            found[x.name] = strides.pop() if strides else None
    return found


def _copies(
    within: Computation, program: Program, trips: int, *, in_loop: bool
) -> Iterator[HostCopy]:
    found: list[HostCopy] = []
    started: dict[str, int] = {}  # and their places in `found`
    for x in within.instructions:
        if x.op.endswith("-done") and x.operands[0] in started:
            del started[x.operands[0]]
            continue
        if _multiplies(x, within, program):
            for place in started.values():
                found[place] = dataclasses.replace(found[place], spans=True)
        found += _in_callees(x, program, trips, in_loop=in_loop)
        moved = traffic(x, within, program)
        if not moved.crossing or collective_of(x, program) is not None:
            continue
        if x.op.endswith("-start"):
            started[x.name] = len(found)
        addresses = tuple(_addresses(x, within, program))
        found.append(
            HostCopy(x.name, moved.from_host, moved.to_host, trips, False, in_loop, addresses)
        )
    if started:
        raise ValueError(f"{sorted(started)} in `{within.name}` are started and never awaited")
    yield from found


def _in_callees(x: Instruction, program: Program, trips: int, *, in_loop: bool) -> list[HostCopy]:
    """Those in the computations that a loop, a conditional or a call runs."""
    found = []
    for name in _callees(x):
        callee, times = program.computations[name], trips * (x.trips or 1)
        found += _copies(callee, program, times, in_loop=in_loop or x.op == "while")
    if found and x.op == "while" and x.trips is None:
        raise ValueError(f"a loop with host copies has no known trip count: {x}")
    return found


def _callees(x: Instruction) -> list[str]:
    kinds = {"while": "body", "conditional": "branch_computations", "call": "to_apply"}
    return x.called.get(kinds.get(x.op, ""), [])


def _multiplies(x: Instruction, within: Computation, program: Program) -> bool:
    """Whether an instruction computes a matrix product, itself or in what it calls."""
    if flops(x, within, program):
        return True
    names = x.called["calls"] if x.op == "async-start" else _callees(x)
    inner = [program.computations[name] for name in names]
    return any(_multiplies(y, called, program) for called in inner for y in called.instructions)


def _addresses(x: Instruction, within: Computation, program: Program) -> Iterator[str]:
    """The annotations of the slices and updates of host memory that an instruction is or holds."""
    if x.op in ("dynamic-slice", "dynamic-update-slice") and traffic(x, within, program).crossing:
        for match in _SLICE.finditer(x.text):
            _, end = json.JSONDecoder().raw_decode(x.text, match.end())
            yield x.text[match.end() : end]
    for name in x.called.get("calls", ()):
        inner = program.computations[name]
        for y in inner.instructions:
            yield from _addresses(y, inner, program)


def _stride(address: str) -> int:
    config = json.loads(address)
    if "linear" in config:  # as the XLA of JAX 0.12.0.1 writes it
        return int(config["linear"]["byte_stride"])
    if set(config) <= _FLAT and "byte_stride" in config:
        return int(config["byte_stride"])
    raise ValueError(f"cannot read the stride of a slice: {address}")
