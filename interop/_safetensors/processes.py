"""Agreement between processes that write one checkpoint: names, and success or failure.

Processes communicate through JAX's coordination service, which supports timeouts; a device
collective would deadlock if a process is lost.
"""

import contextlib
import json
import uuid
from collections.abc import Iterator

from jaxzero._processes import exchange, of_first

_NAME = "writing a checkpoint"
_SECONDS = 3600.0  # timeout: processes may take very different times to write their files


def shared_mark() -> str:
    """Draw eight random hexadecimal digits, equal on all processes. Collective."""
    return of_first(_NAME, uuid.uuid4().hex[:8], _SECONDS)


def sum_of_all(number: int) -> int:
    """Add up the numbers of all processes. Collective."""
    return sum(int(text) for text in exchange(_NAME, str(number), _SECONDS))


@contextlib.contextmanager
def all_succeed(what: str) -> Iterator[None]:
    """Raise on every process if the body raised on any. Collective.

    The body may contain collectives only if it runs all of them even after a failure; otherwise
    the other processes deadlock.

    Args:
        what: the operation, as the subject of the message: `Writing 'export'`.

    Raises:
        RuntimeError: on the processes that succeeded; those that failed raise their own error.
        TimeoutError: a process is lost, or an hour behind.
    """
    error = None
    try:
        yield
    except BaseException as raised:
        error = raised
    reports = exchange(_NAME, json.dumps(error is not None), _SECONDS)
    if error is not None:
        raise error
    failed = [str(number) for number, text in enumerate(reports) if json.loads(text)]
    if failed:
        raise RuntimeError(
            f"{what} failed on process {', '.join(failed)}; see the error of that process. "
            "Nothing was written."
        )
