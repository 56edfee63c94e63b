"""Parse compiled HLO into computations, instructions in scheduled order, and operands."""

from __future__ import annotations

import dataclasses
import functools
import re

from .collectives import Shape, shapes

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(
    r"(calls|body|to_apply|condition|branch_computations|true_computation|false_computation)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_BRANCHES = {"true_computation", "false_computation"}  # of a conditional with a predicate
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of compiled HLO: a line `name = results op(operands), attributes`.

    Attributes:
        name: the name of the instruction.
        op: the name of its operation, such as "fusion" or "all-gather-start".
        results: the shapes of its results: of one array, or of several if the result is a tuple.
        operands: the names of the instructions whose results it reads.
        text: the line without `name = `.
        is_root: whether its result is the result of the computation that holds it.
    """

    name: str
    op: str
    results: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        return sum(shape.num_bytes for shape in self.results)

    @functools.cached_property
    def called(self) -> dict[str, list[str]]:
        """The names of the computations that the instruction calls, by attribute, such as `body`.

        All branches of a conditional are under `branch_computations`.
        """
        computations: dict[str, list[str]] = {}
        for kind, names in _CALLED.findall(self.text):
            kind = "branch_computations" if kind in _BRANCHES else kind
            listed = (x.strip(" %") for x in names.strip("{}").split(","))
            computations.setdefault(kind, []).extend(listed)
        return computations

    @property
    def trips(self) -> int | None:
        """The trip count of a loop; None if it is not known."""
        match = _TRIPS.search(self.text)
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation of compiled HLO: a name, and instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {x.name: x for x in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """By the name of each instruction that is read, the instructions that read its result."""
        users: dict[str, list[Instruction]] = {}
        for x in self.instructions:
            for operand in x.operands:
                users.setdefault(operand, []).append(x)
        return users

    @property
    def root(self) -> Instruction:
        return next(x for x in self.instructions if x.is_root)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled module: its computations by name, and `entry`, the one that runs first."""

    entry: Computation
    computations: dict[str, Computation]


def parse(text: str) -> Program:
    """Parse the text of a compiled, scheduled module.

    Raises:
        ValueError: the text has no entry computation, or an instruction cannot be read.
    """
    text = re.sub(r"/\*.*?\*/", "", text)  # long tuples are numbered by comments
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", []
    for line in text.splitlines():
        if match := _HEADER.match(line):
            name, lines = match["name"], []
            entry = name if match["entry"] else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, tuple(lines))
            name = ""
        elif name and (match := _LINE.match(line)):
            lines.append(_instruction(match["name"], match["rest"], bool(match["root"])))
    if not entry:
        raise ValueError("the text has no `ENTRY` computation: it is not a compiled module")
    return Program(computations[entry], computations)


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    match = _OPCODE.match(rest, end)
    if match is None:
        raise ValueError(f"cannot read the instruction {name} = {rest}")
    stop = _closing(rest, match.end() - 1)
    inside = rest[match.end() : stop - 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, match[1], tuple(shapes(rest[:end])), operands, rest, is_root)


def _closing(text: str, start: int) -> int:
    """Return the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i + 1
    raise ValueError(f"a parenthesis is never closed: {text}")
