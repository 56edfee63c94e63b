"""Print tables of plain text that fit a terminal: names stay whole, headings take one line.

Rows become one row if their cells are equal and their names differ in one number only: then
`layers[0..23].mlp.up` stands for 24 leaves. Names are not shortened in any other way.

A name that is too long for its column takes a line of its own, and the cells follow on the next.
Only text that is wider than the terminal is wrapped, after a dot, a comma or a space.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

_GAP = "  "
_LEAST = 6  # characters that a column keeps, however narrow the terminal

_Component = str | tuple[int, ...]  # of a path; a tuple stands for several numbers
_Path = tuple[_Component, ...]
_Row = tuple[tuple[_Path, ...], tuple[str, ...], tuple[int, ...]]  # names, cells, members


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table whose first column holds names.

    Attributes:
        title: a line above the table; "" for none.
        headings: headings of all columns.
        rows: for each row its cells, as many as `headings`.
        notes: for each row, text to print indented below it, such as the leaves of a bucket; empty
            if there are no notes.
        footer: lines below the table.
    """

    title: str = ""
    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    footer: tuple[str, ...] = ()

    def lines(self, width: int) -> list[str]:
        """Return the table as lines of at most `width` characters."""
        widths = self._widths(width)
        text = wrapped(self.title, width) if self.title else []
        text += _row_lines(self.headings, self.headings, widths, width)
        text.append("-" * min(width, sum(widths) + len(_GAP) * (len(widths) - 1)))
        notes = self.notes or ("",) * len(self.rows)
        for row, note in zip(self.rows, notes, strict=True):
            text += _row_lines(row, self.headings, widths, width)
            text += [f"  {line}" for line in wrapped(note, width - 2)] if note else []
        for line in self.footer:
            text += wrapped(line, width)
        return [line.rstrip() for line in text]

    def without(self, heading: str) -> TextTable:
        """Return the table without the column of a heading."""
        i = self.headings.index(heading)
        headings, *rows = [(*row[:i], *row[i + 1 :]) for row in (self.headings, *self.rows)]
        return dataclasses.replace(self, headings=headings, rows=rows)

    def _widths(self, width: int) -> list[int]:
        table = [self.headings, *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.headings))]
        gaps = len(_GAP) * (len(widths) - 1)
        least = [max(len(heading), _LEAST) for heading in self.headings]
        while sum(widths[1:]) + least[0] + gaps > width:
            widest = max(range(1, len(widths)), key=lambda i: widths[i] - least[i])
            if widths[widest] <= least[widest]:
                break
            widths[widest] -= 1
        widths[0] = min(widths[0], max(least[0], width - sum(widths[1:]) - gaps))
        return widths


