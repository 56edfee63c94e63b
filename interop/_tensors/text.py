"""Lists of names in messages."""

from __future__ import annotations


def first_names(names: list[str]) -> str:
    """Format the first three names of a list, and the number of the others."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + rest
