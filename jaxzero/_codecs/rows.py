"""Lay out messages as rows of bits: cut arrays into rows, view floats as integers, join rows.

A message is `[n, m]`, with a row for each device. Backends widen narrow floats in transit, and XLA
would move a cast across a collective; integers travel unchanged. So floats of 8 and 16 bits are
sent as unsigned integers of as many bits. Rows of one dtype are joined as they are, and rows of
different dtypes as bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Shaped, UInt8

from .. import pallas_kernels as kernels

_BITS = {8: jnp.uint8, 16: jnp.uint16}
Column = tuple[int, Any]  # number of elements of one array in a row, and their dtype


def cut(shape: tuple[int, ...], dim: int, num: int) -> tuple[int, int, int]:
    """Return a 3-d shape `(outer, num, inner)` for an array that is cut into `num` pieces.

    `outer` is the number of elements of the dims before `dim`. `inner` is the number of elements of
    the other dims, in one piece.
    """
    return math.prod(shape[:dim]), num, math.prod(shape[dim:]) // num


def rows_of(x: Shaped[Array, ...], dim: int, num: int) -> Shaped[Array, "num n"]:
    """Cut an array into `num` pieces along `dim`, and flatten each piece to a row."""
    if math.prod(x.shape[:dim]) == 1:  # the pieces follow one another
        return x.reshape(num, x.size // num)
    return kernels.pieces_of(x, dim, num).reshape(num, x.size // num)


def joined_rows(
    rows: Shaped[Array, "num n"], shape: tuple[int, ...], dim: int
) -> Shaped[Array, ...]:
    """Join pieces of `shape` along `dim`, each given as a row; reverses `rows_of`."""
    num = len(rows)
    if math.prod(shape[:dim]) == 1:
        return joined(rows, shape, dim, num)
    return joined(jnp.moveaxis(rows.reshape(num, *shape), 0, dim), shape, dim, num)


def joined(x: Shaped[Array, ...], shape: tuple[int, ...], dim: int, num: int) -> Shaped[Array, ...]:
    """Join `num` pieces of `shape` along `dim`.

    `x` has the pieces as `[*shape[:dim], num, *shape[dim:]]`, or as any reshape of that array.
    """
    return x.reshape(*shape[:dim], num * shape[dim], *shape[dim + 1 :])


@dataclasses.dataclass(frozen=True)
class DeferredMessage:
    """Messages that are not written yet, so that they can be written into a larger array.

    Attributes:
        shape: `(messages, bytes of each)`.
        write: a function that writes the messages. With `place`, a `pallas_kernels.Place` (some
            columns of a larger array), it writes them there and returns the larger array. Without,
            it returns an array of the messages alone.
    """

    shape: tuple[int, int]
    write: Callable[..., Shaped[Array, "n _"]]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the messages, uint8."""
        return jnp.dtype(jnp.uint8)


def written(x: Shaped[Array, "n m"] | DeferredMessage) -> Shaped[Array, "n m"]:
    """Return messages as an array of their own; deferred messages are written now."""
    return x.write() if isinstance(x, DeferredMessage) else x


def is_narrow_float(dtype: DTypeLike) -> bool:
    """Return whether `dtype` is a float of 8 or 16 bits, which some backends widen on the wire."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2


def bits_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of `to_bits` for an array of type `dtype`."""
    return jnp.dtype(_BITS[8 * jnp.dtype(dtype).itemsize] if is_narrow_float(dtype) else dtype)


def to_bits(x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """View narrow floats as unsigned integers, so that no backend widens them in transit."""
    if not is_narrow_float(x.dtype):
        return x
    return lax.bitcast_convert_type(x, bits_dtype(x.dtype))


def from_bits(x: Shaped[Array, ...], dtype: DTypeLike) -> Shaped[Array, ...]:
    """View the integers of `to_bits` as narrow floats again; return other arrays unchanged."""
    if not is_narrow_float(dtype) or x.dtype == dtype:
        return x
    return lax.bitcast_convert_type(x, dtype)


def can_join(dtype: Any) -> bool:
    """Return whether arrays of this dtype can be joined: numbers of whole bytes, no random keys."""
    is_number = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return bool(is_number) and jnp.dtype(dtype).itemsize >= 1


def join_columns(rows: Sequence[Shaped[Array, "n _"] | DeferredMessage]) -> Shaped[Array, "n m"]:
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
    """Concatenate arrays and deferred messages along dim 1, in a new array of bytes.

    First the kernels of deferred messages write their columns, each into the array that the kernel
    before it returned. Then the other arrays are copied in.
    """
    shape = rows[0].shape[0], sum(x.shape[1] for x in rows)
    data, start, rest = None, 0, []
    for is_deferred, run in itertools.groupby(rows, lambda x: isinstance(x, DeferredMessage)):
        for x in run if is_deferred else [join_columns(list(run))]:
            if isinstance(x, DeferredMessage):
                data = x.write(place=kernels.Place(shape, start, data))
            else:
                rest.append((start, x))
            start += x.shape[1]
    for start, x in rest:
        data = kernels.Place(shape, start, data).put(x)
    assert data is not None
    return data


def split_columns(
    data: Shaped[Array, "n m"], columns: Sequence[Column]
) -> list[Shaped[Array, "n _"]]:
    """Return the arrays that `join_columns` was given, in its order, copied out of `data`."""
    return [x.cut_out() for x in columns_in_place(data, columns)]


def columns_in_place(
    data: Shaped[Array, "n m"], columns: Sequence[Column]
) -> list[kernels.InPlace]:
    """Return the parts of a joined message as ranges of columns, for decoders that read in place.

    In a message of bytes, a part of another dtype is copied out, because it must be bitcast first.
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


def column_bytes(columns: Sequence[Column]) -> tuple[int, ...]:
    """Return how many bytes each of the joined arrays takes in one row."""
    return tuple(length * jnp.dtype(dtype).itemsize for length, dtype in columns)


def as_bytes(x: Shaped[Array, "n m"]) -> UInt8[Array, "n _"]:
    """View each row as bytes."""
    if x.dtype.itemsize == 1:
        return lax.bitcast_convert_type(x, jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(len(x), x.shape[1] * x.dtype.itemsize)


def from_bytes(x: UInt8[Array, "n m"], dtype: Any) -> Shaped[Array, "n _"]:
    """View the bytes of each row as numbers of type `dtype`; the reverse of `as_bytes`."""
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        x = x.reshape(len(x), x.shape[1] // size, size)
    return lax.bitcast_convert_type(x, dtype)
