"""Read shapes and collectives from compiled HLO, with execution counts and replica groups."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter

import numpy as np

_BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}
_SHAPE = re.compile(r"\b(pred|bf16|f[48]e\w+|[fsuc]\d+)\[([\d,]*)\](?:\{([^}]*)\})?")
# In a layout: XLA's `Layout::kHostMemorySpace`, and elements of 4 bits without padding.
_IN_HOST_MEMORY, _PACKED = "S(5)", "E(4)"
_COLLECTIVE = re.compile(
    r"= (?P<result>[^=]*?) "
    r"(?P<op>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
# Two numbers that XLA for TPUs may add to the result of a `collective-permute-start`.
_CONTEXTS = re.compile(r"(, u32\[\](\{[^}]*\})?){2}\)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_LOOP = re.compile(r"body=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CALLS = re.compile(
    r"(?:to_apply|calls|true_computation|false_computation|called_computations)=\{?%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(  # a mesh of devices, perhaps in another order, and the axes of a group
    r"replica_groups=mesh\[(?P<mesh>[^\]]*)\]"
    r"(?:, device_ids=\(\[(?P<iota>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))? \{(?P<axes>[^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's element type, dims and memory, as written in HLO.

    Attributes:
        dtype: the element type, such as "bf16".
        dims: the size of each dim.
        on_host: whether the array is in host memory.
        is_packed: whether two elements of 4 bits share a byte; otherwise each takes a byte.
    """

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False
    is_packed: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        if self.dtype.startswith("f8"):
            return self.size
        bits = re.fullmatch(r"f(4)e\w+|[fsu](\d+)", self.dtype)
        if bits is None:
            return self.size * _BYTES[self.dtype]
        element = int(bits[1] or bits[2])
        return math.ceil(self.size * (element if self.is_packed else max(element, 8)) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.dims)}"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program.

    Attributes:
        op: the name of the operation in HLO, such as "all-gather", without "-start".
        results: shapes of its results on one device.
        groups: the devices of each group; for a permutation, pairs of sender and receiver.
        trips: how often it runs in one execution of the program.
        line: the line of HLO that holds the instruction.
    """

    op: str
    results: tuple[Shape, ...]
    groups: tuple[tuple[int, ...], ...]
    trips: int
    line: str

    @property
    def entering_bytes(self) -> int:
        """The bytes that one device receives in one run, if no byte is sent twice.

        An all-reduce is counted as a reduce-scatter and an all-gather.
        """
        return self.from_parts(len(self.groups[0]))

    def node_bytes(self, num_local: int) -> int:
        """Return how many of the `entering_bytes` come from other nodes.

        A node has `num_local` devices.
        """
        return self.from_parts(len({device // num_local for device in self.groups[0]}))

    def crosses(self, num_local: int) -> bool:
        """Return whether any group spans several nodes of `num_local` devices each."""
        return any(len({device // num_local for device in group}) > 1 for group in self.groups)

    def from_parts(self, parts: int) -> int:
        """Return the bytes that a device receives from outside of its own part of a group.

        The group is cut into `parts` equal parts. If each device is a part, the result is all bytes
        that a device receives; if each node is a part, the bytes that come from other nodes.
        """
        held = sum(shape.num_bytes for shape in self.results)
        if self.op == "collective-permute":
            return held if parts > 1 else 0
        if self.op == "reduce-scatter":
            # Its result is one part of what is summed.
            held *= len(self.groups[0])
        if self.op == "all-reduce":
            # A reduce-scatter, and an all-gather of what it leaves.
            held *= 2
        return held * (parts - 1) // parts


def shapes(text: str) -> list[Shape]:
    """Return every array shape that occurs in a piece of HLO, in order."""
    return [
        Shape(
            dtype,
            tuple(int(dim) for dim in dims.split(",") if dim),
            on_host=_IN_HOST_MEMORY in layout,
            is_packed=_PACKED in layout,
        )
        for dtype, dims, layout in _SHAPE.findall(text)
    ]


def floats_of_at_least(text: str, size: int) -> list[str]:
    """Return the lines of HLO that hold a floating-point array of `size` elements or more.

    Lines of computations that nothing calls are left out: XLA for CPUs leaves such computations in
    the text.
    """
    mentions = Counter(re.findall(r"%[\w.-]+", text))
    lines, is_called = [], True
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            is_called = line.startswith("ENTRY") or mentions["%" + match["name"]] > 1
        large = any(shape.size >= size and "f" in shape.dtype for shape in shapes(line))
        if is_called and large:
            lines.append(line.strip())
    return lines


def collectives(text: str) -> list[Collective]:
    """Return every collective of a compiled program, given as text.

    The text may also be a few lines of a program. Then each collective counts as run once.
    """
    text = re.sub(r"/\*.*?\*/", "", text)  # long tuples are numbered by comments
    trips = _trips(text)
    collected, computation = [], ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match["name"]
        if match := _COLLECTIVE.search(line):
            results = tuple(shapes(match["result"]))
            # The result of a start repeats the operands; that of an all-reduce only in newer
            # versions of XLA, which write them as a tuple of their own.
            if match["op"] == "collective-permute" and _CONTEXTS.search(match["result"]):
                results = results[:-2]
            if "-start(" in line and (match["op"] != "all-reduce" or "((" in match["result"]):
                results = results[len(results) // 2 :]
            times = trips[computation] if trips else 1
            collected.append(Collective(match["op"], results, _groups(line), times, line.strip()))
    return collected


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    if match := _PAIRS.search(line):
        pairs = re.findall(r"(\d+),(\d+)", match[1])
        return tuple((int(source), int(target)) for source, target in pairs)
    if match := _LISTED.search(line):
        inner = re.findall(r"\{([\d,]*)\}", match[1])
        return tuple(tuple(int(device) for device in group.split(",")) for group in inner)
    if match := _COUNTED.search(line):
        shape, reshape = (tuple(int(n) for n in match[i].split(",")) for i in (1, 2))
        devices = np.arange(math.prod(reshape)).reshape(reshape)
        if match[3]:
            devices = devices.transpose([int(dim) for dim in match[3].split(",")])
        return tuple(tuple(group) for group in devices.reshape(shape).tolist())
    if match := _NAMED.search(line):
        mesh = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match["mesh"])}
        devices = np.arange(math.prod(mesh.values()))
        if match["iota"]:
            devices = devices.reshape([int(n) for n in match["iota"].split(",")])
        if match["order"]:
            devices = devices.transpose([int(dim) for dim in match["order"].split(",")])
        devices = devices.reshape(tuple(mesh.values()))
        within = [list(mesh).index(axis.strip("' ")) for axis in match["axes"].split(",")]
        devices = np.moveaxis(devices, within, range(-len(within), 0))
        size = math.prod(devices.shape[-len(within) :])
        return tuple(tuple(group) for group in devices.reshape(-1, size).tolist())
    if "replica_groups=" in line:
        raise ValueError(f"cannot read who takes part: {line.strip()}")
    return ()


def _trips(text: str) -> Counter[str]:
    """Return how often each computation of a program's text runs, by the computation's name.

    Loops and calls are followed from the entry computation.

    Raises:
        ValueError: the trip count of a loop with collectives is not known.
    """
    callees: dict[str, list[tuple[str, int]]] = {}
    entry = computation = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match["name"]
            entry = computation if match[1] else entry
            callees[computation] = []
            continue
        if not computation:
            continue
        if loop := _LOOP.search(line):
            count = _TRIPS.search(line)
            if count is None and _COLLECTIVE.search(_body_of(text, loop[1])):
                raise ValueError(f"a loop with collectives has no known trip count: {line.strip()}")
            callees[computation].append((loop[1], int(count[1]) if count else 1))
        callees[computation] += [(name, 1) for name in _CALLS.findall(line)]
        for names in _BRANCHES.findall(line):
            callees[computation] += [(name.strip(" %"), 1) for name in names.split(",")]
    total: Counter[str] = Counter()

    def run(name: str, times: int) -> None:
        total[name] += times
        for callee, trips in callees.get(name, ()):
            run(callee, times * trips)

    if entry:
        run(entry, 1)
    return total


def _body_of(text: str, name: str) -> str:
    match = re.search(rf"^%?{re.escape(name)} \(.*?^\}}", text, re.MULTILINE | re.DOTALL)
    return match[0] if match else ""
