"""Several values as one message: what a unit of weights or gradients sends over a hop.

A collective has a fixed price, whatever it carries. So the values of a unit are laid side
by side, as bits, in one array with a row for each device; after the collective each value
is a range of columns of it, which its decoding reads in place. What has one type stays in
it, and types that differ are joined as bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from .. import pallas_kernels as kernels
from .._codecs import Draft, bits_dtype, from_bits, to_bits
from .encoded_shards import Pieces
from .ledger import picked
from .packing import Column, can_join, in_place, join, split, widths
from .primitives import all_gather


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Weights on their way, or arrived: one message, or a single value as it is.

    Attributes:
        data: `[rows, m]`, one row from each device so far, or what `Pieces` holds.
        parts: what is in a row, without data.
        positions: their numbers among the weights that are sent together.
    """

    data: Shaped[Array, ...]
    parts: tuple[Pieces, ...]
    positions: tuple[int, ...]

    def gather(self, axis: str) -> Parcel:
        """Put the rows of all devices along `axis` below each other."""
        with picked(self.positions):
            if len(self.parts) == 1:
                pieces = dataclasses.replace(self.parts[0], data=self.data).gather(axis)
                return _alone(pieces, self.positions[0])
            data = all_gather(self.data, axis, 0, widths(_columns(self.parts)))
            return Parcel(data, tuple(x.over(axis) for x in self.parts), self.positions)

    def renumbered(self, numbers: Sequence[int]) -> Parcel:
        """The same among other weights: what had position `i` has `numbers[i]`."""
        return dataclasses.replace(self, positions=tuple(numbers[i] for i in self.positions))

    def unpack(self) -> list[Pieces]:
        """Each of the values again."""
        if len(self.parts) == 1:
            return [dataclasses.replace(self.parts[0], data=self.data)]
        rows = split(self.data, _columns(self.parts))
        return [_from_rows(part, x) for part, x in zip(self.parts, rows, strict=True)]

    def arrays(self, dtypes: Sequence[Any]) -> list[Array]:
        """The same joined, as `dtypes` (None: their own): messages are read where they lie."""
        if len(self.parts) == 1:
            return [self.unpack()[0].join(dtypes[0])]
        rows = in_place(self.data, _columns(self.parts))
        return [_joined(*each) for each in zip(self.parts, rows, dtypes, strict=True)]


jax.tree_util.register_dataclass(Parcel, ["data"], ["parts", "positions"])


def pack(sent: Sequence[tuple[Pieces, Draft | None]]) -> list[Parcel]:
    """One message of all that can share one; of the others, one each.

    A draft is the data of pieces that have none yet.
    """
    parcels = []
    sharing: dict[tuple[str, ...], list[int]] = {}
    for i, (x, _) in enumerate(sent):
        if x.lead or not can_join(_row_type(x)):
            parcels.append(_alone(x, i))
        else:
            sharing.setdefault(x.axes, []).append(i)
    for numbers in sharing.values():
        chosen, drafts = zip(*(sent[i] for i in numbers), strict=True)
        if drafts == (None,):
            parcels.append(_alone(chosen[0], numbers[0]))
            continue
        data = join([draft or _row(x) for x, draft in zip(chosen, drafts, strict=True)])
        if any(drafts):  # what is written already has this barrier: see `Pieces.encode`
            data = lax.optimization_barrier(data)
        parcels.append(Parcel(data, tuple(_without_data(x) for x in chosen), tuple(numbers)))
    return parcels


def unpack(parcels: Sequence[Parcel]) -> list[Pieces]:
    """Undo `pack`, after any number of gathers."""
    found = {i: x for parcel in parcels for i, x in _numbered(parcel)}
    return [found[i] for i in range(len(found))]


def arrays(parcels: Sequence[Parcel], dtypes: Sequence[Any]) -> list[Array]:
    """What `unpack` gives, joined; see `Parcel.arrays`."""
    found: dict[int, Array] = {}
    for parcel in parcels:
        mine = parcel.arrays([dtypes[i] for i in parcel.positions])
        found.update(zip(parcel.positions, mine, strict=True))
    return [found[i] for i in range(len(found))]


def _numbered(parcel: Parcel) -> list[tuple[int, Pieces]]:
    return list(zip(parcel.positions, parcel.unpack(), strict=True))


def _alone(pieces: Pieces, position: int) -> Parcel:
    return Parcel(pieces.data, (_without_data(pieces),), (position,))


def _without_data(pieces: Pieces) -> Pieces:
    """What is to be known of the pieces; their data only as a shape."""
    return pieces.described(jax.ShapeDtypeStruct(pieces.data.shape, pieces.data.dtype))


def _row(pieces: Pieces) -> Array:
    bits = pieces.data if pieces.codec is not None else to_bits(pieces.data)
    return bits.reshape(1, bits.size)


def _row_type(pieces: Pieces) -> Any:
    dtype = pieces.data.dtype
    return jnp.dtype(dtype) if pieces.codec is not None else bits_dtype(dtype)


def _columns(parts: Sequence[Pieces]) -> list[Column]:
    return [(math.prod(part.data.shape), np.dtype(_row_type(part))) for part in parts]


def _joined(part: Pieces, row: kernels.InPlace, dtype: Any) -> Array:
    """An array, from one row of each device."""
    if part.codec is None:
        return _from_rows(part, row.cut_out()).join(dtype)
    pieces, size = part.data.shape
    return part.decode(dataclasses.replace(row, size=size, count=pieces), dtype)


def _from_rows(part: Pieces, rows: Shaped[Array, "n m"]) -> Pieces:
    """Pieces again, from one row of each device."""
    if part.codec is not None:
        pieces, size = part.data.shape
        return dataclasses.replace(part, data=rows.reshape(len(rows) * pieces, size))
    x = from_bits(rows, part.dtype).reshape(len(rows), *part.shape)
    x = jnp.moveaxis(x, 0, part.dim)
    dim, shape = part.dim, part.shape
    x = x.reshape(*shape[:dim], len(rows) * shape[dim], *shape[dim + 1 :])
    return dataclasses.replace(part, data=x, shape=tuple(x.shape))
