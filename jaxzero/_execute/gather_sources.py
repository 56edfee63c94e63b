"""What a device holds of each weight while a step runs: its shard, or its node's slice.

With hpZ every weight is gathered between nodes once, before anything else, and the node's
slice stays: forward, backward and all micro-batches gather from it. With weight differences
the slice of the step before is brought up to date instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxtyping import Array, Shaped

from .._collectives import CommSpec, EncodedShards, from_stored, keep, move_split, node_slices
from .._mesh import LOCAL
from .._plan import BlockUses, ShardedParam
from .._sharding import LeafSpec


def scan_depths(uses: BlockUses) -> Mapping[ShardedParam, int]:
    """For each weight, how many of its leading dims loops scan over, layer by layer."""
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
    known: EncodedShards | None = None,
) -> EncodedShards:
    """What a program gathers a weight from: the shard, or the node's slice.

    Args:
        shard: this device's piece, as it is stored.
        leaf: how it is stored.
        weight: how the program cuts it, perhaps along another dim.
        depth: how many leading dims it scans over.
        comm: with `hpz`, the slice is made now; without, the shard is what is held.
        known: the node's slice, where it is at hand already.
    """
    pieces = _gather_source(shard, leaf, weight, depth, comm, known)
    return dataclasses.replace(pieces, axes=(LOCAL,) if comm.hpz else comm.gather_axes)


def _gather_source(
    shard: Shaped[Array, ...],
    leaf: LeafSpec,
    weight: ShardedParam,
    depth: int,
    comm: CommSpec,
    known: EncodedShards | None,
) -> EncodedShards:
    assert leaf.layout is not None
    moved = leaf.layout.dim != weight.layout.dim
    size = math.prod(leaf.shape[depth:])
    if leaf.codec is not None:
        pieces = from_stored(shard, leaf)
        if not moved:
            return node_slices([pieces], [size], comm)[0] if comm.hpz else pieces
        shard = pieces.join()
    if not comm.hpz:
        if not moved:
            return EncodedShards.plain(shard, leaf.layout.dim, depth)
        axes = comm.long(comm.axes)
        x = move_split(shard, leaf.shape, leaf.layout, weight.layout, axes)
        return EncodedShards.plain(x, weight.layout.dim, depth)
    if known is None:
        known = EncodedShards.plain(shard, leaf.layout.dim, 0 if moved else depth)
        (known,) = node_slices([known], [size], comm)
    if moved:  # inside the node: a slice is there already
        axes = comm.long((LOCAL,))
        x = move_split(known.join(), leaf.shape, leaf.layout, weight.layout, axes)
        return keep(EncodedShards.plain(x, weight.layout.dim, depth), size, comm)
    if known.codec is not None and known.lead != depth:
        return keep(EncodedShards.plain(known.join(), known.dim, depth), size, comm)
    return known


# Weight differences (SDP4Bit): the slice of the step before, kept in the wire state. It is
# laid out by the leaf's shape alone, because the state exists before any program does.
