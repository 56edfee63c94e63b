"""Node slices of weights that persist across steps and are updated by quantized differences.

Each device keeps them in the wire state. [Note: weight differences] in `_collectives.node_slices`
has the algorithm.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Shaped

from .._collectives import CommSpec, EncodedShards, encode_node_slice, labelled, node_slices
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
    suitable = comm.suitable_for_weights(hop.codec, leaf.layer_size, leaf.dtype) is not None
    return suitable and comm.sizes[NODE] > 1


def first_slice(shard: Shaped[Array, ...], leaf: LeafSpec, comm: CommSpec) -> EncodedShards:
    """Gather a node slice without a codec on the wire, for the state before the first step."""
    assert leaf.layout is not None
    with labelled("weights", leaf.path):
        full = EncodedShards.plain(shard, leaf.layout.dim, leaf.num_lead).gather(NODE)
        return encode_node_slice(full, leaf.layer_size, comm)


def kept_slice(data: Shaped[Array, ...], leaf: LeafSpec, comm: CommSpec) -> EncodedShards:
    """The node slice that the last step or `first_slice` made, from its array in the wire state."""
    assert leaf.layout is not None and comm.hpz is not None
    lead, dim = leaf.num_lead, leaf.layout.dim
    shape = list(leaf.padded_shape)
    shape[dim] //= comm.sizes[LOCAL]
    codec = comm.suitable_for_weights(comm.hpz.codec, leaf.layer_size, leaf.dtype)
    return EncodedShards(data, codec, tuple(shape), dim, leaf.dtype, lead)


def next_slice(
    shard: Shaped[Array, ...], kept: EncodedShards, leaf: LeafSpec, comm: CommSpec
) -> EncodedShards:
    """Update a node slice in a message of its own, with layers as `kept_slice` has them."""
    assert leaf.layout is not None
    with labelled("weights", leaf.path):
        plain = EncodedShards.plain(shard, leaf.layout.dim, leaf.num_lead)
        return node_slices([dataclasses.replace(plain, kept=kept)], [leaf.layer_size], comm)[0]
