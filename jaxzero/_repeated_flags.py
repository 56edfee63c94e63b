"""Refuse a flag that is given twice: tyro takes the last value, and drops the first in silence."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

from tyro.conf import Positional, UseAppendAction


def check_repeated(arguments: Sequence[str], settings: Any) -> None:
    """Raise `ValueError` for a flag with one value that a command line gives several times.

    Args:
        arguments: a command line; words after `--` are not looked at.
        settings: the dataclass of settings that it is parsed to. Flags that collect values
            (`UseAppendAction`), and those without one, may be repeated.
    """
    single = set(_single(settings))
    given = defaultdict(list)
    for number, word in enumerate(arguments):
        if word == "--":
            break
        flag, has_value, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in single:
            given[flag].append(value if has_value else " ".join(arguments[number + 1 :][:1]))
    for flag, values in given.items():
        if len(values) > 1:
            raise ValueError(
                f"`{flag}` is given {len(values)} times, with {', '.join(map(repr, values))}. Give "
                "it once."
            )


def _single(settings: Any) -> Iterator[str]:
    """Flags of fields, nested ones included, of which only the last value would be kept."""
    hints = get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        kind = hints[field.name]
        marks = getattr(kind, "__metadata__", ())
        if dataclasses.is_dataclass(kind):
            yield from _single(kind)
        elif kind is not bool and UseAppendAction not in marks and Positional not in marks:
            yield f"--{field.name.replace('_', '-')}"
