"""A weight while it is gathered: shards as arrays or encoded messages, alone or in a bucket.

Each owner encodes its shard once. These messages, side by side, are gathered, kept and gathered
again; they are decoded where the weight is used. So every use, on every device, in forward and
backward, reads the same bits.

A collective has a fixed cost, whatever its size. So the shards of a group of weights are laid side
by side, as bits, in one array with a row for each device:

    data[d] = [shard d of weight 0 | shard d of weight 1 | ...]

After the gather each weight is a range of columns, which its decoder reads in place. Narrow floats
of one dtype become bits after they are joined, and floats again before they are cut apart: one
operation for a bucket, where a program of unrolled layers would have one for each weight.

Legend: a message is `[*lead, shards, bytes]`, or if it is tiled (`MessageForm`) `[*lead, shards,
...]`. `lead` are the leading dims that a loop scans over: each of their elements (a layer) is
encoded by itself.
"""

from __future__ import annotations

import dataclasses
import functools
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
    Codec,
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
from .._mesh import device_index
from .._sharding import LeafSpec
from .comm_spec import CommSpec, MessageForm
from .ledger import picked
from .primitives import all_gather, copy_to_device


@dataclasses.dataclass(frozen=True)
class EncodedShards:
    """Neighbouring shards of an array that is split along one dim.

    Attributes:
        data: without a codec the array that the shards form; with one their messages.
        codec: the codec that wrote the messages, or None.
        shape: shape of one shard; without a codec, of `data`.
        dim: the dim that the array is split along.
        dtype: dtype of the array.
        lead: number of leading dims that are encoded element by element.
        axes: axes over which the shards are still to be gathered, in this order.
        pinned: whether the shards are sent as they are, and the codecs of the config (`weights`,
            `hpz`) are not used: the leaf is stored encoded, or no codec may encode it.
        tiled: whether the messages are those of `Codec.encode_tiled`.
        kept: the node slice of the step before, if the first gather over `node` sends the
            difference to it (`_execute.gather_sources`).
    """

    data: Shaped[Array, ...]
    codec: Codec | None
    shape: tuple[int, ...]
    dim: int
    dtype: Any
    lead: int = 0
    axes: tuple[str, ...] = ()
    pinned: bool = False
    tiled: bool = False
    kept: EncodedShards | None = None

    @classmethod
    def plain(cls, x: Shaped[Array, ...], dim: int, lead: int = 0) -> EncodedShards:
        """Shards without a codec, which form the array `x`."""
        return cls(x, None, tuple(x.shape), dim, x.dtype, lead)

    def encode(
        self, codec: Codec | None, axes: tuple[str, ...], *, tiled: bool = False
    ) -> EncodedShards:
        """Encode these shards with `codec`, after decoding them if another codec wrote them.

        Args:
            codec: the codec; None only decodes.
            axes: axes along which devices hold different shards. Devices with equal shards must
                write equal messages, also where rounding is stochastic.
            tiled: whether to write the messages of `Codec.encode_tiled`.
        """
        if codec == self.codec:
            return self
        x = self.join()
        if codec is None:
            return dataclasses.replace(EncodedShards.plain(x, self.dim, self.lead), axes=self.axes)
        with jax.named_scope("encode"):
            data = self._messages(x, codec, device_index(axes), tiled)
        # Without it XLA may move casts of the decoding in front of the collective that follows,
        # which would then send floats.
        data = lax.optimization_barrier(data)
        return dataclasses.replace(self, data=data, codec=codec, shape=tuple(x.shape), tiled=tiled)

    def _messages(self, x: Array, codec: Codec, seed: Array, tiled: bool) -> Array:
        """The messages of `x`, one for each element of its leading dims, with a dim for shards."""
        if not tiled:
            rows = x.reshape(*x.shape[: self.lead], math.prod(x.shape[self.lead :]))
            return jnp.expand_dims(codec.encode_rows(rows, seed=seed), self.lead)
        encode = functools.partial(codec.encode_tiled, dim=self.dim - self.lead, num=1, seed=seed)
        for _ in range(self.lead):
            encode = jax.vmap(encode)
        return encode(x)

    def draft(
        self, codec: Codec | None, axes: tuple[str, ...]
    ) -> tuple[EncodedShards, DeferredMessage] | None:
        """`encode`, but with a deferred message, to be written straight into a bucket.

        Returns:
            The encoded shards without data, and the message. None if the shards need no encoding,
            or the message cannot be written in place.
        """
        if codec is None or codec == self.codec or self.lead or not codec.writes_in_place:
            return None
        x = self.join()
        shape = (1, *codec.message(x.size, x.dtype).shape)
        write = functools.partial(codec.encode_pieces, x, 0, 1, seed=device_index(axes))
        draft = DeferredMessage(shape, jax.named_scope("encode")(write))
        known = self.described(jax.ShapeDtypeStruct(shape, draft.dtype))
        known = dataclasses.replace(known, codec=codec, shape=tuple(x.shape), tiled=False)
        return known, draft

    def described(self, data: jax.ShapeDtypeStruct) -> EncodedShards:
        """These shards with only the shape and dtype of `data`, in place of an array."""
        known = dataclasses.replace(self, kept=None)
        return dataclasses.replace(known, data=data)  # pyright: ignore[reportArgumentType]

    def join(self, dtype: Any = None) -> Shaped[Array, ...]:
        """The array that the shards form, as `dtype` (by default its own)."""
        if self.codec is None:
            return self.data.astype(self.dtype if dtype is None else dtype)
        return self.decode(self.data, dtype)

    @jax.named_scope("decode")
    def decode(
        self, data: Shaped[Array, ...] | kernels.InPlace, dtype: Any = None
    ) -> Shaped[Array, ...]:
        """Decode and join the messages `data`, which are read in place if there is no `lead`."""
        assert self.codec is not None
        dtype = self.dtype if dtype is None else dtype
        codec, lead = self.codec, self.lead

        def one(message: Any) -> Array:
            shape, dim = self.shape[lead:], self.dim - lead
            decode = codec.decode_tiled if self.tiled else codec.decode_pieces
            return decode(message, shape, dim, dtype)

        for _ in range(lead):
            one = jax.vmap(one)
        return one(data)

    def gather(self, axis: str, form: MessageForm = MessageForm()) -> EncodedShards:  # noqa: B008
        """Put the shards of all devices along `axis` side by side."""
        gathered, forms = self.over(axis), (self.codec or self.dtype,)
        if self.codec is not None:
            data = all_gather(self.data, axis, self.lead, forms=forms)
            return dataclasses.replace(gathered, data=data)
        bits = self.data if form.tiled else to_bits(self.data)
        x = from_bits(all_gather(bits, axis, self.dim, forms=forms), self.dtype)
        return dataclasses.replace(gathered, data=x, shape=tuple(x.shape))

    def over(self, axis: str) -> EncodedShards:
        """These shards, with `axis` and those before it removed from `axes`, as gathered."""
        done = self.axes.index(axis) + 1 if axis in self.axes else 0
        return dataclasses.replace(self, axes=self.axes[done:])

    def on_device(self, name: str, *, windowed: bool) -> EncodedShards:
        """These shards in device memory; see `copy_to_device` for the arguments."""
        data = copy_to_device(self.data, "weights", name, windowed=windowed)
        return dataclasses.replace(self, data=data)

    def layer(
        self, data: Shaped[Array, ...], kept: Shaped[Array, ...] | None = None
    ) -> EncodedShards:
        """These shards for one layer of a stack.

        Args:
            data: the layer's slice of `data` in a loop's body.
            kept: the layer's slice of the data of `kept`; `None` leaves `kept` out.
        """
        assert self.codec is None or self.lead > 0
        lead = max(self.lead - 1, 0)
        before = None if kept is None or self.kept is None else self.kept.layer(kept)
        return dataclasses.replace(
            self, data=data, shape=self.shape[1:], dim=self.dim - 1, lead=lead, kept=before
        )

    def stack(self, data: Shaped[Array, ...]) -> EncodedShards:
        """These shards for a stack of such layers, with `data` stacked; reverses `layer`."""
        shape = (len(data), *self.shape)
        return dataclasses.replace(
            self, data=data, shape=shape, dim=self.dim + 1, lead=self.lead + 1
        )


