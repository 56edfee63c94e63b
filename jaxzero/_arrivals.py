"""Units of weights: what is sent of them, and what is made of what arrived."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from . import _views as views
from ._codecs import Cast
from ._collectives import Wire, gather, node_slices, unpad
from ._messages import Parcel, unpack
from ._partition import Layout
from ._pieces import Pieces
from ._regions import Gather
from ._schedule import Unit
from ._traffic import labelled
from ._uses import View, Weight

Held = dict[Weight, Pieces]


def send(unit: Unit, held: Held, wire: Wire, ties: tuple[Any, ...] = ()) -> list[Parcel]:
    """Gather the weights of a unit, in one message for each hop.

    Args:
        unit: what is gathered.
        held: what this device has of the weights. A slice that is to be kept replaces the
            shard it was made of.
        wire: how they travel.
        ties: values that must exist first.

    Returns:
        What arrived, for `receive`.
    """
    with labelled("weights", *(one.weight.name for one in unit.gathers)):
        if ties:
            weights = list(dict.fromkeys(one.weight for one in unit.gathers))
            data, _ = lax.optimization_barrier(([held[x].data for x in weights], ties))
            tied = zip(weights, data, strict=True)
            held_now = {**held, **{x: dataclasses.replace(held[x], data=d) for x, d in tied}}
        else:
            held_now = held
        kept = [one.weight for one in unit.gathers if one.keeps]
        if kept:
            sizes = [math.prod(weight.shape) for weight in kept]
            slices = node_slices([held_now[weight] for weight in kept], sizes, wire)
            made = dict(zip(kept, slices, strict=True))
            held_now = {**held_now, **made}
            held.update(made)
        pieces, sizes = [], []
        for one in unit.gathers:
            mine = held_now[one.weight]
            ops, _ = _order(one, mine, wire)
            pieces.append(on_shard(mine, ops, one.weight)[0] if ops else mine)
            sizes.append(math.prod(View(one.weight, views.up_to_last_slice(one.ops)[0]).shape))
        return gather(pieces, sizes, wire)


def receive(unit: Unit, parcels: Sequence[Parcel], held: Held, wire: Wire) -> list[jax.Array]:
    """The whole weights, with the operations of their gathers done to them."""
    arrays = []
    for one, full in zip(unit.gathers, unpack(parcels), strict=True):
        ops, after = _order(one, held[one.weight], wire)
        pushed = views.push(ops, one.weight.layout, one.weight.shape)
        assert pushed is not None
        first = after[0] if after else None
        x = unpad(full.join(first.dtype if isinstance(first, views.Cast) else None), pushed[0])
        for op in after:
            x = op.apply(x)
        arrays.append(x)
    return arrays


def on_shard(pieces: Pieces, ops: tuple[views.Op, ...], weight: Weight) -> tuple[Pieces, Layout]:
    """Do `ops` to this device's piece of a weight."""
    pushed = views.push(ops, weight.layout, weight.shape)
    assert pushed is not None
    x = views.apply_on_shard(ops, pieces.join(), weight.layout, weight.shape)
    return dataclasses.replace(Pieces.plain(x, pushed[0].dim), axes=pieces.axes), pushed[0]


def _order(
    one: Gather, pieces: Pieces, wire: Wire
) -> tuple[tuple[views.Op, ...], tuple[views.Op, ...]]:
    """Which operations come before the gather, and which after.

    What will be quantised is quantised as it is stored, and cast to the type of its use when
    it is decoded; of the operations only slices are worth doing first.
    """
    slices, rest = views.up_to_last_slice(one.ops)
    size = math.prod(View(one.weight, slices).shape)
    codecs = [wire.weight_codec(axis, size, one.weight.dtype) for axis in pieces.axes]
    if pieces.codec is not None or any(codec and not isinstance(codec, Cast) for codec in codecs):
        return slices, rest
    return one.ops, ()
