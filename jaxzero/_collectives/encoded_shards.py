"""`EncodedShards`: shards of a weight that is being gathered, as arrays or as encoded messages.

Each owner encodes its shard once. Side by side, these messages are gathered, kept, and gathered
again over the next axis; they are decoded only where the weight is used. So every use, on every
device, in forward and backward, reads the same bits.

Legend: a message is `[*lead, shards, bytes]`, or if it is tiled (`MessageForm`) `[*lead, shards,
...]`. `lead` are the leading dims that a loop scans over: each of their elements (a layer) is
encoded by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .. import pallas_kernels as kernels
from .._codecs import (
    Codec,
    DeferredMessage,
    from_bits,
    joined_rows,
    to_bits,
)
from .._mesh import device_index
from .._sharding import LeafSpec
from .comm_spec import MessageForm
from .kernel_hop import KernelHop, lead_parts
from .primitives import all_gather, copy_to_device


@dataclasses.dataclass(frozen=True)
class EncodedShards:
    """Neighbouring shards of an array that is split along one dim.

    Attributes:
        data: without a codec, the array that the shards form; with a codec, their messages.
        codec: the codec that wrote the messages, or None.
        shape: shape of one shard; without a codec, of `data`.
        dim: the dim that the array is split along.
        dtype: dtype of the array.
        lead: number of leading dims that are encoded element by element.
        axes: axes over which the shards are still to be gathered, in this order.
        pinned: whether the shards are sent as they are, without the config's codecs (`weights`,
            `hpz`): because the leaf is stored encoded, or because no codec may encode it.
        tiled: whether the messages are those of `Codec.encode_tiled`.
        kept: if the gather over `node` sends differences (`WeightDelta`): the node slice, which is
            what this device had after that gather in the step before.
        hop: set if a single kernel will encode, gather and decode the array next. Until then
            `codec` is None, and `data` is the array.
        read_as: the dtype in which such a kernel returns the full array; None: `dtype`.
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
    hop: KernelHop | None = None
    read_as: Any = None

    @classmethod
    def plain(cls, x: Shaped[Array, ...], dim: int, lead: int = 0) -> EncodedShards:
        """Make shards without a codec, which form the array `x`."""
        return cls(x, None, tuple(x.shape), dim, x.dtype, lead)

    def encode(
        self, codec: Codec | None, axes: tuple[str, ...], *, tiled: bool = False
    ) -> EncodedShards:
        """Encode these shards with `codec`, after decoding them if another codec wrote them.

        Args:
            codec: the codec; None only decodes. If its hops are one kernel, nothing is encoded yet:
                that happens in `gather`.
            axes: axes along which devices hold different shards. Devices with equal shards must
                write equal messages, also where rounding is stochastic.
            tiled: whether to write the messages of `Codec.encode_tiled`.
        """
        if codec == self.codec:
            return self
        x = self.join()
        if codec is None or codec.exchange_format is not None:
            plain = EncodedShards.plain(x, self.dim, self.lead)
            plain = dataclasses.replace(plain, axes=self.axes, read_as=self.read_as)
            if codec is None:
                return plain
            return dataclasses.replace(plain, hop=KernelHop(codec, axes, self.read_as or x.dtype))
        with jax.named_scope("encode"):
            data = self._messages(x, codec, device_index(axes), tiled)
        # Without the barrier XLA may move casts of the decoding in front of the collective that
        # follows, which would then send floats (jax-ml/jax#23543).
        data = lax.optimization_barrier(data)
        return dataclasses.replace(self, data=data, codec=codec, shape=tuple(x.shape), tiled=tiled)

    def _messages(self, x: Array, codec: Codec, seed: Array, tiled: bool) -> Array:
        """Encode `x` as messages `[*lead, 1, bytes]`: one for each element of its leading dims."""
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
        """Prepare to encode these shards straight into a bucket, without a copy.

        Returns:
            The encoded shards, without data; and the `DeferredMessage` that writes the data. None
            if the shards need no encoding, or the codec cannot write in place.
        """
        if codec is None or codec == self.codec or self.lead or not codec.writes_in_place:
            return None
        x = self.join()
        shape = (1, *codec.message(x.size, x.dtype).shape)
        write = functools.partial(codec.encode_pieces, x, 0, 1, seed=device_index(axes))
        draft = DeferredMessage(shape, jax.named_scope("encode")(write))
        shards = self.described(jax.ShapeDtypeStruct(shape, draft.dtype))
        shards = dataclasses.replace(shards, codec=codec, shape=tuple(x.shape), tiled=False)
        return shards, draft

    def described(self, data: jax.ShapeDtypeStruct) -> EncodedShards:
        """Return these shards without arrays: `data` is their shape and dtype, `kept` is None."""
        shards = dataclasses.replace(self, kept=None)
        return dataclasses.replace(shards, data=data)  # pyright: ignore[reportArgumentType]

    def join(self, dtype: Any = None) -> Shaped[Array, ...]:
        """Return the array that the shards form, as `dtype` (by default its own)."""
        if self.codec is None:
            return self.data.astype(self.dtype if dtype is None else dtype)
        return self.decode(self.data, dtype)

    @jax.named_scope("decode")
    def decode(
        self, data: Shaped[Array, ...] | kernels.InPlace, dtype: Any = None
    ) -> Shaped[Array, ...]:
        """Decode messages, and join them to the array that the shards form.

        Args:
            data: the messages; `InPlace` (some columns of a larger array) only without `lead`.
            dtype: the dtype of the result; by default that of the shards.
        """
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
        """All-gather these shards over `axis`; return the shards of all its devices together."""
        if self.hop is not None:
            return self._gather_by_kernel(self.hop, axis)
        gathered, forms = self.over(axis), (self.codec or self.dtype,)
        if self.codec is not None:
            data = all_gather(self.data, axis, self.lead, forms=forms)
            return dataclasses.replace(gathered, data=data)
        bits = self.data if form.tiled else to_bits(self.data)
        x = from_bits(all_gather(bits, axis, self.dim, forms=forms), self.dtype)
        return dataclasses.replace(gathered, data=x, shape=tuple(x.shape))

    def _gather_by_kernel(self, hop: KernelHop, axis: str) -> EncodedShards:
        if not self.lead:
            x = hop.gather(self.data, self.dim, axis)
        else:
            parts = lead_parts(self.shape, self.lead)
            rows = hop.gather(self.data.reshape(1, -1), 0, axis, parts)
            x = joined_rows(rows, self.shape, self.dim)
        return dataclasses.replace(self.gathered_by_kernel(axis), data=x, shape=tuple(x.shape))

    def gathered_by_kernel(self, axis: str) -> EncodedShards:
        """Return the description of these shards after `hop`, a kernel, has gathered them.

        It has the dtype of the kernel's result, no `hop`, and the old `data`, to be replaced.
        """
        assert self.hop is not None
        return dataclasses.replace(self.over(axis), dtype=self.hop.dtype, hop=None)

    def over(self, axis: str) -> EncodedShards:
        """Return these shards with `axis`, and the axes before it, removed from `axes`."""
        done = self.axes.index(axis) + 1 if axis in self.axes else 0
        return dataclasses.replace(self, axes=self.axes[done:])

    def on_device(self, name: str, *, windowed: bool) -> EncodedShards:
        """Return these shards, copied to device memory if needed; arguments: `copy_to_device`."""
        data = copy_to_device(self.data, "weights", name, windowed=windowed)
        return self if data is self.data else dataclasses.replace(self, data=data)

    def layer(
        self, data: Shaped[Array, ...], kept: Shaped[Array, ...] | None = None
    ) -> EncodedShards:
        """Return the shards of one layer, inside a loop over the stack that these shards are of.

        Args:
            data: the slice of the stack's `data` that the loop's body gets.
            kept: the slice of the data of the stack's `kept`; with None, the layer has no `kept`.
        """
        assert self.codec is None or self.lead > 0
        lead = max(self.lead - 1, 0)
        before = None if kept is None or self.kept is None else self.kept.layer(kept)
        return dataclasses.replace(
            self, data=data, shape=self.shape[1:], dim=self.dim - 1, lead=lead, kept=before
        )

    def stack(self, data: Shaped[Array, ...]) -> EncodedShards:
        """Return the shards of a stack of layers, where these are the shards of one layer.

        `data` is the stack's data. This reverses `layer`.
        """
        shape = (len(data), *self.shape)
        return dataclasses.replace(
            self, data=data, shape=shape, dim=self.dim + 1, lead=self.lead + 1
        )


jax.tree_util.register_dataclass(
    EncodedShards,
    ["data", "kept"],
    ["codec", "shape", "dim", "dtype", "lead", "axes", "pinned", "tiled", "hop", "read_as"],
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
    """Return the messages of a leaf that is stored encoded as `EncodedShards`.

    Inside of a `shard_map`, `data` is this device's message; outside, the messages of all devices.
    """
    assert leaf.layout is not None and leaf.codec is not None
    dim, shape = leaf.layout.dim, list(leaf.padded_shape)
    shape[dim] //= leaf.layout.num_shards
    return EncodedShards(
        data, leaf.codec, tuple(shape), dim, leaf.dtype, leaf.num_lead, pinned=True
    )
