"""`GatherBucket`: the shards of several weights in one array, gathered by one collective.

A collective has a fixed cost, whatever its size. So the shards of a group of weights are laid side
by side, as bits, in one array with a row for each device:

    data[d] = [shard d of weight 0 | shard d of weight 1 | ...]

After the gather each weight is a range of columns, which its decoder reads in place. Narrow floats
of one dtype are joined first and viewed as bits then, and after the gather viewed as floats before
they are cut apart. So a bucket takes one operation each way, where otherwise a program of unrolled
layers would have one for each weight.
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
from .._codecs import (
    Column,
    DeferredMessage,
    bits_dtype,
    can_join,
    column_bytes,
    columns_in_place,
    from_bits,
    join_columns,
    joined_rows,
    to_bits,
)
from .comm_spec import CommSpec, MessageForm
from .encoded_shards import EncodedShards
from .kernel_hop import KernelHop
from .ledger import picked
from .primitives import all_gather


@dataclasses.dataclass(frozen=True)
class GatherBucket:
    """A bucket of weight shards, before or after it is gathered.

    Attributes:
        data: `[rows, m]`, one row for each device gathered so far. In a bucket of a single weight,
            the `data` of its `EncodedShards`.
        parts: for each weight, in the order of columns, its `EncodedShards` without data.
        positions: for each weight, in the same order, its index among the weights given to `pack`.
    """

    data: Shaped[Array, ...]
    parts: tuple[EncodedShards, ...]
    positions: tuple[int, ...]

    def gather(self, axis: str, form: MessageForm = MessageForm()) -> GatherBucket:  # noqa: B008
        """All-gather this bucket over `axis`; the result has the rows of all its devices."""
        with picked(self.positions):
            if len(self.parts) == 1:
                shards = dataclasses.replace(self.parts[0], data=self.data).gather(axis, form)
                return _single(shards, self.positions[0])
            if (hop := self.parts[0].hop) is not None:
                return self._gather_by_kernel(hop, axis)
            forms = [x.codec or x.dtype for x in self.parts]
            data = all_gather(self.data, axis, 0, column_bytes(_columns(self.parts)), forms)
            return GatherBucket(data, tuple(x.over(axis) for x in self.parts), self.positions)

    def _gather_by_kernel(self, hop: KernelHop, axis: str) -> GatherBucket:
        sizes = [math.prod(x.shape) for x in self.parts]
        row = from_bits(self.data, self.parts[0].dtype)
        data = to_bits(hop.gather(row, 0, axis, sizes, of_leaves=True))
        parts = [x.gathered_by_kernel(axis) for x in self.parts]
        known = [x.described(jax.ShapeDtypeStruct(x.shape, hop.dtype)) for x in parts]
        return GatherBucket(data, tuple(known), self.positions)

    def renumbered(self, numbers: Sequence[int]) -> GatherBucket:
        """Return this bucket with each index `i` in `positions` replaced by `numbers[i]`.

        This is for a bucket that was packed from some of the weights only: `numbers` are the
        positions of these among all weights.
        """
        return dataclasses.replace(self, positions=tuple(numbers[i] for i in self.positions))

    def unpack(self) -> list[EncodedShards]:
        """Return the shards of each weight in the bucket."""
        if len(self.parts) == 1:
            return [dataclasses.replace(self.parts[0], data=self.data)]
        rows = self._rows()
        return [_from_rows(part, x.cut_out()) for part, x in zip(self.parts, rows, strict=True)]

    def arrays(self, dtypes: Sequence[Any]) -> list[Array]:
        """Decode the weights of this bucket, reading `data` in place.

        Args:
            dtypes: the dtype of the result for each weight; None: the weight's own dtype.
        """
        if len(self.parts) == 1:
            return [self.unpack()[0].join(dtypes[0])]
        return [_joined(*each) for each in zip(self.parts, self._rows(), dtypes, strict=True)]

    def _rows(self) -> list[kernels.InPlace]:
        """Return the columns of `data` that each weight has.

        If all weights are floats of one dtype and without a codec, the columns are viewed as these
        floats; otherwise they are bits.
        """
        columns = _columns(self.parts)
        dtypes = {None if part.codec is not None else part.dtype for part in self.parts}
        only = dtypes.pop() if len(dtypes) == 1 else None
        if only is None:
            return columns_in_place(self.data, columns)
        sizes = [(size, np.dtype(only)) for size, _ in columns]
        return columns_in_place(from_bits(self.data, only), sizes)


jax.tree_util.register_dataclass(GatherBucket, ["data"], ["parts", "positions"])


def pack(
    sent: Sequence[tuple[EncodedShards, DeferredMessage | None]], comm: CommSpec
) -> list[GatherBucket]:
    """Put shards into buckets: one for all shards with the same remaining axes.

    Some shards are in a bucket of their own: those of a stack that a loop scans (`lead`), those of
    a dtype that cannot be joined, and those sent alone (`MessageForm`) or not at all.

    Args:
        sent: for each weight its shards; if these have no data yet, also the `DeferredMessage` that
            is written into the bucket here.
        comm: axes, and the form of messages on the platform.
    """
    buckets = []
    by_axes: dict[Any, list[int]] = {}
    for i, (shards, _) in enumerate(sent):
        is_sent = bool(comm.axes_with_peers(shards.axes)) and not shards.lead
        if is_sent and can_join(_row_dtype(shards)) and not is_alone(shards, comm):
            one_kernel = shards.hop and (shards.hop, shards.dtype)  # whose parts have one dtype
            by_axes.setdefault((shards.axes, one_kernel), []).append(i)
        else:
            buckets.append(_single(shards, i))
    for numbers in by_axes.values():
        chosen, deferred = zip(*(sent[i] for i in numbers), strict=True)
        if deferred == (None,):
            buckets.append(_single(chosen[0], numbers[0]))
            continue
        both = zip(chosen, deferred, strict=True)
        data = _joined_bits([x or shards.data.reshape(1, -1) for shards, x in both])
        if any(deferred):  # as in `EncodedShards.encode`, which these do not pass through
            data = lax.optimization_barrier(data)
        buckets.append(GatherBucket(data, tuple(_without_data(x) for x in chosen), tuple(numbers)))
    return buckets


def unpack(buckets: Sequence[GatherBucket]) -> list[EncodedShards]:
    """Return the shards in `buckets`, gathered or not, in the order given to `pack`."""
    by_position: dict[int, EncodedShards] = {}
    for bucket in buckets:
        by_position.update(zip(bucket.positions, bucket.unpack(), strict=True))
    return [by_position[i] for i in range(len(by_position))]


def arrays(buckets: Sequence[GatherBucket], dtypes: Sequence[Any]) -> list[Array]:
    """Decode the weights of all buckets, in the order given to `pack`.

    Args:
        buckets: the gathered buckets.
        dtypes: the dtype of the result for each weight; None: the weight's own dtype.
    """
    by_position: dict[int, Array] = {}
    for bucket in buckets:
        decoded = bucket.arrays([dtypes[i] for i in bucket.positions])
        by_position.update(zip(bucket.positions, decoded, strict=True))
    return [by_position[i] for i in range(len(by_position))]


def _single(shards: EncodedShards, position: int) -> GatherBucket:
    return GatherBucket(shards.data, (_without_data(shards),), (position,))


def is_alone(shards: EncodedShards, comm: CommSpec, num_rows: int = 1) -> bool:
    """Return whether shards are sent over the next axis by themselves, not in a joined message.

    `num_rows` is the number of devices whose shards of the weight are gathered already.
    """
    if shards.codec is not None:
        return shards.tiled
    sent = math.prod(shards.data.shape) * shards.data.dtype.itemsize
    axes = comm.axes_with_peers(shards.axes)
    received = sent * num_rows * comm.sizes[axes[0]] if axes else 0
    if shards.hop is not None:
        return not comm.form.shares_kernel(received)
    return not (comm.form.joins(sent) and comm.form.copies(shards.shape, shards.dim, received))


def _without_data(shards: EncodedShards) -> EncodedShards:
    """Return the shards with a `ShapeDtypeStruct` in place of their data."""
    return shards.described(jax.ShapeDtypeStruct(shards.data.shape, shards.data.dtype))


def _joined_bits(rows: Sequence[Shaped[Array, "1 _"] | DeferredMessage]) -> Shaped[Array, "1 m"]:
    """Concatenate rows of several weights, and view the result as bits."""
    if len({x.dtype for x in rows}) > 1:
        rows = [x if isinstance(x, DeferredMessage) else to_bits(x) for x in rows]
    return to_bits(join_columns(rows))


def _row_dtype(shards: EncodedShards) -> Any:
    dtype = shards.data.dtype
    return jnp.dtype(dtype) if shards.codec is not None else bits_dtype(dtype)


def _columns(parts: Sequence[EncodedShards]) -> list[Column]:
    return [(math.prod(part.data.shape), np.dtype(_row_dtype(part))) for part in parts]


def _joined(part: EncodedShards, row: kernels.InPlace, dtype: Any) -> Array:
    """Return a weight as an array of type `dtype`, decoded from its columns of a bucket."""
    if part.codec is None:
        return _from_rows(part, row.cut_out()).join(dtype)
    num_shards, size = part.data.shape
    return part.decode(dataclasses.replace(row, size=size, count=num_shards), dtype)


def _from_rows(part: EncodedShards, rows: Shaped[Array, "n m"]) -> EncodedShards:
    """Return the gathered shards of a weight, from its columns of a bucket's rows."""
    if part.codec is not None:
        num_shards, size = part.data.shape
        return dataclasses.replace(part, data=rows.reshape(len(rows) * num_shards, size))
    x = joined_rows(from_bits(rows, part.dtype), part.shape, part.dim)
    return dataclasses.replace(part, data=x, shape=tuple(x.shape))
