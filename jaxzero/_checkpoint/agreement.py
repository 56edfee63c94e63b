"""Processes that save or restore one checkpoint, and go on together or fail together.

They meet through the coordination service and not in a collective of devices: that works in any
thread, and ends after a given time when a process is lost.
"""

from __future__ import annotations

import itertools
from typing import Any

from .._processes import exchange_json

_numbers = itertools.count()


def new_name() -> str:
    """A name for what all processes do next. Each must ask for it in the same order."""
    return f"checkpoint-{next(_numbers)}"


def tell_all(
    name: str, seconds: float, *, error: BaseException | None = None, **facts: Any
) -> list[dict[str, Any]]:
    """Give `facts` to all processes, or an error. Collective.

    Args:
        name: of this meeting.
        seconds: to wait for the others.
        error: what has gone wrong on this process.
        facts: JSON.

    Returns:
        The facts of each process.

    Raises:
        BaseException: `error`, on a process that gave one.
        RuntimeError: on the others, if one gave an error: says which, and what.
        TimeoutError: a process did not come in time.
    """
    said = None if error is None else f"{type(error).__name__}: {error}"
    reports = exchange_json(name, [said, facts], seconds)
    if error is not None:
        raise error
    failed = [f"process {i}: {said}" for i, (said, _) in enumerate(reports) if said is not None]
    if failed:
        raise RuntimeError("; ".join(failed))
    return [facts for _, facts in reports]
