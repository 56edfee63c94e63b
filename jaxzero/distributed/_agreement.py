"""Check that all processes have equal settings and data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from .._processes import describe_process, exchange, exchange_json

_SHOWN = 200  # characters of a value in a message


def check_same(*, seconds: float = 60.0, **values: Any) -> None:
    """Compare values, such as settings, seeds and digests of data, over all processes.

    All processes must call it.

    Args:
        seconds: how long to wait for the other processes.
        **values: values that JSON can represent, or that are identified by their `repr`. Dicts are
            compared entry by entry, and the message names the entry.

    Raises:
        ValueError: a value differs. Raised on all processes, with its name and both values.
        TimeoutError: a process did not take part.
    """
    entries = {".".join(path): _text(value) for path, value in _flat(values)}
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    if len(set(exchange("check_same", digest, seconds))) == 1:
        return
    raise ValueError(_difference(exchange_json("check_same", entries, seconds)))


def _difference(reports: list[dict[str, str]]) -> str:
    first = reports[0]
    for index, other in enumerate(reports[1:], start=1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                return (
                    f"`{name}` is {_short(other.get(name))} in {describe_process(index)} and "
                    f"{_short(first.get(name))} in {describe_process(0)}. It must be equal in all "
                    "processes of a run."
                )
    raise AssertionError("digests differ, entries do not")


def _flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) for the entries of nested dicts."""
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, item in value.items():
        yield from _flat(item, (*path, str(key)))


def _text(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except TypeError:
        return repr(value)


def _short(text: str | None) -> str:
    if text is None:
        return "missing"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
