"""Texts of a checkpoint on a terminal: control characters and the markup of rich do nothing."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from ..._report import TextTable
from ..._text import escaped

_MAX_LINE = 4096  # characters


def line_of(text: str) -> str:
    """Format a line that has names and paths in it."""
    return escape(escaped(text, most=_MAX_LINE))


def print_table(
    headings: tuple[str, ...], rows: Sequence[Sequence[object]], console: Console
) -> None:
    """Print rows of names, shapes and numbers; in time that is linear in their number."""
    texts = [[escaped(cell) for cell in row] for row in rows]
    lines = TextTable(headings=headings, rows=texts).lines(console.width)
    console.out("\n".join(lines), highlight=False)
