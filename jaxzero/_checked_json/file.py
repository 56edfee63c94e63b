"""Read a JSON object from a regular file of bounded size and depth."""

import json
from pathlib import Path
from typing import Any

from .._regular_file import IrregularFile, read_regular

MOST_BYTES = 2**24  # configurations have some kilobytes, with long vocabularies some megabytes
MOST_LEVELS = 64  # of nesting


def read_json(path: Path, *, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Values are not checked: NaN and Infinity are read as Python reads them, so that `JsonKeys` can
    name the key that holds them.

    Args:
        path: of the file.
        remedy: what to do about a damaged file, for messages.

    Raises:
        ValueError: it is not a regular file (but a directory, pipe or device), is larger than 16
            MiB, is not JSON in UTF-8, nests deeper than 64 levels, holds a key twice, or is not an
            object.
        OSError: it cannot be read.
    """
    try:
        text = read_regular(path, MOST_BYTES).decode()
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except IrregularFile:
        raise
    except IsADirectoryError as error:
        raise ValueError(f"{str(path)!r} is a directory, not a JSON file. {remedy}") from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON ({error}). {remedy}") from error
    except RecursionError:
        raise ValueError(_too_deep(path, remedy)) from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{str(path)!r} must hold a JSON object; got {type(content).__name__}. {remedy}"
        )
    level, levels = [content], 0
    while level := [child for each in level for child in _containers(each)]:
        levels += 1
        if levels >= MOST_LEVELS:
            raise ValueError(_too_deep(path, remedy))
    return content


def _containers(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list)]


def _too_deep(path: Path, remedy: str) -> str:
    return f"{str(path)!r} nests objects or lists deeper than {MOST_LEVELS} levels. {remedy}"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the key {name[:80]!r} is there twice")
        content[name] = value
    return content
