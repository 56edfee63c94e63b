"""Make node slices: gather weights over `node` only, to be gathered inside the node later (hpZ).

A node slice is the part of an array that one device has after the gather over `node`, joined from
the shards of all devices with its `local` index.

[Note: weight differences] A step changes weights little, so a codec loses less on the difference
than on the weight (SDP4Bit, https://arxiv.org/abs/2410.15526). Each device keeps its node slice w
from step to step (`EncodedShards.kept`); the owner of a shard x sends the difference over `node`,
and every device that receives it adds it:

    w' = w + decode(encode(x - w)).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from .._mesh import LOCAL, NODE
from .bucket import GatherBucket, unpack
from .comm_spec import CommSpec
from .encoded_shards import EncodedShards
from .gather import gather_hop, start_gather


def node_slices(
    shards: Sequence[EncodedShards],
    sizes: Sequence[int],
    comm: CommSpec,
    pin: Callable[[list[GatherBucket]], list[GatherBucket]] = lambda buckets: buckets,
) -> list[EncodedShards]:
    """All-gather weights over `node` only, and encode the slices as hpZ stores them.

    Args:
        shards: this device's shards. Those with `kept` are sent as differences to it.
        sizes: for each weight, the elements of the full array, or of one layer of a stack.
        comm: axes and codecs.
        pin: applied to the encoded buckets before they are sent, to put a barrier on them.
    """
    sent = [x if x.kept is None else _difference(x, x.kept, comm) for x in shards]
    sent = [dataclasses.replace(x, axes=(NODE,)) for x in sent]
    received = unpack(gather_hop(pin(start_gather(sent, sizes, comm)), sizes, comm))
    slices = []
    for shard, x, size in zip(shards, received, sizes, strict=True):
        if shard.kept is not None:
            new = comm.weight_hop.updated(_finite(shard.kept), x.join()).astype(shard.dtype)
            new = EncodedShards.plain(new, shard.dim, shard.lead)
            slices.append(encode_node_slice(new, size, comm))
        else:
            tiled = comm.form.tiled
            slices.append(x if x.pinned else encode_node_slice(x, size, comm, tiled=tiled))
    return [dataclasses.replace(x, axes=(LOCAL,)) for x in slices]


def encode_node_slice(
    node_slice: EncodedShards, size: int, comm: CommSpec, *, tiled: bool = False
) -> EncodedShards:
    """Encode a node slice with hpZ's codec, to be gathered over `local` later.

    `size` is the number of elements of the full array, compared with `min_quantized_size`. A slice
    that is kept between steps is not `tiled`: its form does not depend on the platform.
    """
    assert comm.hpz is not None
    codec = comm.suitable_for_weights(comm.hpz.codec, size, node_slice.dtype)
    return node_slice.encode(codec, (LOCAL,), tiled=tiled)


def _difference(shard: EncodedShards, kept: EncodedShards, comm: CommSpec) -> EncodedShards:
    """The difference between a shard and its part of the node slice, to be encoded."""
    size = shard.shape[shard.dim]
    start = lax.axis_index(NODE) * size
    mine = lax.dynamic_slice_in_dim(_finite(kept), start, size, axis=shard.dim)
    difference = comm.weight_hop.difference(shard.join(jnp.float32), mine)
    plain = EncodedShards.plain(difference, shard.dim, shard.lead)
    return dataclasses.replace(plain, kept=kept)


def _finite(kept: EncodedShards) -> Float32[Array, ...]:
    """A node slice, decoded, with 0 for what is not finite.

    After weights with NaN are replaced from a checkpoint, NaN + difference would stay NaN.
    """
    old = kept.join(jnp.float32)
    return jnp.where(jnp.isfinite(old), old, 0)