jax.tree_util.register_dataclass(
    EncodedShards,
    ["data", "kept"],
    ["codec", "shape", "dim", "dtype", "lead", "axes", "pinned", "tiled"],
)


def to_stored(x: Shaped[Array, ...], leaf: LeafSpec) -> Shaped[Array, ...]:
    """Encode a full padded array for storage: one message of `leaf.codec` for each device."""
    assert leaf.layout is not None and leaf.codec is not None
    dim, num, lead = leaf.layout.dim, leaf.layout.num_shards, leaf.num_lead
    x = x.reshape(*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    x = jnp.moveaxis(x, dim, lead)
    rows = x.reshape(*x.shape[: lead + 1], math.prod(x.shape[lead + 1 :]))
    return leaf.codec.encode_rows(rows)


def from_stored(data: Shaped[Array, ...], leaf: LeafSpec) -> EncodedShards:
    """`EncodedShards` of stored messages: one device's inside `shard_map`, all outside of it."""
    assert leaf.layout is not None and leaf.codec is not None
    dim, shape = leaf.layout.dim, list(leaf.padded_shape)
    shape[dim] //= leaf.layout.num_shards
    return EncodedShards(
        data, leaf.codec, tuple(shape), dim, leaf.dtype, leaf.num_lead, pinned=True
    )


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
            data = all_gather(self.data, axis, 0, column_bytes(_columns(self.parts)), forms)
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
            return columns_in_place(self.data, columns)
        sizes = [(size, np.dtype(only)) for size, _ in columns]
        return columns_in_place(from_bits(self.data, only), sizes)


jax.tree_util.register_dataclass(GatherBucket, ["data"], ["parts", "positions"])


def pack(
    sent: Sequence[tuple[EncodedShards, DeferredMessage | None]], comm: CommSpec
) -> list[GatherBucket]:
    """Put shards into buckets: one for all shards with the same remaining axes.

    Stacks that a loop scans (`lead`) and what is sent alone, or not at all, get their own buckets.

    Args:
        sent: for each weight its shards; if these have no data yet, also the `DeferredMessage`
            that is written into the bucket here.
        comm: axes, and the form of messages on the platform.
    """
    buckets = []
    by_axes: dict[tuple[str, ...], list[int]] = {}
    for i, (shards, _) in enumerate(sent):
        joins = comm.axes_with_peers(shards.axes) and not shards.lead
        if joins and can_join(_row_dtype(shards)) and not is_alone(shards, comm):
            by_axes.setdefault(shards.axes, []).append(i)
        else:
            buckets.append(_single(shards, i))
    for numbers in by_axes.values():
        chosen, deferred = zip(*(sent[i] for i in numbers), strict=True)
        if deferred == (None,):
            buckets.append(_single(chosen[0], numbers[0]))
            continue
        pairs = zip(chosen, deferred, strict=True)
        data = _joined_bits([x or shards.data.reshape(1, -1) for shards, x in pairs])
        # Keeps XLA from moving the decoding across the collective, as in `EncodedShards.encode`,
        # which deferred messages do not pass through.
        if any(deferred):
            data = lax.optimization_barrier(data)
        buckets.append(GatherBucket(data, tuple(_without_data(x) for x in chosen), tuple(numbers)))
    return buckets


def unpack(buckets: Sequence[GatherBucket]) -> list[EncodedShards]:
    """The shards in `buckets`, gathered or not, in the order given to `pack`."""
    by_position: dict[int, EncodedShards] = {}
    for bucket in buckets:
        by_position.update(zip(bucket.positions, bucket.unpack(), strict=True))
    return [by_position[i] for i in range(len(by_position))]


def arrays(buckets: Sequence[GatherBucket], dtypes: Sequence[Any]) -> list[Array]:
    """Decode all weights, in the order given to `pack`; see `GatherBucket.arrays`."""
    by_position: dict[int, Array] = {}
    for bucket in buckets:
        decoded = bucket.arrays([dtypes[i] for i in bucket.positions])
        by_position.update(zip(bucket.positions, decoded, strict=True))
    return [by_position[i] for i in range(len(by_position))]


def _single(shards: EncodedShards, position: int) -> GatherBucket:
    return GatherBucket(shards.data, (_without_data(shards),), (position,))


def is_alone(shards: EncodedShards, comm: CommSpec, num_rows: int = 1) -> bool:
    """Whether shards, of which there are `num_rows`, are sent over the next axis as they lie."""
    if shards.codec is not None:
        return shards.tiled
    sent = math.prod(shards.data.shape) * shards.data.dtype.itemsize
    axes = comm.axes_with_peers(shards.axes)
    received = sent * num_rows * comm.sizes[axes[0]] if axes else 0
    return not (comm.form.joins(sent) and comm.form.copies(shards.shape, shards.dim, received))


def _without_data(shards: EncodedShards) -> EncodedShards:
    """The shards with a `ShapeDtypeStruct` in place of their data."""
    return shards.described(jax.ShapeDtypeStruct(shards.data.shape, shards.data.dtype))


def _joined_bits(rows: Sequence[Shaped[Array, "1 _"] | DeferredMessage]) -> Shaped[Array, "1 m"]:
    """Concatenate rows as bits."""
    if len({x.dtype for x in rows}) > 1:
        rows = [x if isinstance(x, DeferredMessage) else to_bits(x) for x in rows]
    return to_bits(join_columns(rows))


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