def wrapped(text: str, width: int) -> list[str]:
    """Break text into lines of at most `width` characters: at spaces, else after `.`, `,`, `_`."""
    lines, line = [], ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if len(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        *full, line = _pieces(word, width)
        lines += full
    return [*lines, line]


def _pieces(word: str, width: int) -> list[str]:
    """Cut a word into pieces of at most `width` characters, after `.`, `,` or `_` if possible."""
    pieces = [""]
    for part in re.findall(r"[^.,_]*[.,_]|[^.,_]+", word):
        for start in range(0, len(part), width):
            chunk = part[start : start + width]
            if len(pieces[-1]) + len(chunk) <= width:
                pieces[-1] += chunk
            else:
                pieces.append(chunk)
    return pieces


def _row_lines(
    row: Sequence[str], headings: Sequence[str], widths: list[int], width: int
) -> Iterator[str]:
    name, *cells = row
    if len(name) > widths[0]:
        yield from wrapped(name, width)
        name = ""
    columns = [[name], *(wrapped(cell, w) for cell, w in zip(cells, widths[1:], strict=True))]
    for i in range(max(map(len, columns))):
        texts = [column[i] if i < len(column) else "" for column in columns]
        yield _GAP.join(
            text.rjust(w) if heading in _NUMBERS else text.ljust(w)
            for text, heading, w in zip(texts, headings, widths, strict=True)
        )


_NUMBERS = {  # headings of columns that are aligned on the right
    "bytes",
    "each device",
    "elements",
    "in host memory",
    "in total",
    "into device",
    "leaves",
    "micro-batch",
    "num",
    "over local",
    "over node",
    "padding",
    "times",
    "to device",
    "to host",
    "whole",
}


@dataclasses.dataclass(frozen=True)
class NamedRow:
    """A row that `merge_layers` has made of one or several rows.

    Attributes:
        names: names of the leaves in the row, each of which may stand for several layers.
        cells: the cells of the other columns.
        members: the indices of the given rows that became this row.
    """

    names: tuple[str, ...]
    cells: tuple[str, ...]
    members: tuple[int, ...]


def merge_layers(rows: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[NamedRow]:
    """Join rows that are equal, or that differ only in one number in their names.

    If rows have several names, all names of a row must have the same number in the same place.

    Args:
        rows: `(names, cells)` of each row.

    Returns:
        The joined rows, in the order of their first members.
    """
    equal: dict[tuple, list[int]] = {}
    for index, (names, cells) in enumerate(rows):
        paths = tuple(tuple(name.split(".")) for name in names)
        equal.setdefault((paths, tuple(cells)), []).append(index)
    merged: list[_Row] = [(*row, tuple(members)) for row, members in equal.items()]
    depth = max((len(path) for paths, _, _ in merged for path in paths), default=0)
    for place in reversed(range(depth)):
        merged = _merge_at(place, merged)
    return [NamedRow(tuple(map(_text, paths)), cells, each) for paths, cells, each in merged]


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers as sorted text with runs joined: "0..3,5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def summarized(names: Sequence[str]) -> str:
    """Name several leaves by their common path; without one, by "first and 3 more"."""
    names = tuple(dict.fromkeys(names))
    if len(names) == 1:
        return names[0]
    paths = [name.split(".") for name in names]
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == paths[0][shared] for p in paths):
        shared += 1
    if shared:
        return f"{'.'.join(paths[0][:shared])} ({len(names)} leaves)"
    return f"{names[0]} and {len(names) - 1} more"


def _merge_at(place: int, rows: list[_Row]) -> list[_Row]:
    """Join rows whose names differ only in the component number `place`, if it is a number."""
    groups: dict[tuple, list] = {}
    for paths, cells, members in rows:
        number = _shared_number(paths, place)
        key = (paths, cells) if number is None else (_without(paths, place), cells, place)
        groups.setdefault(key, []).append((number, paths, cells, members))
    merged: list[_Row] = []
    for group in groups.values():
        numbers = [number for number, *_ in group]
        if len(group) == 1 or None in numbers or len(set(numbers)) < len(group):
            merged += [(paths, cells, members) for _, paths, cells, members in group]
            continue
        _, paths, cells, _ = group[0]
        together = tuple((*path[:place], tuple(numbers), *path[place + 1 :]) for path in paths)
        merged.append((together, cells, tuple(i for *_, members in group for i in members)))
    return sorted(merged, key=lambda row: min(row[2]))


def _shared_number(paths: tuple[_Path, ...], place: int) -> int | None:
    """Return component `place` of the paths if it is one number in all of them, else None."""
    components = {path[place] if len(path) > place else None for path in paths}
    one = next(iter(components)) if len(components) == 1 else None
    return int(one) if isinstance(one, str) and one.isdecimal() else None


def _without(paths: tuple[_Path, ...], place: int) -> tuple[_Path, ...]:
    return tuple((*path[:place], "", *path[place + 1 :]) for path in paths)


def _text(path: _Path) -> str:
    text = ""
    for component in path:
        if isinstance(component, tuple):
            text += f"[{ranges(component)}]"
        else:
            text += f".{component}" if text else component
    return text
