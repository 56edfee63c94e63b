"""Units of weights: what is sent of them, and what is made of what arrived."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._codecs import Cast
from .._collectives import (
    Parcel,
    Pieces,
    Wire,
    arrays,
    gather_hop,
    labelled,
    node_slices,
    picked,
    start_gather,
)
from .._plan import Gather, Unit, View, Weight
from .._program import movable_ops as views
from .._sharding import Layout, unpad

Held = dict[Weight, Pieces]
Bind = Callable[[list[Any]], list[Any]]


def write(unit: Unit, held: Held, wire: Wire, tie: Bind, pin: Bind) -> list[Parcel]:
    """Write what is sent of the weights of a unit, in one message.

    Args:
        unit: what is gathered.
        held: what this device has of the weights. A slice that is to be kept replaces the
            shard it was made of.
        wire: how they travel.
        tie: binds the shards to what must exist first, so that they are not gathered early.
        pin: binds the messages to it, so that they are not written late.

    Returns:
        The messages, for `pass_on`, and after the last hop for `receive`.
    """
    weights = list(dict.fromkeys(one.weight for one in unit.gathers))
    data = tie([held[x].data for x in weights])
    now = {x: dataclasses.replace(held[x], data=d) for x, d in zip(weights, data, strict=True)}
    with _labelled(unit):
        kept = [i for i, one in enumerate(unit.gathers) if one.keeps]
        if kept:
            layers = [unit.gathers[i].weight for i in kept]
            with picked(kept):
                sizes = [math.prod(x.shape) for x in layers]
                slices = node_slices(
                    [now[x] for x in layers], sizes, wire, lambda parcels: bound(parcels, pin)
                )
            now.update(zip(layers, slices, strict=True))
            held.update(zip(layers, slices, strict=True))
        pieces = []
        for one in unit.gathers:
            ops, _ = _order(one, now[one.weight], wire)
            mine = now[one.weight]
            pieces.append(on_shard(mine, ops, one.weight)[0] if ops else mine)
        parcels = start_gather(pieces, _sizes(unit), wire)
        return parcels if kept else bound(parcels, pin)


def pass_on(unit: Unit, parcels: Sequence[Parcel], wire: Wire, num_hops: int) -> list[Parcel]:
    """Send what has still `num_hops` hops before it over one; the rest (a slice) waits."""
    waiting = [len(wire.long(x.parts[0].axes)) >= num_hops for x in parcels]
    go = [x for x, waits in zip(parcels, waiting, strict=True) if waits]
    stay = [x for x, waits in zip(parcels, waiting, strict=True) if not waits]
    if not go:
        return list(parcels)
    with _labelled(unit):
        return [*gather_hop(go, _sizes(unit), wire), *stay]


def bound(parcels: Sequence[Parcel], bind: Bind) -> list[Parcel]:
    """The same messages, bound to something else."""
    data = bind([x.data for x in parcels])
    return [dataclasses.replace(x, data=d) for x, d in zip(parcels, data, strict=True)]


def receive(unit: Unit, parcels: Sequence[Parcel], held: Held, wire: Wire) -> list[jax.Array]:
    """The whole weights, with the operations of their gathers done to them."""
    orders = [_order(one, held[one.weight], wire) for one in unit.gathers]
    dtypes = [_first_type(after) for _, after in orders]
    with _labelled(unit):
        arrived = arrays(parcels, dtypes)
    wholes = []
    for one, (ops, after), x in zip(unit.gathers, orders, arrived, strict=True):
        pushed = views.push(ops, one.weight.layout, one.weight.shape)
        assert pushed is not None
        x = unpad(x, pushed[0])
        for op in after:
            x = op.apply(x)
        wholes.append(x)
    return wholes


def _labelled(unit: Unit) -> contextlib.AbstractContextManager[None]:
    return labelled("weights", *(one.weight.name for one in unit.gathers))


def _first_type(ops: tuple[views.Op, ...]) -> Any:
    """The type that operations begin with a cast to; None: with another one."""
    return ops[0].dtype if ops and isinstance(ops[0], views.Cast) else None


def on_shard(pieces: Pieces, ops: tuple[views.Op, ...], weight: Weight) -> tuple[Pieces, Layout]:
    """Do `ops` to this device's piece of a weight."""
    pushed = views.push(ops, weight.layout, weight.shape)
    assert pushed is not None
    x = views.apply_on_shard(ops, pieces.join(), weight.layout, weight.shape)
    return dataclasses.replace(Pieces.plain(x, pushed[0].dim), axes=pieces.axes), pushed[0]


def _sizes(unit: Unit) -> list[int]:
    """Elements of what is sent of each weight, whole."""
    slices = (views.up_to_last_slice(one.ops)[0] for one in unit.gathers)
    pairs = zip(unit.gathers, slices, strict=True)
    return [math.prod(View(one.weight, ops).shape) for one, ops in pairs]


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
