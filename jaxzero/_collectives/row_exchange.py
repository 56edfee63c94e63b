"""Look up rows of a sharded table, or add rows to it: devices exchange rows, not the table.

All devices get each other's ids. A table that is split on its first dim is read where its rows are:
a device contributes the rows that it owns and zeros for all other rows, and a reduce-scatter over
`local`, then `node`, returns to each device the rows that it asked for:

    rows = reduce_scatter(where(owned(ids), shard[ids - start], 0)),    ids = all_gather(own ids).

Exactly one device contributes each row, so the sum is exact in any dtype. If an entry is the sum of
several rows (a bag), each device contributes the sum of those that it owns. If a table is split on
another dim, each device reads its columns of all rows, and an all-to-all returns them.

The transpose sends cotangents the other way (an all-gather, or an all-to-all). Each device adds the
cotangents of the rows that it owns to its shard, which becomes its shard of the sum over all
devices. Additions are in `accumulator_dtype`.

With a codec each row, or each device's columns of it, is a message of its own: its scales depend on
no other row, and the zeros for rows that a device does not own arrive as zeros. Rows that are read
are encoded by the codecs of weights. They are encoded anew for each axis, since a reduce-scatter
with a codec is an all-to-all whose messages are decoded and added up. Cotangents are encoded by the
codecs of gradients, and only once if both axes have the same codec. Rounding errors are not made up
for: rows have no wire state.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from .._codecs import Codec
from .._mesh import AXES, device_index, program_axes
from .._sharding import DimSharding, pad, unpad
from .comm_spec import CommSpec, accumulator_dtype
from .primitives import all_gather, all_to_all, reduce_scatter

Wait = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class RowExchange:
    """Reads rows of one sharded table, and adds their cotangents to a shard, by exchanging rows.

    Legend: each device asks for n rows, each of them the sum of the table's rows at k ids.

    Attributes:
        shape: the shape of the full table, without padding; its first dim counts rows.
        dtype: the dtype of its shards.
        layout: the split dim, and its padding.
        comm: mesh axes and their sizes, and codecs.
        coded_size: the number of elements that is compared with `min_quantized_size` to choose
            codecs; 0 sends rows without a codec.
    """

    shape: tuple[int, ...]
    dtype: Any
    layout: DimSharding
    comm: CommSpec
    coded_size: int = 0

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of one device's shard."""
        shape, dim = [*self.shape], self.layout.dim
        shape[dim] = self.layout.padded // self.layout.num_shards
        return tuple(shape)

    @property
    def sum_dtype(self) -> Any:
        """The dtype of sums of gradients."""
        return accumulator_dtype(self.dtype)

    def row_bytes(self, dtype: Any) -> int:
        """Return the number of bytes of one row of the table in `dtype`."""
        return math.prod(self.shape[1:]) * jnp.dtype(dtype).itemsize

    def entering_bytes(self, n: int, k: int, dtype: Any, *, back: bool) -> dict[str, int]:
        """Return the bytes that enter a device over each axis for n rows, their ids included.

        Args:
            n: number of rows that one device reads.
            k: number of ids of each row.
            dtype: dtype of the rows before they are encoded.
            back: True counts cotangents, which all devices get; False counts rows that are read.

        Returns:
            Bytes for each of `AXES`.
        """
        num_bytes: dict[str, int] = dict.fromkeys(AXES, 0)
        axes = self.axes(back)
        sizes = [self.comm.sizes[axis] for axis in axes]
        # Elements of one message, and the number of parts that axes so far have cut a row into.
        columns, parts = math.prod(self.shape[1:]), 1
        if self.layout.dim != 0:
            columns = columns // self.layout.size * self.layout.padded
        for i, axis in enumerate(axes):
            # Rows of all devices along the minor axes, those after this one, are sent over it too.
            from_others = (sizes[i] - 1) * math.prod(sizes[i + 1 :])
            messages = n * from_others
            if self.layout.dim != 0:
                messages = n * parts * (sizes[i] - 1)
                if axis in self.comm.axes:
                    columns, parts = columns // sizes[i], parts * sizes[i]
            codec = self.codec(axis, dtype, back=back)
            size = columns * jnp.dtype(dtype).itemsize
            num_bytes[axis] = messages * (codec.num_bytes(columns, dtype) if codec else size)
            if not back or axes != self.axes(back=False):  # ids have not been sent yet
                num_bytes[axis] += 4 * n * k * from_others  # as int32
        return num_bytes

    def codec(self, axis: str, dtype: Any, *, back: bool) -> Codec | None:
        """Return the codec for rows over `axis`: that of gradients if `back`, else of weights.

        None if it would not make messages smaller.
        """
        codec_of = self.comm.gradient_codec if back else self.comm.weight_codec
        codec = codec_of(axis, self.coded_size, dtype)
        is_smaller = codec is not None and codec.bits < 8 * jnp.dtype(dtype).itemsize
        return codec if is_smaller else None

    def axes(self, back: bool) -> tuple[str, ...]:
        """Return the axes of more than one device that rows are sent over, major first.

        Rows are read over the axes that split the table. Cotangents (`back`) are summed over all
        axes.
        """
        others = tuple(x for x in AXES if x not in self.comm.axes) if back else ()
        return self.comm.axes_with_peers((*self.comm.axes, *others))

    def int32(self, ids: Int[Array, "n k"]) -> Int32[Array, "n k"]:
        """Convert ids of any integer dtype to int32.

        Ids out of bounds stay so: a negative id becomes -1, and an id past the last row becomes the
        number of rows.
        """
        num, largest = self.shape[0], jnp.iinfo(ids.dtype).max
        # The number of rows may not fit into the dtype of ids; then no id is too high.
        is_high = ids >= num if num <= largest else jnp.zeros_like(ids, bool)
        inside = jnp.clip(ids, 0, min(num - 1, largest)).astype(jnp.int32)
        return jnp.where(ids < 0, jnp.int32(-1), jnp.where(is_high, jnp.int32(num), inside))

    def read(
        self,
        shard: Shaped[Array, ...],
        ids_of_all: Int32[Array, ...],
        ids: Int[Array, "n k"],
        dtypes: Sequence[Any],
        fill: Any = None,
        wait: Wait = lambda x: x,
    ) -> tuple[Shaped[Array, "n ..."], Shaped[Array, " 1"]]:
        """Return this device's rows of the table: for each, the sum of the rows at its k ids.

        Args:
            shard: this device's shard.
            ids_of_all: the result of `gather_ids`.
            ids: this device's ids, of any integer dtype.
            dtypes: rows are cast to these dtypes in turn, as the user's function casts them; they
                are encoded, sent and summed in the last one.
            fill: the value that is read at ids out of bounds; None reads the nearest row instead.
            wait: passes the ids through a barrier, so that the rows are not read before it.

        Returns:
            The rows in the last of `dtypes`; and one element of what the first axis has delivered.
            An operation that waits for that element runs after the rows read for other devices are
            freed.
        """
        axes, lead = self.axes(back=False), len(self.axes(back=False))
        local, is_owned = self._owned(wait(ids_of_all), fill is None)
        rows = shard.at[local].get(mode="clip", wrap_negative_indices=False)
        rows = _cast(rows, dtypes)
        rows = jnp.where(_like(is_owned, rows), rows, jnp.zeros((), rows.dtype))
        rows = rows.sum(lead + 1) if ids.shape[1] > 1 else jnp.squeeze(rows, lead + 1)
        rows = _Rows(rows, lead)
        sent: Any = None
        is_split = self.layout.dim != 0
        # Rows are summed over `local`, the major axis, first, so that only the sums of a node are
        # sent between nodes. Columns are joined in the order of a gather, minor axis first.
        for dim, axis in [*enumerate(axes)][:: -1 if is_split else 1]:
            codec = self.codec(axis, dtypes[-1], back=False)
            if is_split:
                rows = rows.joined(axis, dim, self.layout.dim, codec)
            else:
                rows = rows.summed(axis, dim, codec)
            sent = rows.data if sent is None else sent
        rows = rows.data.reshape(len(ids), *rows.data.shape[lead + 1 :])
        rows = unpad(rows, self.layout) if is_split else rows
        if fill is not None:
            own = self.int32(ids)
            num = _like(((own < 0) | (own == self.shape[0])).sum(1), rows)
            filled = num.astype(rows.dtype) * _cast(jnp.asarray(fill, self.dtype), dtypes)
            # NaN is the default fill, and 0 times NaN is NaN.
            rows += jnp.where(num > 0, filled, jnp.zeros((), rows.dtype))
        return rows, lax.slice(sent, [0] * sent.ndim, [1] * sent.ndim).reshape(1)

    def add(
        self,
        total: Shaped[Array, ...],
        ids_of_all: Int32[Array, ...],
        cotangents: Float[Array, "n ..."],
        clips: bool,
        divisor: int | float | None = None,
        waits: Sequence[Wait] = (),
    ) -> Shaped[Array, ...]:
        """Add the cotangents of all devices, each at its k ids, to a shard of sums.

        Args:
            total: a shard of the table's shape, in `sum_dtype`.
            ids_of_all: the result of `gather_ids`.
            cotangents: this device's cotangents; without a codec they are sent in their own dtype.
            clips: whether an id out of bounds stands for the nearest row; otherwise for no row.
            divisor: the number by which the cotangents are divided; None: 1.
            waits: for each axis that cotangents are sent over, in order, a function that passes the
                sent arrays through a barrier.

        Returns:
            `total` with the cotangents added.
        """
        axes = self.axes(back=True)
        rows = cotangents if self.layout.dim == 0 else pad(cotangents, self.layout)
        rows = _Rows(rows.reshape(*[1] * len(axes), *rows.shape), len(axes))
        is_split = self.layout.dim != 0  # then devices get their columns of all rows
        # The reverse of `read`. Whole rows cross nodes first, while each device sends only its own.
        numbered = [*enumerate(axes)] if is_split else [*reversed([*enumerate(axes)])]
        for (dim, axis), wait in itertools.zip_longest(numbered, waits[: len(axes)]):
            codec = self.codec(axis, cotangents.dtype, back=True)
            if is_split and axis in self.comm.axes:
                rows = rows.waiting(wait).split(axis, dim, self.layout.dim, codec)
            else:
                rows = rows.encoded(codec, cotangents.dtype).waiting(wait).gathered(axis, dim)
        rows = rows.decoded(total.dtype).data
        local, is_owned = self._owned(ids_of_all, clips)
        local = jnp.where(is_owned, local, jnp.int32(self.shard_shape[0]))  # others are dropped
        rows = jnp.expand_dims(rows, len(axes) + 1)
        rows = rows if divisor is None else rows / jnp.asarray(divisor, rows.dtype)
        rows = jnp.broadcast_to(rows, (*ids_of_all.shape, *rows.shape[len(axes) + 2 :]))
        return total.at[local].add(rows, mode="drop", wrap_negative_indices=False)

    def _owned(
        self, ids: Int32[Array, ...], clips: bool
    ) -> tuple[Int32[Array, ...], Bool[Array, ...]]:
        """Return where this device's shard has the row of each id, and whether it has that row.

        `clips` says that an id out of bounds of the table stands for the nearest row; otherwise no
        shard has it.

        Returns:
            The row's index in the shard, which means nothing if the shard lacks the row; and True
            if the shard has the row.
        """
        num = self.shape[0]
        if clips:
            ids = jnp.clip(ids, 0, num - 1)
        is_owned = (ids >= 0) & (ids < num)
        if self.layout.dim == 0:
            num = self.shard_shape[0]
            first = lax.axis_index(program_axes(self.comm.axes)).astype(jnp.int32) * jnp.int32(num)
            ids = ids - first
            is_owned &= (ids >= 0) & (ids < num)
        return ids, is_owned


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of a table on their way between devices, as floats or as messages of a codec.

    `data` is `[*devices, n, *row]`, or `[*devices, n, bytes]` with a codec. The first `lead` dims
    belong to mesh axes, one to each. Such a dim counts the receivers before the exchange over its
    axis, and the senders after it. In the methods, `dim` is the dim of `axis` among these, and
    `column` is a dim of the table.
    """

    data: Any
    lead: int
    codec: Codec | None = None
    row: tuple[int, ...] = ()  # with a codec the shape of a decoded row

    def waiting(self, wait: Wait | None) -> _Rows:
        return self if wait is None else dataclasses.replace(self, data=wait(self.data))

    def encoded(self, codec: Codec | None, dtype: Any) -> _Rows:
        """Return these rows encoded by `codec`; None returns decoded rows.

        Rows that another codec has encoded are decoded to `dtype` first.
        """
        if codec == self.codec:
            return self
        x = self.decoded(dtype).data
        if codec is None:
            return _Rows(x, self.lead)
        devices_n, row = x.shape[: self.lead + 1], x.shape[self.lead + 1 :]
        with jax.named_scope("encode"):
            seed = device_index(program_axes(AXES))
            message = codec.encode_rows(x.reshape(*devices_n, math.prod(row)), seed=seed)
        # Without the barrier XLA may move casts of the decoding in front of the collective.
        return _Rows(lax.optimization_barrier(message), self.lead, codec, row)

    def decoded(self, dtype: Any) -> _Rows:
        if self.codec is None:
            return _Rows(self.data.astype(dtype), self.lead)
        with jax.named_scope("decode"):
            x = self.codec.decode_rows(self.data, math.prod(self.row), dtype)
        return _Rows(x.reshape(*x.shape[:-1], *self.row), self.lead)

    def gathered(self, axis: str, dim: int) -> _Rows:
        """All-gather these rows, encoded or not, over `axis`; dim `dim` then counts senders."""
        form = self.codec or self.data.dtype
        return dataclasses.replace(self, data=all_gather(self.data, axis, dim, forms=(form,)))

    def summed(self, axis: str, dim: int, codec: Codec | None) -> _Rows:
        """Reduce-scatter over `axis`, with `codec` or without.

        Each device gets the rows that are addressed to it along `dim`, summed over senders.
        """
        if codec is None:
            return _Rows(reduce_scatter(self.data, axis, dim), self.lead)
        parts = self._exchanged(axis, dim, codec, accumulator_dtype(self.data.dtype))
        return _Rows(parts.data.sum(dim, keepdims=True).astype(self.data.dtype), self.lead)

    def joined(self, axis: str, dim: int, column: int, codec: Codec | None) -> _Rows:
        """All-to-all over `axis`, from rows split by column to whole rows.

        Before, the device has its columns of the rows of all devices; after, all columns of its own
        rows.
        """
        at = self.lead + column
        if codec is None:
            return _Rows(all_to_all(self.data, axis, dim, at), self.lead)
        x = self._exchanged(axis, dim, codec, self.data.dtype).data
        shape = [*x.shape]
        shape[dim], shape[at] = 1, shape[dim] * shape[at]
        return _Rows(jnp.moveaxis(x, dim, at - 1).reshape(shape), self.lead)

    def split(self, axis: str, dim: int, column: int, codec: Codec | None) -> _Rows:
        """All-to-all over `axis`, from whole rows to rows split by column; reverses `joined`.

        Before, the device has all columns of its own rows; after, its columns of the rows of all
        devices.
        """
        at = self.lead + column
        if codec is None:
            return _Rows(all_to_all(self.data, axis, at, dim), self.lead)
        shape, num = [*self.data.shape], lax.axis_size(axis)
        shape[at : at + 1] = num, shape[at] // num
        x = jnp.moveaxis(jnp.squeeze(self.data.reshape(shape), dim), at - 1, dim)
        return _Rows(x, self.lead)._exchanged(axis, dim, codec, x.dtype)

    def _exchanged(self, axis: str, dim: int, codec: Codec, dtype: Any) -> _Rows:
        """Encode the rows, send part i along `dim` to device i, and decode what is received."""
        sent = self.encoded(codec, self.data.dtype)
        data = all_to_all(sent.data, axis, dim, dim, forms=(codec,))
        return dataclasses.replace(sent, data=data).decoded(dtype)


def gather_ids(ids: Sequence[Int32[Array, ...]], axes: tuple[str, ...]) -> list[Int32[Array, ...]]:
    """All-gather the ids of several lookups over `axes`, in one message.

    Ids `[n, k]` of a lookup become `[*devices, n, k]`, with a dim for each axis.
    """
    message = jnp.concatenate([x.reshape(-1) for x in ids])
    of_all = message.reshape(*[1] * len(axes), -1)
    # Over `node`, the minor axis, first: ids then cross nodes once, not once for each device.
    for dim, axis in reversed([*enumerate(axes)]):
        of_all = all_gather(of_all, axis, dim, tuple(x.nbytes for x in ids))
    stops = [*itertools.accumulate(x.size for x in ids)]
    parts = jnp.split(of_all, stops[:-1], axis=-1)
    sizes = of_all.shape[:-1]
    return [part.reshape(*sizes, *x.shape) for part, x in zip(parts, ids, strict=True)]


def _cast(x: Any, dtypes: Sequence[Any]) -> Any:
    for dtype in dtypes:
        x = x.astype(dtype)
    return x


def _like(mask: Shaped[Array, ...], rows: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """Append dims of size 1 to `mask`, which has a value for each row, to broadcast with `rows`."""
    return mask.reshape(*mask.shape, *[1] * (rows.ndim - mask.ndim))
