"""Concatenate the rows of several arrays into one message, and split it again.

Arrays of one dtype keep it; arrays of different dtypes are joined as bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped, UInt8

from .. import pallas_kernels as kernels
from .._codecs import DeferredMessage, written

Column = tuple[int, Any]  # number of elements of one array in a row, and their dtype


def can_join(dtype: Any) -> bool:
    """Whether arrays of this dtype can be joined: numbers of whole bytes, no random keys."""
    is_number = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return bool(is_number) and jnp.dtype(dtype).itemsize >= 1


def join(rows: Sequence[Shaped[Array, "n _"] | DeferredMessage]) -> Shaped[Array, "n m"]:
    """Concatenate arrays along dim 1, as bytes if their dtypes differ.

    A deferred message is written straight into its columns, which saves a copy.
    """
    if len({x.dtype for x in rows}) > 1:
        rows = [x if isinstance(x, DeferredMessage) else as_bytes(x) for x in rows]
    arrays = [x for x in rows if not isinstance(x, DeferredMessage)]
    if len(rows) == 1:
        return written(rows[0])
    return lax.concatenate(arrays, 1) if len(arrays) == len(rows) else _filled(rows)


def _filled(rows: Sequence[UInt8[Array, "n _"] | DeferredMessage]) -> UInt8[Array, "n m"]:
    """`join` with deferred messages: kernels write theirs first, then the arrays are copied in.

    Each kernel updates the buffer that the one before it returned.
    """
    shape = rows[0].shape[0], sum(x.shape[1] for x in rows)
    data, start, rest = None, 0, []
    for is_deferred, run in itertools.groupby(rows, lambda x: isinstance(x, DeferredMessage)):
        for x in run if is_deferred else [join(list(run))]:
            if isinstance(x, DeferredMessage):
                data = x.write(place=kernels.Place(shape, start, data))
            else:
                rest.append((start, x))
            start += x.shape[1]
    for start, x in rest:
        data = kernels.Place(shape, start, data).put(x)
    assert data is not None
    return data


def split(data: Shaped[Array, "n m"], columns: Sequence[Column]) -> list[Shaped[Array, "n _"]]:
    """The arrays that `join` was given, in its order, copied out of the message `data`."""
    return [x.cut_out() for x in in_place(data, columns)]


def in_place(data: Shaped[Array, "n m"], columns: Sequence[Column]) -> list[kernels.InPlace]:
    """The parts of a joined message, as ranges of its columns for decoders that read in place.

    A part of another dtype in a message of bytes is copied out, because it must be bitcast first.
    """
    mixed = len({dtype for _, dtype in columns}) > 1
    parts, start = [], 0
    for length, dtype in columns:
        width = length * (jnp.dtype(dtype).itemsize if mixed else 1)
        part = kernels.InPlace(data, start, width)
        if mixed and dtype != jnp.uint8:
            part = kernels.InPlace.whole(from_bytes(part.cut_out(), dtype))
        parts.append(part)
        start += width
    return parts


def widths(columns: Sequence[Column]) -> tuple[int, ...]:
    """The bytes that each array has in a row."""
    return tuple(length * jnp.dtype(dtype).itemsize for length, dtype in columns)


def as_bytes(x: Shaped[Array, "n m"]) -> UInt8[Array, "n _"]:
    """The bits of each row, as bytes."""
    if x.dtype.itemsize == 1:
        return lax.bitcast_convert_type(x, jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(len(x), x.shape[1] * x.dtype.itemsize)


def from_bytes(x: UInt8[Array, "n m"], dtype: Any) -> Shaped[Array, "n _"]:
    """The numbers of type `dtype` in each row; the reverse of `as_bytes`."""
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        x = x.reshape(len(x), x.shape[1] // size, size)
    return lax.bitcast_convert_type(x, dtype)
