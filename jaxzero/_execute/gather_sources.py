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

from .._collectives import Pieces, Wire, from_stored, keep, move_split, node_slices
from .._mesh import LOCAL
from .._plan import BlockUses, Weight
from .._sharding import Leaf


def scan_depths(uses: BlockUses) -> Mapping[Weight, int]:
    """For each weight, how many of its leading dims loops scan over, layer by layer."""
    depths: dict[Weight, int] = {}
    for loop in uses.loops.values():
        inner = scan_depths(loop.body)
        depths.update(inner)
        for stack in loop.stacks:
            if not stack.view.ops:
                weight = stack.view.weight
                depth = 1 + inner.get(stack.layer, 0)
                depths[weight] = max(depths.get(weight, 0), depth)
    return depths


def hold(
    shard: Shaped[Array, ...],
    leaf: Leaf,
    weight: Weight,
    depth: int,
    wire: Wire,
    known: Pieces | None = None,
) -> Pieces:
    """What a program gathers a weight from: the shard, or the node's slice.

    Args:
        shard: this device's piece, as it is stored.
        leaf: how it is stored.
        weight: how the program cuts it, perhaps along another dim.
        depth: how many leading dims it scans over.
        wire: with `hpz`, the slice is made now; without, the shard is what is held.
        known: the node's slice, where it is at hand already.
    """
    pieces = _hold(shard, leaf, weight, depth, wire, known)
    return dataclasses.replace(pieces, axes=(LOCAL,) if wire.hpz else wire.gather_axes)


def _hold(
    shard: Shaped[Array, ...],
    leaf: Leaf,
    weight: Weight,
    depth: int,
    wire: Wire,
    known: Pieces | None,
) -> Pieces:
    assert leaf.layout is not None
    moved = leaf.layout.dim != weight.layout.dim
    size = math.prod(leaf.shape[depth:])
    if leaf.codec is not None:
        pieces = from_stored(shard, leaf)
        if not moved:
            return node_slices([pieces], [size], wire)[0] if wire.hpz else pieces
        shard = pieces.join()
    if not wire.hpz:
        if not moved:
            return Pieces.plain(shard, leaf.layout.dim, depth)
        axes = wire.long(wire.axes)
        x = move_split(shard, leaf.shape, leaf.layout, weight.layout, axes)
        return Pieces.plain(x, weight.layout.dim, depth)
    if known is None:
        known = Pieces.plain(shard, leaf.layout.dim, 0 if moved else depth)
        (known,) = node_slices([known], [size], wire)
    if moved:  # inside the node: a slice is there already
        axes = wire.long((LOCAL,))
        x = move_split(known.join(), leaf.shape, leaf.layout, weight.layout, axes)
        return keep(Pieces.plain(x, weight.layout.dim, depth), size, wire)
    if known.codec is not None and known.lead != depth:
        return keep(Pieces.plain(known.join(), known.dim, depth), size, wire)
    return known


# Weight differences (SDP4Bit): the slice of the step before, kept in the wire state. It is
# laid out by the leaf's shape alone, because the state exists before any program does.
