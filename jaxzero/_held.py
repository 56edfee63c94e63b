"""What a device holds of each weight while a step runs: its shard, or its node's slice.

With hpZ every weight is gathered between nodes once, before anything else, and the node's
slice stays: forward, backward and all micro-batches gather from it. With weight differences
the slice of the step before is brought up to date instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from ._collectives import Wire, keep, move_split, node_slices
from ._config import Difference
from ._mesh import LOCAL, NODE
from ._partition import Leaf
from ._pieces import Pieces, from_stored
from ._traffic import labelled
from ._uses import BlockUses, Weight


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
