"""Several processes that write one thing: agreeing on names, and on whether all has gone well.

One process alone agrees with itself, without collectives.
"""

import contextlib
import uuid
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils


def shared_mark() -> str:
    """Eight random hexadecimal digits, the same on every process. Collective."""
    mark = np.array(uuid.uuid4().int % 2**32, np.uint32)
    if jax.process_count() > 1:
        mark = multihost_utils.broadcast_one_to_all(mark)
    return f"{int(mark):08x}"


@contextlib.contextmanager
def all_succeed(what: str) -> Iterator[None]:
    """Leave the body with an error on every process if it was left with one on any. Collective.

    The body may hold collectives only if it gets through all of them whatever fails.

    Args:
        what: the body does, for the message.

    Raises:
        RuntimeError: on the processes that succeeded; those that failed raise their own error.
    """
    error = None
    try:
        yield
    except BaseException as raised:
        error = raised
    failed = _processes_where(error is not None)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(
            f"{what} failed on process {', '.join(map(str, failed))}, whose own error says why. "
            "Nothing was written."
        )


def _processes_where(condition: bool) -> list[int]:
    if jax.process_count() == 1:
        return [0] if condition else []
    each = multihost_utils.process_allgather(np.array([condition], np.int32))
    return np.flatnonzero(np.reshape(each, -1)).tolist()
