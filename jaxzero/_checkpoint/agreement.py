"""Exchange results between processes, so that a save or restore succeeds or fails on all of them.

Processes use JAX's coordination service instead of a device collective: it works in any thread,
and a wait for a lost process ends with a timeout.
"""

from __future__ import annotations

import itertools
from typing import Any

from .._processes import exchange_json

_numbers = itertools.count()


def new_name() -> str:
    """Return a unique name for the next operation; processes must call this in the same order."""
    return f"checkpoint-{next(_numbers)}"


def tell_all(
    name: str, seconds: float, *, error: BaseException | None = None, **facts: Any
) -> list[dict[str, Any]]:
    """Send `facts` or an error to all processes, and receive theirs. Collective.

    Args:
        name: unique name of this exchange, equal on all processes.
        seconds: timeout of waiting for the others.
        error: the error of this process, if it failed.
        facts: values that JSON can represent.

    Returns:
        The facts of each process.

    Raises:
        BaseException: `error`, on a process that passed one.
        RuntimeError: on the other processes, if any passed an error; names process and error.
        TimeoutError: a process did not take part in time.
    """
    message = None if error is None else f"{type(error).__name__}: {error}"
    reports = exchange_json(name, [message, facts], seconds)
    if error is not None:
        raise error
    failed = [f"process {i}: {m}" for i, (m, _) in enumerate(reports) if m is not None]
    if failed:
        raise RuntimeError("; ".join(failed))
    return [facts for _, facts in reports]
