"""Trace the collectives of a bucket once, and copy the trace for all buckets with equal shapes.

An unrolled model has a bucket with the same shapes in each layer. To trace how one bucket is
encoded, gathered and decoded takes hundreds of calls into JAX, more than to trace the layer. Each
copy is recorded in the ledger with the names of its own leaves.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from .._mesh import Recording, is_simulating, is_traced
from .comm_spec import CommSpec, ReduceSpec
from .ledger import Transfer, current_ledger, note_again, noted

_Recordings = dict[Any, tuple[Recording, list[Transfer]] | None]
_recordings: contextvars.ContextVar[_Recordings | None] = contextvars.ContextVar(
    "jaxzero_alike", default=None
)


@contextlib.contextmanager
def alike_once() -> Iterator[None]:
    """Let `for_alike` reuse its traces in this context; outside of one, it traces at every call."""
    token = _recordings.set({})
    try:
        yield
    finally:
        _recordings.reset(token)


def for_alike(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`; the function is traced once for all calls with alike `args`.

    Args:
        function: takes trees of arrays, and other, hashable values. It must be pure, except that it
            may record transfers in the ledger.
        args: the arguments. Two calls are alike if their arguments differ only in the values of
            arrays and in the names of leaves.
    """
    recordings = _recordings.get()
    if recordings is None or is_simulating():
        return function(*args)
    leaves, treedef = jax.tree.flatten(args)
    numbers = [i for i, x in enumerate(leaves) if _is_array(x)]
    key = function, treedef, tuple(map(_kind, leaves)), current_ledger() is None
    arrays = [leaves[i] for i in numbers]
    if key not in recordings:

        def of_arrays(*arrays: Any) -> Any:
            merged = list(leaves)
            for i, x in zip(numbers, arrays, strict=True):
                merged[i] = x
            return function(*jax.tree.unflatten(treedef, merged))

        with noted() as transfers:
            recording = Recording(of_arrays, arrays)
        # A function that closes over an array of this trace cannot be copied for other buckets.
        recordings[key] = (recording, transfers) if recording.is_closed else None
    if (recorded := recordings[key]) is None:
        return function(*args)
    recording, transfers = recorded
    note_again(transfers)
    return recording.put(arrays)


def _is_array(x: Any) -> bool:
    return is_traced(x) or isinstance(x, jax.Array | np.ndarray)


def _kind(x: Any) -> Any:
    """Return a hashable key of an argument: the type of an array, or the value itself.

    Alike arguments have equal keys.
    """
    if _is_array(x):
        return jax.typeof(x)
    if isinstance(x, CommSpec):
        return id(x)  # there is one for a program, and its hash is that of many values
    return x.without_name if isinstance(x, ReduceSpec) else x
