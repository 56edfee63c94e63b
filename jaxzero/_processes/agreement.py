"""Operations that succeed on all processes or fail on all of them.

Processes use JAX's coordination service instead of a device collective: it works in any thread,
and a wait for a lost process ends with a timeout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .coordination import exchange_json


class Facts(dict[str, Any]):
    """What this process tells the others: values that JSON can represent, by name.

    Attributes:
        of_all: the facts of each process, by its index, once all have told theirs.
    """

    of_all: list[dict[str, Any]]


@contextlib.contextmanager
def all_succeed(name: str, seconds: float, *, failed: str = "") -> Iterator[Facts]:
    """Exchange facts at the end of the body, and raise on every process if it raised on any.

    Collective. The body may contain collectives only if it runs all of them even after a failure;
    otherwise the other processes deadlock.

    Args:
        name: name of this exchange, equal on all processes.
        seconds: timeout of waiting for the others.
        failed: what the message of the `RuntimeError` begins with, before "process 1: OSError: ".

    Yields:
        The facts of this process, to be filled. After the body `of_all` holds those of each.

    Raises:
        RuntimeError: on the processes that succeeded, if any failed; names process and error. Those
            that failed raise their own error.
        TimeoutError: a process did not take part in time.
    """
    facts, message, error = Facts(), None, None
    try:
        yield facts
    except BaseException as raised:
        error, message = raised, f"{type(raised).__name__}: {raised}"
    reports = exchange_json(name, [message, facts], seconds)
    if error is not None:
        raise error
    reasons = [f"process {i}: {said}" for i, (said, _) in enumerate(reports) if said is not None]
    if reasons:
        raise RuntimeError(failed + "; ".join(reasons))
    facts.of_all = [told for _, told in reports]
