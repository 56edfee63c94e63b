"""Lists of names in messages."""

from __future__ import annotations


def some(names: list[str]) -> str:
    """The first names of a list, for a message."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + rest
