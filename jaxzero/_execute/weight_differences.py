"""A node's slice of the weights, kept from step to step and updated by differences."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._collectives import CommSpec, EncodedShards, keep, labelled
from .._mesh import LOCAL, NODE
from .._sharding import LeafSpec, WeightHop


def has_kept_slice(leaf: LeafSpec, comm: CommSpec) -> bool:
    """Whether a leaf travels as differences. Small ones, those stored
    whole, and any on a single node do not."""
    hop = comm.weights.node
    if not isinstance(hop, WeightHop) or leaf.layout is None or leaf.codec is not None:
        return False
    suitable = comm.suitable(hop.codec, leaf.layer_size, leaf.dtype) is not None
    return suitable and comm.sizes[NODE] > 1


def first_slice(shard: Shaped[Array, ...], leaf: LeafSpec, comm: CommSpec) -> EncodedShards:
    """The node's slice of a weight, gathered whole: the start of all differences."""
    assert leaf.layout is not None
    with labelled("weights", leaf.path):
        full = EncodedShards.plain(shard, leaf.layout.dim, leaf.num_lead).gather(NODE)
        return keep(full, leaf.layer_size, comm)


def kept_slice(data: Shaped[Array, ...], leaf: LeafSpec, comm: CommSpec) -> EncodedShards:
    """What `first_slice` and `next_slice` returned, from its `data`."""
    assert leaf.layout is not None and comm.hpz is not None
    lead, dim = leaf.num_lead, leaf.layout.dim
    shape = list(leaf.padded_shape)
    shape[dim] //= comm.sizes[LOCAL]
    codec = comm.suitable(comm.hpz.codec, leaf.layer_size, leaf.dtype)
    return EncodedShards(data, codec, tuple(shape), dim, leaf.dtype, lead)


def next_slice(
    shard: Shaped[Array, ...], kept: EncodedShards, leaf: LeafSpec, comm: CommSpec
) -> EncodedShards:
    """Bring the node's slice up to date: the owners send how far it is from their shards."""
    hop = comm.weights.node
    assert isinstance(hop, WeightHop) and leaf.layout is not None
    with labelled("weights", leaf.path):
        old = kept.join(jnp.float32)
        old = jnp.where(jnp.isfinite(old), old, 0)  # weights that were NaN may be restored
        size = shard.shape[kept.dim]
        start = lax.axis_index(NODE) * size
        mine = lax.dynamic_slice_in_dim(old, start, size, axis=kept.dim)
        difference = hop.difference(shard.astype(jnp.float32), mine)
        change = EncodedShards.plain(difference, kept.dim, kept.lead)
        change = change.encode(hop.codec, comm.axes).gather(NODE)
        new = hop.updated(old, change.join()).astype(leaf.dtype)
        return keep(EncodedShards.plain(new, kept.dim, kept.lead), leaf.layer_size, comm)
