"""A node's slice of the weights, kept from step to step and updated by differences."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._collectives import Pieces, Wire, keep, labelled
from .._mesh import LOCAL, NODE
from .._sharding import Difference, Leaf


def has_kept_slice(leaf: Leaf, wire: Wire) -> bool:
    """Whether a leaf travels as differences. Small ones, those stored
    whole, and any on a single node do not."""
    codec = wire.weights.node
    if not isinstance(codec, Difference) or leaf.layout is None or leaf.codec is not None:
        return False
    suitable = wire.suitable(codec.codec, leaf.layer_size, leaf.dtype) is not None
    return suitable and wire.sizes[NODE] > 1


def first_slice(shard: Shaped[Array, ...], leaf: Leaf, wire: Wire) -> Pieces:
    """The node's slice of a weight, gathered whole: the start of all differences."""
    assert leaf.layout is not None
    with labelled("weights", leaf.path):
        full = Pieces.plain(shard, leaf.layout.dim, leaf.num_lead).gather(NODE)
        return keep(full, leaf.layer_size, wire)


def kept_slice(data: Shaped[Array, ...], leaf: Leaf, wire: Wire) -> Pieces:
    """What `first_slice` and `next_slice` returned, from its `data`."""
    assert leaf.layout is not None and wire.hpz is not None
    lead, dim = leaf.num_lead, leaf.layout.dim
    shape = list(leaf.padded_shape)
    shape[dim] //= wire.sizes[LOCAL]
    codec = wire.suitable(wire.hpz.codec, leaf.layer_size, leaf.dtype)
    return Pieces(data, codec, tuple(shape), dim, leaf.dtype, lead)


def next_slice(shard: Shaped[Array, ...], kept: Pieces, leaf: Leaf, wire: Wire) -> Pieces:
    """Bring the node's slice up to date: the owners send how far it is from their shards."""
    assert isinstance(wire.weights.node, Difference) and leaf.layout is not None
    with labelled("weights", leaf.path):
        old = kept.join(jnp.float32)
        old = jnp.where(jnp.isfinite(old), old, 0)  # weights that were NaN may be restored
        size = shard.shape[kept.dim]
        start = lax.axis_index(NODE) * size
        mine = lax.dynamic_slice_in_dim(old, start, size, axis=kept.dim)
        change = Pieces.plain(shard.astype(jnp.float32) - mine, kept.dim, kept.lead)
        change = change.encode(wire.weights.node.codec, wire.axes).gather(NODE)
        new = (old + change.join()).astype(leaf.dtype)
        return keep(Pieces.plain(new, kept.dim, kept.lead), leaf.layer_size, wire)
