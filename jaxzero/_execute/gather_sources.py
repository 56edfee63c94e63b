"""Make the array that each weight is gathered from during a step: its shard or node slice (hpZ).

With hpZ (ZeRO++, https://arxiv.org/abs/2306.10209) every weight is gathered between nodes once, and
each device keeps the result, its node slice. Forward, backward and all micro-batches then gather
inside the node. With weight differences, a step does not gather the node slice again: it adds the
differences to the slice of the previous step.

Such slices are part of the wire state; [Note: weight differences] in `_collectives.gather` has the
algorithm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxtyping import Array, Shaped

from .._collectives import (
    CommSpec,
    EncodedShards,
    copy_to_device,
    encode_node_slice,
    from_stored,
    labelled,
    move_split,
    node_slices,
)
from .._mesh import LOCAL, NODE
from .._plan import BlockUses, ShardedParam
from .._sharding import LeafSpec, PerAxis, WeightHop


def scan_depths(uses: BlockUses) -> Mapping[ShardedParam, int]:
    """Return, for each weight, the number of its leading dims over which nested loops scan."""
    depths: dict[ShardedParam, int] = {}
    for loop in uses.loops.values():
        inner = scan_depths(loop.body)
        depths.update(inner)
        for stack in loop.stacks:
            if not stack.view.ops:
                weight = stack.view.weight
                depth = 1 + inner.get(stack.layer, 0)
                depths[weight] = max(depths.get(weight, 0), depth)
    return depths


def gather_source(
    shard: Shaped[Array, ...],
    leaf: LeafSpec,
    weight: ShardedParam,
    depth: int,
    comm: CommSpec,
    node_slice: EncodedShards | None = None,
    exact: bool = False,
) -> EncodedShards:
    """Make the array that the program gathers a weight from: its shard, or its node slice.

    Args:
        shard: this device's shard in stored form.
        leaf: the stored layout and codec.
        weight: the weight as the program sees it, which may be split along another dim.
        depth: the number of leading dims that the program scans over.
        comm: with `hpz`, the result is a node slice; without, the shard.
        node_slice: the node slice, if it exists already; otherwise it is made here.
        exact: whether to send this weight without the codecs of the config.
    """
    if exact:
        codecs = {
            "weights": PerAxis(),
            "hpz": comm.hpz and dataclasses.replace(comm.hpz, codec=None),
        }
        comm = dataclasses.replace(comm, **codecs)
    source = _gather_source(shard, leaf, weight, depth, comm, node_slice)
    axes = leaf.split_axes((LOCAL,) if comm.hpz else comm.gather_axes)
    return dataclasses.replace(source, pinned=source.pinned or exact, axes=axes)


def _gather_source(
    shard: Shaped[Array, ...],
    leaf: LeafSpec,
    weight: ShardedParam,
    depth: int,
    comm: CommSpec,
    node_slice: EncodedShards | None,
) -> EncodedShards:
    assert leaf.layout is not None
    moved = leaf.layout.dim != weight.layout.dim
    # A moved split and a node slice both need the whole shard on the device, so it cannot be copied
    # layer by layer later.
    if moved or comm.hpz:
        shard = copy_to_device(shard, "weights", leaf.path, windowed=False)
    size = math.prod(leaf.shape[depth:])
    if leaf.codec is not None:
        encoded = from_stored(shard, leaf)
        if not moved:
            return node_slices([encoded], [size], comm)[0] if comm.hpz else encoded
        shard = encoded.join()
    if not comm.hpz:
        if not moved:
            return EncodedShards.plain(shard, leaf.layout.dim, depth)
        axes = comm.axes_with_peers(leaf.split_axes(comm.axes))
        resplit = move_split(shard, leaf.shape, leaf.layout, weight.layout, axes)
        return EncodedShards.plain(resplit, weight.layout.dim, depth)
    if node_slice is None:
        plain = EncodedShards.plain(shard, leaf.layout.dim, 0 if moved else depth)
        (node_slice,) = node_slices([plain], [size], comm)
    if moved:
        # The devices of a node together have the full weight, so the exchange stays inside it.
        axes = comm.axes_with_peers(leaf.split_axes((LOCAL,)))
        resplit = move_split(node_slice.join(), leaf.shape, leaf.layout, weight.layout, axes)
        return encode_node_slice(EncodedShards.plain(resplit, weight.layout.dim, depth), size, comm)
    if node_slice.codec is not None and node_slice.lead != depth:
        # Weight differences: the wire state existed before the program was traced, so its layers
        # are those of the leaf's shape. A loop needs each of its own layers encoded separately.
        return encode_node_slice(
            EncodedShards.plain(node_slice.join(), node_slice.dim, depth), size, comm
        )
    return node_slice


def has_kept_slice(leaf: LeafSpec, comm: CommSpec) -> bool:
    """Return whether nodes keep a slice of a leaf between steps, and send only its differences.

    That is so if `weights.node` is a `WeightHop`, there are several nodes, and the leaf is sharded,
    not stored encoded, and large enough to be encoded.
    """
    hop = comm.weights.node
    if not isinstance(hop, WeightHop) or leaf.layout is None or leaf.codec is not None:
        return False
    suitable = comm.suitable_for_weights(hop.codec, leaf.layer_size, leaf.dtype) is not None
    return suitable and comm.sizes[NODE] > 1


def first_slice(shard: Shaped[Array, ...], leaf: LeafSpec, comm: CommSpec) -> EncodedShards:
    """Gather a node slice for the state before the first step; no codec encodes it on the wire."""
    assert leaf.layout is not None
    with labelled("weights", leaf.path):
        full = EncodedShards.plain(shard, leaf.layout.dim, leaf.num_lead).gather(NODE)
        return encode_node_slice(full, leaf.layer_size, comm)


def kept_slice(data: Shaped[Array, ...], leaf: LeafSpec, comm: CommSpec) -> EncodedShards:
    """Return a leaf's array of the wire state, `data`, as a node slice with codec and layout."""
    assert leaf.layout is not None and comm.hpz is not None
    lead, dim = leaf.num_lead, leaf.layout.dim
    shape = list(leaf.padded_shape)
    shape[dim] //= comm.sizes[LOCAL]
    codec = comm.suitable_for_weights(comm.hpz.codec, leaf.layer_size, leaf.dtype)
    return EncodedShards(data, codec, tuple(shape), dim, leaf.dtype, lead)


def next_slice(
    shard: Shaped[Array, ...], kept: EncodedShards, leaf: LeafSpec, comm: CommSpec
) -> EncodedShards:
    """Gather the changes of a weight since the slice `kept` in one message, and add them to it."""
    assert leaf.layout is not None
    with labelled("weights", leaf.path):
        plain = EncodedShards.plain(shard, leaf.layout.dim, leaf.num_lead)
        return node_slices([dataclasses.replace(plain, kept=kept)], [leaf.layer_size], comm)[0]
