"""Texts of a checkpoint on a terminal: control characters and the markup of rich do nothing."""

from rich.markup import escape

from ..._text import escaped

_MAX_LINE = 4096  # characters


def word_of(value: object) -> str:
    """Format a name or a shape for a table."""
    return escape(escaped(value))


def line_of(text: str) -> str:
    """Format a line that has names and paths in it."""
    return escape(escaped(text, most=_MAX_LINE))
