"""Switch Python's garbage collector off for code that makes many objects but no reference cycles.

A run of the collector visits all live objects. While a model of 80 layers is traced, these runs
take a fifth of the time and free nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Switch the collector off in a `with` block or a decorated function, then restore it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
