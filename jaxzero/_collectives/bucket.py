"""Join the shards of several weights into one message, so that one all-gather carries them all.

A collective has a fixed cost, whatever its size. So the shards of a group of weights are laid side
by side, as bits, in one array with a row for each device:

    data[d] = [shard d of weight 0 | shard d of weight 1 | ...]

After the gather each weight is a range of columns, which its decoder reads in place. Shards of one
dtype keep it; shards of different dtypes are joined as bytes. Narrow floats of one dtype become
bits after they are joined, and floats again before they are cut apart: one operation for a bucket,
where a program of unrolled layers would have one for each weight of each layer.
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
from .._codecs import DeferredMessage, bits_dtype, from_bits, joined_rows, to_bits
from .encoded_shards import EncodedShards
from .ledger import picked
from .message_form import MessageForm
from .packing import Column, can_join, in_place, join, widths
from .primitives import all_gather


@dataclasses.dataclass(frozen=True)
class GatherBucket:
    """A bucket of weight shards, before or after it is gathered.

    Attributes:
        data: `[rows, m]`, one row for each device gathered so far. In a bucket of a single weight,
            the `data` of its `EncodedShards`.
        parts: for each weight in a row, its `EncodedShards` without data.
        positions: for each weight in a row, its index among the weights given to `pack`.
    """

    data: Shaped[Array, ...]
    parts: tuple[EncodedShards, ...]
    positions: tuple[int, ...]

    def gather(self, axis: str, form: MessageForm = MessageForm()) -> GatherBucket:  # noqa: B008
        """All-gather over `axis`; the result has the rows of all devices along it, in order."""
        with picked(self.positions):
            if len(self.parts) == 1:
                shards = dataclasses.replace(self.parts[0], data=self.data).gather(axis, form)
                return _single(shards, self.positions[0])
            forms = [x.codec or x.dtype for x in self.parts]
            data = all_gather(self.data, axis, 0, widths(_columns(self.parts)), forms)
            return GatherBucket(data, tuple(x.over(axis) for x in self.parts), self.positions)

    def renumbered(self, numbers: Sequence[int]) -> GatherBucket:
        """This bucket with each position `i` replaced by `numbers[i]`."""
        return dataclasses.replace(self, positions=tuple(numbers[i] for i in self.positions))

    def unpack(self) -> list[EncodedShards]:
        """The shards of each weight in the bucket."""
        if len(self.parts) == 1:
            return [dataclasses.replace(self.parts[0], data=self.data)]
        rows = self._rows()
        return [_from_rows(part, x.cut_out()) for part, x in zip(self.parts, rows, strict=True)]

    def arrays(self, dtypes: Sequence[Any]) -> list[Array]:
        """Decode each weight to its entry of `dtypes` (None: its own dtype), read from `data`."""
        if len(self.parts) == 1:
            return [self.unpack()[0].join(dtypes[0])]
        return [_joined(*each) for each in zip(self.parts, self._rows(), dtypes, strict=True)]

    def _rows(self) -> list[kernels.InPlace]:
        """For each weight its columns of `data`; of floats, where all weights have one dtype."""
        columns = _columns(self.parts)
        dtypes = {None if part.codec is not None else part.dtype for part in self.parts}
        only = dtypes.pop() if len(dtypes) == 1 else None
        if only is None:
            return in_place(self.data, columns)
        sizes = [(size, np.dtype(only)) for size, _ in columns]
        return in_place(from_bits(self.data, only), sizes)


jax.tree_util.register_dataclass(GatherBucket, ["data"], ["parts", "positions"])


def pack(
    sent: Sequence[tuple[EncodedShards, DeferredMessage | None]],
    form: MessageForm = MessageForm(),  # noqa: B008
) -> list[GatherBucket]:
    """Put shards into buckets: one for all shards with the same remaining axes.

    A stack that a loop scans (`lead`), a dtype that cannot be joined, and what `form` sends alone
    get their own buckets.

    Args:
        sent: for each weight its shards; if these have no data yet, also the `DeferredMessage`
            that is written into the bucket here.
        form: the form of messages on the platform.
    """
    buckets = []
    by_axes: dict[tuple[str, ...], list[int]] = {}
    for i, (x, _) in enumerate(sent):
        if x.lead or not can_join(_row_dtype(x)) or _is_alone(x, form):
            buckets.append(_single(x, i))
        else:
            by_axes.setdefault(x.axes, []).append(i)
    for numbers in by_axes.values():
        chosen, deferred = zip(*(sent[i] for i in numbers), strict=True)
        if deferred == (None,):
            buckets.append(_single(chosen[0], numbers[0]))
            continue
        data = _joined_bits(
            [message or _row(x) for x, message in zip(chosen, deferred, strict=True)]
        )
        # Keeps XLA from moving the decoding across the collective, as in `EncodedShards.encode`,
        # which deferred messages do not pass through.
        if any(deferred):
            data = lax.optimization_barrier(data)
        buckets.append(GatherBucket(data, tuple(_without_data(x) for x in chosen), tuple(numbers)))
    return buckets


def unpack(buckets: Sequence[GatherBucket]) -> list[EncodedShards]:
    """The shards in `buckets`, gathered or not, in the order given to `pack`."""
    found = {i: x for bucket in buckets for i, x in _numbered(bucket)}
    return [found[i] for i in range(len(found))]


def arrays(buckets: Sequence[GatherBucket], dtypes: Sequence[Any]) -> list[Array]:
    """Decode all weights, in the order given to `pack`; see `GatherBucket.arrays`."""
    found: dict[int, Array] = {}
    for bucket in buckets:
        decoded = bucket.arrays([dtypes[i] for i in bucket.positions])
        found.update(zip(bucket.positions, decoded, strict=True))
    return [found[i] for i in range(len(found))]


def _numbered(bucket: GatherBucket) -> list[tuple[int, EncodedShards]]:
    return list(zip(bucket.positions, bucket.unpack(), strict=True))


def _single(shards: EncodedShards, position: int) -> GatherBucket:
    return GatherBucket(shards.data, (_without_data(shards),), (position,))


def _is_alone(shards: EncodedShards, form: MessageForm) -> bool:
    """Whether shards are sent in the shape that they have."""
    if shards.codec is not None:
        return shards.tiled
    return not form.joins(math.prod(shards.data.shape) * shards.data.dtype.itemsize)


def _without_data(shards: EncodedShards) -> EncodedShards:
    """The shards with a `ShapeDtypeStruct` in place of their data."""
    return shards.described(jax.ShapeDtypeStruct(shards.data.shape, shards.data.dtype))


def _row(shards: EncodedShards) -> Array:
    """This device's row `[1, m]`: the message, or a shard without a codec."""
    return shards.data.reshape(1, shards.data.size)


