"""Reading compiled HLO: the shapes in it, and the collectives."""

import dataclasses
import math
import re

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
_SHAPE = re.compile(r"\b(pred|bf16|f8e\w+|[fsuc]\d+)\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r"= (?P<result>[^=]*?) "
    r"(?P<op>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's element type and dims, as HLO writes them."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        return self.size * _BYTES.get(self.dtype, 1)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.dims)}"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program: what it is, and what it leaves on one device."""

    op: str
    results: tuple[Shape, ...]
    line: str


def shapes(text: str) -> list[Shape]:
    """Every array shape that occurs in a piece of HLO, in order."""
    return [
        Shape(dtype, tuple(int(dim) for dim in dims.split(",") if dim))
        for dtype, dims in _SHAPE.findall(text)
    ]


def floats_of_at_least(text: str, size: int) -> list[str]:
    """The lines that hold a floating-point array of `size` elements or more."""
    return [
        line.strip()
        for line in text.splitlines()
        if any(shape.size >= size and "f" in shape.dtype for shape in shapes(line))
    ]


def collectives(text: str) -> list[Collective]:
    """Every collective in a piece of HLO; one in a loop body counts once."""
    found = []
    for line in text.splitlines():
        if match := _COLLECTIVE.search(line):
            results = tuple(shapes(match["result"]))
            found.append(Collective(match["op"], results, line.strip()))
    return found
