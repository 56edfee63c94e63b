"""All-gather weights in buckets, one mesh axis at a time, with a codec for each axis.

Gathers run over `node` first and `local` second; reductions (`reductions`) run over `local` first.
So only a shard, the smallest array of all, crosses between nodes, and the gathered shards are in
the order of storage (`_sharding.layout`). `start_gather` encodes the buckets; each call of
`gather_hop` then gathers over one axis.

A node slice is the array that one device has after the gather over `node`: the joined shards of all
devices with its `local` index. `node_slices` makes node slices, which are gathered inside the node
later (hpZ).

[Note: weight differences] A step changes weights little, so a codec loses less on the difference
than on the weight (SDP4Bit, https://arxiv.org/abs/2410.15526). Each device keeps its node slice w
from step to step (`EncodedShards.kept`); the owner of a shard x sends the difference over `node`,
and every device that receives it adds it:

    w' = w + decode(encode(x - w)).

Legend: a `shard` is what one device owns; `full` is the array in its own shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Shaped

from .._codecs import Codec, DeferredMessage, from_bits, to_bits
from .._mesh import LOCAL, NODE, program_axes
from .._sharding import DimSharding, pad, unpad
from .comm_spec import CommSpec
from .encoded_shards import EncodedShards
from .gather_bucket import GatherBucket, is_alone, pack, unpack
from .primitives import all_to_all


def start_gather(
    shards: Sequence[EncodedShards], sizes: Sequence[int], comm: CommSpec
) -> list[GatherBucket]:
    """Encode this device's shards for the first axis of their gather, and pack them into buckets.

    Args:
        shards: for each weight, this device's shard or node slice; its `axes` are still to gather.
        sizes: for each weight, the elements of the full array (of one layer, if it is a stack);
            they are compared with `min_quantized_size`.
        comm: axes and codecs.
    """
    sent = [_encoded(x, size, comm) for x, size in zip(shards, sizes, strict=True)]
    return pack(sent, comm)


def gather_hop(
    buckets: Sequence[GatherBucket], sizes: Sequence[int], comm: CommSpec
) -> list[GatherBucket]:
    """All-gather each bucket over the next of its axes.

    If the following axis uses the same codecs and joins the same weights, the gathered messages are
    left as they are, to be sent on; otherwise they are decoded and encoded again. A fully gathered
    bucket is returned unchanged.
    """
    result = []
    for bucket in buckets:
        axis = _next_axis(bucket.parts[0], comm)
        if axis is None:
            result.append(bucket)
            continue
        bucket = bucket.gather(axis, comm.form)
        bucket_sizes = [sizes[i] for i in bucket.positions]
        pairs = zip(bucket.parts, bucket_sizes, strict=True)
        changes = any(_codec(x, size, comm) != x.codec for x, size in pairs)
        parts = bucket.parts if len(bucket.parts) > 1 else ()
        if not changes and not any(is_alone(x, comm, len(bucket.data)) for x in parts):
            result.append(bucket)
        else:
            encoded = start_gather(bucket.unpack(), bucket_sizes, comm)
            result += [x.renumbered(bucket.positions) for x in encoded]
    return result


def _next_axis(shards: EncodedShards, comm: CommSpec) -> str | None:
    """Return the next axis to gather over; None if the gather is complete."""
    return next(iter(comm.axes_with_peers(shards.axes)), None)


def _encoded(
    shards: EncodedShards, size: int, comm: CommSpec
) -> tuple[EncodedShards, DeferredMessage | None]:
    """Encode shards for the next axis; the message is deferred if the codec can write in place."""
    axis = _next_axis(shards, comm)
    if axis is None:
        return shards, None
    # Devices along these axes hold different shards. Those along the other axis hold the same
    # ones, and must encode the same messages, also where rounding is stochastic.
    split_axes = comm.axes[: comm.axes.index(axis) + 1]
    codec = _codec(shards, size, comm)
    if comm.form.tiled:
        return shards.encode(codec, split_axes, tiled=True), None
    return shards.draft(codec, split_axes) or (shards.encode(codec, split_axes), None)


def _codec(shards: EncodedShards, size: int, comm: CommSpec) -> Codec | None:
    """Return the codec for the next axis; the present one if none is left, or shards are pinned."""
    axis = _next_axis(shards, comm)
    if shards.pinned or axis is None:
        return shards.codec
    if shards.kept is not None:
        return comm.weight_hop.codec
    codec = comm.weight_codec(axis, size, shards.dtype)
    if codec is not None and codec.exchange_format is not None and codec == shards.codec:
        raise NotImplementedError(
            f"`weights.local` cannot be {codec} here: shards arrive encoded by the same codec, "
            "from `weights.node` or `HpZ`, and are sent on as they are, which the kernel cannot "
            'do: it encodes. Leave out `implementation="nvlink"`, or keep slices that are not '
            "encoded (`HpZ(codec=None)`)."
        )
    return codec


def node_slices(
    shards: Sequence[EncodedShards],
    sizes: Sequence[int],
    comm: CommSpec,
    pin: Callable[[list[GatherBucket]], list[GatherBucket]] = lambda buckets: buckets,
) -> list[EncodedShards]:
    """All-gather weights over `node` only, and encode the slices as hpZ stores them.

    Args:
        shards: this device's shards. If a shard has `kept`, the difference to that slice is sent.
        sizes: for each weight, the elements of the full array, or of one layer of a stack.
        comm: axes and codecs.
        pin: applied to the encoded buckets before they are sent, to put a barrier on them.
    """
    sent = [x if x.kept is None else _difference(x, x.kept, comm) for x in shards]
    sent = [dataclasses.replace(x, axes=(NODE,)) for x in sent]
    received = unpack(gather_hop(pin(start_gather(sent, sizes, comm)), sizes, comm))
    slices = []
    for shard, gathered, size in zip(shards, received, sizes, strict=True):
        if shard.kept is not None:
            new = comm.weight_hop.updated(_finite(shard.kept), gathered.join()).astype(shard.dtype)
            new = EncodedShards.plain(new, shard.dim, shard.lead)
            slices.append(encode_node_slice(new, size, comm))
        else:
            tiled = comm.form.tiled
            slices.append(
                gathered
                if gathered.pinned
                else encode_node_slice(gathered, size, comm, tiled=tiled)
            )
    return [dataclasses.replace(x, axes=s.axes[1:]) for x, s in zip(slices, shards, strict=True)]


def encode_node_slice(
    node_slice: EncodedShards, size: int, comm: CommSpec, *, tiled: bool = False
) -> EncodedShards:
    """Encode a node slice with hpZ's codec, to be gathered over `local` later.

    `size` is the number of elements of the full array, compared with `min_quantized_size`. For a
    slice that is kept between steps, `tiled` is False: its form must not depend on the platform.
    """
    assert comm.hpz is not None
    codec = comm.suitable_for_weights(comm.hpz.codec, size, node_slice.dtype)
    return node_slice.encode(codec, (LOCAL,), tiled=tiled)


def _difference(shard: EncodedShards, kept: EncodedShards, comm: CommSpec) -> EncodedShards:
    """Return the difference of a shard to its part of the node slice that the devices keep."""
    size = shard.shape[shard.dim]
    start = lax.axis_index(NODE) * size
    mine = lax.dynamic_slice_in_dim(_finite(kept), start, size, axis=shard.dim)
    difference = comm.weight_hop.difference(shard.join(jnp.float32), mine)
    plain = EncodedShards.plain(difference, shard.dim, shard.lead)
    return dataclasses.replace(plain, kept=kept)


def _finite(kept: EncodedShards) -> Float32[Array, ...]:
    """Decode a node slice, with 0 in place of numbers that are not finite.

    After weights with NaN are replaced from a checkpoint, NaN + difference would stay NaN.
    """
    old = kept.join(jnp.float32)
    return jnp.where(jnp.isfinite(old), old, 0)


def move_split(
    x: Shaped[Array, ...],
    shape: tuple[int, ...],
    old: DimSharding,
    new: DimSharding,
    axes: tuple[str, ...],
) -> Shaped[Array, ...]:
    """Move the split of a sharded array to another dim, by one all-to-all.

    Args:
        x: this device's shard in the layout `old`.
        shape: true shape of the full array, without padding.
        old: the present layout.
        new: the target layout, on another dim.
        axes: the mesh axes that split the array; each has more than one device.
    """
    assert old.dim != new.dim and shape[new.dim] == new.size
    if not axes:
        return unpad(pad(x, new), old)
    bits = all_to_all(to_bits(pad(x, new)), axes, new.dim, old.dim)
    return unpad(from_bits(bits, x.dtype), old)


def gathered_aval(shard: Any, layout: DimSharding, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
    """Return the type (shape, dtype, sharding) of the array that `shard` is gathered to."""

    def full(x: Array) -> Array:
        for axis in reversed(program_axes(axes)):
            x = lax.all_gather(x, axis, axis=layout.dim, tiled=True)
        return unpad(x, layout)

    return jax.eval_shape(full, shard)
