"""Copies between device memory and host memory inside a program, each recorded in the ledger.

A record has the place in the program where the copy begins: the region of the step, and the loops.
`in_region` and `in_loop` set it for what is traced in their context.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxtyping import Array

from .._mesh import in_host, to_device, to_host
from .ledger import HostTransfer, current_ledger


class _Place(NamedTuple):
    region: str
    path: tuple[int, ...]


_START = _Place("before forward", ())
_place: contextvars.ContextVar[_Place] = contextvars.ContextVar("jaxzero_place", default=_START)


@contextlib.contextmanager
def in_region(region: str) -> Iterator[None]:
    """Record the copies traced in this context with `region`, outside of loops."""
    with _at(_Place(region, ())):
        yield


@contextlib.contextmanager
def in_loop(index: int) -> Iterator[None]:
    """Record the copies traced in this context as those of the loop that is operation `index`."""
    region, path = _place.get()
    with _at(_Place(region, (*path, index))):
        yield


@contextlib.contextmanager
def _at(place: _Place) -> Iterator[None]:
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def copy_to_device(x: Array, purpose: str, name: str, *, windowed: bool) -> Array:
    """Copy a traced array to device memory; one that lies there is returned unchanged.

    Args:
        x: one device's part of a leaf.
        purpose: "weights", "gradients" or "update".
        name: name of the leaf.
        windowed: as in `HostTransfer`.
    """
    if not in_host(x):
        return x
    _record(x, purpose, name, "device", windowed)
    return to_device(x)


def copy_to_host(x: Array, purpose: str, name: str, *, windowed: bool) -> Array:
    """Copy a traced array to host memory, as `copy_to_device` does to device memory."""
    if in_host(x):
        return x
    _record(x, purpose, name, "host", windowed)
    return to_host(x)


def note_moves(before: Sequence[Any], after: Sequence[Any]) -> None:
    """Record the arrays that an operation of the user's function has copied between memories.

    These are activations that a policy of `jax.checkpoint` offloads, mostly.

    Args:
        before: the inputs of a `device_put`.
        after: its outputs.
    """
    for old, new in zip(before, after, strict=True):
        if in_host(old) != in_host(new):
            _record(new, "activations", "", "host" if in_host(new) else "device", True)


def _record(x: Array, purpose: str, name: str, to: str, windowed: bool) -> None:
    ledger = current_ledger()
    if ledger is not None:
        place, dtype = _place.get(), str(x.dtype)
        ledger.host_transfers.append(
            HostTransfer(purpose, name, to, *place, tuple(x.shape), dtype, x.nbytes, windowed)
        )
