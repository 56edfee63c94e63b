"""Issue and record the library's collectives, and its copies from and to host memory.

Other modules call these functions and not those of `lax`, so that the report counts every byte
(`ledger`). The record of a copy has the place in the program where it begins: the region of the
step, and the loops. `in_region` and `in_loop` set the place for what is traced in their context.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._mesh import NODE, gloo_workaround, in_host, program_axes, to_device, to_host, varying
from .ledger import Axes, HostTransfer, current_ledger, note


def all_gather(
    x: Shaped[Array, ...],
    axis: Axes,
    dim: int,
    shares: tuple[int, ...] = (),
    forms: Sequence[Any] = (),
) -> Shaped[Array, ...]:
    """All-gather: concatenate the arrays of all devices along `dim`, in the order of `axis`.

    `shares` and `forms`, the bytes and codecs of the leaves in a message, are only recorded
    (`Ledger.note`).
    """
    axes = program_axes(axis)
    if not axes:
        return x
    full = gloo_workaround.all_gather(x, axes, dim)
    note("all-gather", axes, full, shares, forms)
    return full


def gather_nodes(x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """All-gather `x` over `node` along dim 0; this works inside a program of one node too."""
    full = gloo_workaround.all_gather(x, NODE, 0)
    note("all-gather", NODE, full)
    return full


def reduce_nodes(x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """All-reduce `x` over `node` by sum; this works inside a program of one node too."""
    note("all-reduce", NODE, x)
    return lax.psum(x, NODE)


def all_to_all(
    x: Shaped[Array, ...],
    axis: Axes,
    split_dim: int = 0,
    concat_dim: int = 0,
    shares: tuple[int, ...] = (),
    forms: Sequence[Any] = (),
) -> Shaped[Array, ...]:
    """Split `x` along `split_dim`, send part i to device i, and concatenate what is received.

    The parts are concatenated along `concat_dim`, in the order of `axis`. `shares` and `forms`, the
    bytes and codecs of the leaves in a message, are only recorded (`Ledger.note`).
    """
    axes = program_axes(axis)
    if not axes:
        return x
    note("all-to-all", axes, x, shares, forms)
    x = varying(x, axes)
    return gloo_workaround.all_to_all(x, axes, split_dim, concat_dim)


def permute(
    x: Shaped[Array, ...], axis: Axes, pairs: Sequence[tuple[int, int]]
) -> Shaped[Array, ...]:
    """Send `x` from the first device of each pair to the second; indices are over `axis`."""
    note("permute", axis, x)
    return gloo_workaround.permute(x, axis, pairs)


def reduce_scatter(
    x: Shaped[Array, ...], axis: Axes, dim: int, shares: tuple[int, ...] = ()
) -> Shaped[Array, ...]:
    """Reduce-scatter: sum `x` over the devices of `axis`; device i keeps part i along `dim`.

    `shares`, the bytes of the leaves in a message, are only recorded (`Ledger.note`).
    """
    axes = program_axes(axis)
    if not axes:
        return x
    note("all-to-all" if gloo_workaround.is_worked_around() else "reduce-scatter", axes, x, shares)
    return gloo_workaround.reduce_scatter(x, axes, dim)


def all_reduce(x: Any, axis: Axes) -> Any:
    """All-reduce: sum an array, or a tree of arrays in one collective, over devices of `axis`."""
    axes = program_axes(axis)
    if not axes:
        return x
    for leaf in jax.tree.leaves(x):
        note("all-reduce", axes, leaf)
    return lax.psum(x, axes)


def all_max(x: Shaped[Array, ...], axis: Axes) -> Shaped[Array, ...]:
    """Return the maximum over devices of each element; NaN if one of them is NaN.

    `jnp.maximum` treats NaN in the same way. A backend's own maximum may drop it (NCCL's does), so
    flags that mark NaN are sent too.
    """
    axes = program_axes(axis)
    if not axes:
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating):
        note("all-reduce", axes, x)
        return lax.pmax(x, axes)
    is_nan = jnp.isnan(x)
    pair = jnp.stack([jnp.where(is_nan, -jnp.inf, x).astype(x.dtype), is_nan.astype(x.dtype)])
    note("all-reduce", axes, pair)
    largest, any_nan = lax.pmax(pair, axes)
    return jnp.where(any_nan > 0, jnp.nan, largest).astype(x.dtype)


class _Place(NamedTuple):
    region: str
    path: tuple[int, ...]


_START = _Place("before forward", ())
_place: contextvars.ContextVar[_Place] = contextvars.ContextVar("jaxzero_place", default=_START)


@contextlib.contextmanager
def in_region(region: str) -> Iterator[None]:
    """Record the copies traced in this context with `region` as their place, outside of loops.

    A region is "before forward", "forward", "backward" or "the end".
    """
    with _at(_Place(region, ())):
        yield


@contextlib.contextmanager
def in_loop(index: int) -> Iterator[None]:
    """Record the copies traced in this context as made in a loop, the operation at `index`."""
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
    """Copy a traced array to device memory; return it unchanged if it is there already.

    Args:
        x: one device's part of a leaf.
        purpose: "weights", "gradients", "update" or "activations".
        name: name of the leaf; "" for activations.
        windowed: whether layers are copied one by one, where they are used; otherwise the full leaf
            is copied at once. Like `purpose` and `name`, it is only recorded (`HostTransfer`).
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
    """Record the copies between device and host memory that a `device_put` of the user makes.

    Mostly these are activations that a policy of `jax.checkpoint` offloads.

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
