"""Format names and values that were read from files for messages: on one line, escaped, short.

A file may call a tensor anything: a name of a megabyte, with escape sequences that a terminal
obeys, or a tuple that refers to another tuple a million times. `shown` and `escaped` make every
such value safe to print, in time that does not depend on its size.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

_MAX_CHARACTERS = 200
_MAX_ITEMS = 8
_MAX_DEPTH = 3
_MAX_BITS = 256  # of an integer; converting a longer one to decimal digits takes quadratic time
_BRACKETS = {tuple: "()", list: "[]", set: "{}", frozenset: "{}"}


def shown(value: object) -> str:
    """Format a name or another value for a message, like `repr`.

    Control characters, invisible characters and surrogates are escaped. Values that are too long or
    nest too deeply are cut off with `...`.
    """
    return _cut(_shown(value, _MAX_DEPTH))


def escaped(text: object, *, most: int = _MAX_CHARACTERS) -> str:
    """Format a text for a message without quotes, with the escapes of `shown`.

    Args:
        text: the text, or an object whose `str` is the text.
        most: the number of characters after which a longer text is cut off, with `...`.
    """
    start = str(text)[: most + 1]
    visible = "".join(each if each.isprintable() else repr(each)[1:-1] for each in start)
    return _cut(visible, most)


def first_names(names: Sequence[str]) -> str:
    """Format the first three names of a list, with the number of the remaining ones.

    An example is "'a', 'b', 'c' and 2 more".
    """
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(shown(name) for name in names[:3]) + rest


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True if one of the patterns, in which `*` matches any text, matches the name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def to_download(path: Path) -> str:
    """Return advice to download a model, if a missing path looks like `owner/model`; else ""."""
    parts = path.parts
    if len(parts) != 2 or parts[0] in ("/", ".", "..") or path.exists():
        return ""
    return (
        f" If it is a model on the Hugging Face hub, download it, `hf download {escaped(path)} "
        f"--local-dir {escaped(parts[1])}`, and give the directory {shown(parts[1])}."
    )


def _cut(text: str, most: int = _MAX_CHARACTERS) -> str:
    return text if len(text) <= most else text[:most] + "..."


def _shown(value: object, depth: int) -> str:
    if isinstance(value, str | bytes):
        return repr(value[: _MAX_CHARACTERS + 1])
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, int | float | complex):
        return repr(value)
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, Mapping):
        pairs = (f"{_shown(key, depth - 1)}: {_shown(value[key], depth - 1)}" for key in value)
        return "{" + _joined(pairs, len(value), depth) + "}"
    if type(value) in _BRACKETS:
        opening, closing = _BRACKETS[type(value)]
        items: Iterable = value  # pyright: ignore[reportAssignmentType]
        count = len(value)  # pyright: ignore[reportArgumentType]
        inner = _joined((_shown(item, depth - 1) for item in items), count, depth)
        comma = "," if isinstance(value, tuple) and count == 1 else ""
        return f"{opening}{inner}{comma}{closing}"
    return f"a {type(value).__name__}"


def _joined(items: Iterable[str], count: int, depth: int) -> str:
    if count and depth <= 0:
        return "..."
    shortened = [*itertools.islice(items, _MAX_ITEMS)]
    return ", ".join([*shortened, "..."] if count > _MAX_ITEMS else shortened)