def _joined_bits(rows: Sequence[Shaped[Array, "1 _"] | DeferredMessage]) -> Shaped[Array, "1 m"]:
    """Concatenate rows as bits."""
    if len({x.dtype for x in rows}) > 1:
        rows = [x if isinstance(x, DeferredMessage) else to_bits(x) for x in rows]
    return to_bits(join(rows))


def _row_dtype(shards: EncodedShards) -> Any:
    dtype = shards.data.dtype
    return jnp.dtype(dtype) if shards.codec is not None else bits_dtype(dtype)


def _columns(parts: Sequence[EncodedShards]) -> list[Column]:
    return [(math.prod(part.data.shape), np.dtype(_row_dtype(part))) for part in parts]


def _joined(part: EncodedShards, row: kernels.InPlace, dtype: Any) -> Array:
    """The decoded array of a weight, from its columns of the gathered rows."""
    if part.codec is None:
        return _from_rows(part, row.cut_out()).join(dtype)
    num_shards, size = part.data.shape
    return part.decode(dataclasses.replace(row, size=size, count=num_shards), dtype)


def _from_rows(part: EncodedShards, rows: Shaped[Array, "n m"]) -> EncodedShards:
    """The shards of a weight, from its columns of the gathered rows."""
    if part.codec is not None:
        num_shards, size = part.data.shape
        return dataclasses.replace(part, data=rows.reshape(len(rows) * num_shards, size))
    x = joined_rows(from_bits(rows, part.dtype), part.shape, part.dim)
    return dataclasses.replace(part, data=x, shape=tuple(x.shape))
