"""Node slices of weights that persist across steps and are updated by quantized differences.

SDP4Bit (https://arxiv.org/abs/2410.15526): a step changes weights little, so a codec loses less on
the difference than on the weight. Each device keeps its node slice w in the wire state; the owner
of a shard x sends the difference over `node`, and every device that receives it adds it:

    w' = w + decode(encode(x - w)).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._collectives import CommSpec, EncodedShards, encode_node_slice, labelled
from .._mesh import LOCAL, NODE
from .._sharding import LeafSpec, WeightHop


def has_kept_slice(leaf: LeafSpec, comm: CommSpec) -> bool:
    """Whether a leaf is sent as differences between nodes.

    It is if `weights.node` is a `WeightHop`, there are several nodes, and the leaf is sharded, not
    stored encoded, and large enough to be encoded.
    """
    hop = comm.weights.node
    if not isinstance(hop, WeightHop) or leaf.layout is None or leaf.codec is not None:
        return False
    suitable = comm.suitable(hop.codec, leaf.layer_size, leaf.dtype) is not None
    return suitable and comm.sizes[NODE] > 1


def first_slice(shard: Shaped[Array, ...], leaf: LeafSpec, comm: CommSpec) -> EncodedShards:
    """Gather a node slice without a codec on the wire, for the state before the first step."""
    assert leaf.layout is not None
    with labelled("weights", leaf.path):
        full = EncodedShards.plain(shard, leaf.layout.dim, leaf.num_lead).gather(NODE)
        return encode_node_slice(full, leaf.layer_size, comm)


def kept_slice(data: Shaped[Array, ...], leaf: LeafSpec, comm: CommSpec) -> EncodedShards:
    """The node slice that `first_slice` or `next_slice` made, from its array in the wire state."""
    assert leaf.layout is not None and comm.hpz is not None
    lead, dim = leaf.num_lead, leaf.layout.dim
    shape = list(leaf.padded_shape)
    shape[dim] //= comm.sizes[LOCAL]
    codec = comm.suitable(comm.hpz.codec, leaf.layer_size, leaf.dtype)
    return EncodedShards(data, codec, tuple(shape), dim, leaf.dtype, lead)


def next_slice(
    shard: Shaped[Array, ...], kept: EncodedShards, leaf: LeafSpec, comm: CommSpec
) -> EncodedShards:
    """Update a node slice: every owner sends the difference between its shard and the slice."""
    hop = comm.weights.node
    assert isinstance(hop, WeightHop) and leaf.layout is not None
    with labelled("weights", leaf.path):
        old = kept.join(jnp.float32)
        # After weights with NaN are replaced from a checkpoint, NaN + difference would stay NaN.
        old = jnp.where(jnp.isfinite(old), old, 0)
        size = shard.shape[kept.dim]
        start = lax.axis_index(NODE) * size
        mine = lax.dynamic_slice_in_dim(old, start, size, axis=kept.dim)
        difference = hop.difference(shard.astype(jnp.float32), mine)
        change = EncodedShards.plain(difference, kept.dim, kept.lead)
        change = change.encode(hop.codec, comm.axes).gather(NODE)
        new = hop.updated(old, change.join()).astype(leaf.dtype)
        return encode_node_slice(
            EncodedShards.plain(new, kept.dim, kept.lead), leaf.layer_size, comm
        )
