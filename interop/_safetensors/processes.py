"""Several processes that write one thing: agreeing on names, and on whether all has gone well.

They meet through the coordination service, whose waits have an end; a collective of devices would
wait for ever for a process that is lost.
"""

import contextlib
import json
import uuid
from collections.abc import Iterator

from jaxzero._processes import exchange, of_first

_NAME = "writing a checkpoint"
_SECONDS = 3600.0  # that one process may take longer than another to write its files


def shared_mark() -> str:
    """Eight random hexadecimal digits, the same on every process. Collective."""
    return of_first(_NAME, uuid.uuid4().hex[:8], _SECONDS)


@contextlib.contextmanager
def all_succeed(what: str) -> Iterator[None]:
    """Leave the body with an error on every process if it was left with one on any. Collective.

    The body may hold collectives only if it gets through all of them whatever fails.

    Args:
        what: the body does, for the message.

    Raises:
        RuntimeError: on the processes that succeeded; those that failed raise their own error.
        TimeoutError: a process is lost, or an hour behind.
    """
    error = None
    try:
        yield
    except BaseException as raised:
        error = raised
    told = exchange(_NAME, json.dumps(error is not None), _SECONDS)
    if error is not None:
        raise error
    failed = [str(number) for number, text in enumerate(told) if json.loads(text)]
    if failed:
        raise RuntimeError(
            f"{what} failed on process {', '.join(failed)}, whose own error says why. "
            "Nothing was written."
        )
