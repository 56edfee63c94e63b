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
from .._codecs import DeferredMessage, bits_dtype, from_bits, to_bits
from .encoded_shards import EncodedShards
from .ledger import picked
from .packing import Column, can_join, in_place, join, split, widths
from .primitives import all_gather


@dataclasses.dataclass(frozen=True)
class GatherBucket:
    """Weights on their way, or arrived: one message, or a single value as it is.

    Attributes:
        data: `[rows, m]`, one row from each device so far, or what `EncodedShards` holds.
        parts: what is in a row, without data.
        positions: their numbers among the weights that are sent together.
    """

    data: Shaped[Array, ...]
    parts: tuple[EncodedShards, ...]
    positions: tuple[int, ...]

    def gather(self, axis: str) -> GatherBucket:
        """Put the rows of all devices along `axis` below each other."""
        with picked(self.positions):
            if len(self.parts) == 1:
                pieces = dataclasses.replace(self.parts[0], data=self.data).gather(axis)
                return _alone(pieces, self.positions[0])
            data = all_gather(self.data, axis, 0, widths(_columns(self.parts)))
            return GatherBucket(data, tuple(x.over(axis) for x in self.parts), self.positions)

    def renumbered(self, numbers: Sequence[int]) -> GatherBucket:
        """The same among other weights: what had position `i` has `numbers[i]`."""
        return dataclasses.replace(self, positions=tuple(numbers[i] for i in self.positions))

    def unpack(self) -> list[EncodedShards]:
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


jax.tree_util.register_dataclass(GatherBucket, ["data"], ["parts", "positions"])


def pack(sent: Sequence[tuple[EncodedShards, DeferredMessage | None]]) -> list[GatherBucket]:
    """One message of all that can share one; of the others, one each.

    A draft is the data of pieces that have none yet.
    """
    buckets = []
    sharing: dict[tuple[str, ...], list[int]] = {}
    for i, (x, _) in enumerate(sent):
        if x.lead or not can_join(_row_type(x)):
            buckets.append(_alone(x, i))
        else:
            sharing.setdefault(x.axes, []).append(i)
    for numbers in sharing.values():
        chosen, drafts = zip(*(sent[i] for i in numbers), strict=True)
        if drafts == (None,):
            buckets.append(_alone(chosen[0], numbers[0]))
            continue
        data = join([draft or _row(x) for x, draft in zip(chosen, drafts, strict=True)])
        if any(drafts):  # what is written already has this barrier: see `EncodedShards.encode`
            data = lax.optimization_barrier(data)
        buckets.append(GatherBucket(data, tuple(_without_data(x) for x in chosen), tuple(numbers)))
    return buckets


def unpack(buckets: Sequence[GatherBucket]) -> list[EncodedShards]:
    """Undo `pack`, after any number of gathers."""
    found = {i: x for bucket in buckets for i, x in _numbered(bucket)}
    return [found[i] for i in range(len(found))]


def arrays(buckets: Sequence[GatherBucket], dtypes: Sequence[Any]) -> list[Array]:
    """What `unpack` gives, joined; see `GatherBucket.arrays`."""
    found: dict[int, Array] = {}
    for bucket in buckets:
        mine = bucket.arrays([dtypes[i] for i in bucket.positions])
        found.update(zip(bucket.positions, mine, strict=True))
    return [found[i] for i in range(len(found))]


def _numbered(bucket: GatherBucket) -> list[tuple[int, EncodedShards]]:
    return list(zip(bucket.positions, bucket.unpack(), strict=True))


def _alone(pieces: EncodedShards, position: int) -> GatherBucket:
    return GatherBucket(pieces.data, (_without_data(pieces),), (position,))


def _without_data(pieces: EncodedShards) -> EncodedShards:
    """What is to be known of the pieces; their data only as a shape."""
    return pieces.described(jax.ShapeDtypeStruct(pieces.data.shape, pieces.data.dtype))


def _row(pieces: EncodedShards) -> Array:
    bits = pieces.data if pieces.codec is not None else to_bits(pieces.data)
    return bits.reshape(1, bits.size)


def _row_type(pieces: EncodedShards) -> Any:
    dtype = pieces.data.dtype
    return jnp.dtype(dtype) if pieces.codec is not None else bits_dtype(dtype)


def _columns(parts: Sequence[EncodedShards]) -> list[Column]:
    return [(math.prod(part.data.shape), np.dtype(_row_type(part))) for part in parts]


def _joined(part: EncodedShards, row: kernels.InPlace, dtype: Any) -> Array:
    """An array, from one row of each device."""
    if part.codec is None:
        return _from_rows(part, row.cut_out()).join(dtype)
    pieces, size = part.data.shape
    return part.decode(dataclasses.replace(row, size=size, count=pieces), dtype)


def _from_rows(part: EncodedShards, rows: Shaped[Array, "n m"]) -> EncodedShards:
    """Pieces again, from one row of each device."""
    if part.codec is not None:
        pieces, size = part.data.shape
        return dataclasses.replace(part, data=rows.reshape(len(rows) * pieces, size))
    x = from_bits(rows, part.dtype).reshape(len(rows), *part.shape)
    x = jnp.moveaxis(x, 0, part.dim)
    dim, shape = part.dim, part.shape
    x = x.reshape(*shape[:dim], len(rows) * shape[dim], *shape[dim + 1 :])
    return dataclasses.replace(part, data=x, shape=tuple(x.shape))
