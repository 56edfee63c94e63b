"""Tables of plain text that fit a terminal: names stay whole, headings take one line.

A name that is too long for its column takes a line of its own, and the cells follow on the next.
Only text that is wider than the terminal is wrapped, after a dot, a comma or a space.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

_GAP = "  "
_LEAST = 6  # columns that a cell keeps, however narrow the terminal


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table whose first column holds names.

    Attributes:
        title: a line above the table; "" for none.
        headings: headings of all columns.
        rows: cells, as many as `headings`.
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
        """The table as lines of at most `width` columns."""
        widths = self._widths(width)
        found = wrapped(self.title, width) if self.title else []
        found += _row_lines(self.headings, self.headings, widths, width)
        found.append("-" * min(width, sum(widths) + len(_GAP) * (len(widths) - 1)))
        notes = self.notes or ("",) * len(self.rows)
        for row, note in zip(self.rows, notes, strict=True):
            found += _row_lines(row, self.headings, widths, width)
            found += [f"  {line}" for line in wrapped(note, width - 2)] if note else []
        for line in self.footer:
            found += wrapped(line, width)
        return [line.rstrip() for line in found]

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
    """`text` as lines of at most `width` columns, broken at a space, else after `.`, `,` or `_`."""
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
    """Cut a word into pieces of at most `width` columns, after `.`, `,` or `_` where possible."""
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
