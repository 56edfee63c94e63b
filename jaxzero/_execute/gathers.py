"""Encode, gather and decode one bucket of weights."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._collectives import (
    CommSpec,
    EncodedShards,
    GatherBucket,
    arrays,
    gather_hop,
    labelled,
    node_slices,
    picked,
    start_gather,
)
from .._plan import Gather, GatherGroup, ShardedParam, View
from .._program import movable_ops
from .._sharding import DimSharding, unpad

Held = dict[ShardedParam, EncodedShards]
Bind = Callable[[list[Any]], list[Any]]


def encode_bucket(
    group: GatherGroup, held: Held, comm: CommSpec, tie: Bind, pin: Bind
) -> list[GatherBucket]:
    """Encode the shards of a group of weights, in one message.

    Args:
        group: what is gathered.
        held: what this device has of the weights. A slice that is to be kept replaces the
            shard it was made of.
        comm: how they travel.
        tie: binds the shards to what must exist first, so that they are not gathered early.
        pin: binds the messages to it, so that they are not written late.

    Returns:
        The messages, for `gather_next_axis`, and after the last axis for `decode_bucket`.
    """
    weights = list(dict.fromkeys(one.weight for one in group.gathers))
    data = tie([held[x].data for x in weights])
    now = {x: dataclasses.replace(held[x], data=d) for x, d in zip(weights, data, strict=True)}
    with _labelled(group):
        kept = [i for i, one in enumerate(group.gathers) if one.keeps]
        if kept:
            layers = [group.gathers[i].weight for i in kept]
            with picked(kept):
                sizes = [math.prod(x.shape) for x in layers]
                slices = node_slices(
                    [now[x] for x in layers],
                    sizes,
                    comm,
                    lambda buckets: with_barrier(buckets, pin),
                )
            now.update(zip(layers, slices, strict=True))
            held.update(zip(layers, slices, strict=True))
        pieces = []
        for one in group.gathers:
            ops, _ = _order(one, now[one.weight], comm)
            mine = now[one.weight]
            pieces.append(on_shard(mine, ops, one.weight)[0] if ops else mine)
        buckets = start_gather(pieces, _sizes(group), comm)
        return buckets if kept else with_barrier(buckets, pin)


def gather_next_axis(
    group: GatherGroup, buckets: Sequence[GatherBucket], comm: CommSpec, num_hops: int
) -> list[GatherBucket]:
    """Gather buckets that have at least `num_hops` axes left over the next axis.

    The others (slices that are kept in a node) are returned as they are.
    """
    waiting = [len(comm.long(x.parts[0].axes)) >= num_hops for x in buckets]
    go = [x for x, waits in zip(buckets, waiting, strict=True) if waits]
    stay = [x for x, waits in zip(buckets, waiting, strict=True) if not waits]
    if not go:
        return list(buckets)
    with _labelled(group):
        return [*gather_hop(go, _sizes(group), comm), *stay]


def with_barrier(buckets: Sequence[GatherBucket], bind: Bind) -> list[GatherBucket]:
    """The same messages, bound to something else."""
    data = bind([x.data for x in buckets])
    return [dataclasses.replace(x, data=d) for x, d in zip(buckets, data, strict=True)]


def decode_bucket(
    group: GatherGroup, buckets: Sequence[GatherBucket], held: Held, comm: CommSpec
) -> list[jax.Array]:
    """The whole weights, with the operations of their gathers done to them."""
    orders = [_order(one, held[one.weight], comm) for one in group.gathers]
    dtypes = [_first_type(after) for _, after in orders]
    with _labelled(group):
        arrived = arrays(buckets, dtypes)
    wholes = []
    for one, (ops, after), x in zip(group.gathers, orders, arrived, strict=True):
        pushed = movable_ops.push(ops, one.weight.layout, one.weight.shape)
        assert pushed is not None
        x = unpad(x, pushed[0])
        for op in after:
            x = op.apply(x)
        wholes.append(x)
    return wholes


def _labelled(group: GatherGroup) -> contextlib.AbstractContextManager[None]:
    return labelled("weights", *(one.weight.name for one in group.gathers))


def _first_type(ops: tuple[movable_ops.Op, ...]) -> Any:
    """The type that operations begin with a cast to; None: with another one."""
    return ops[0].dtype if ops and isinstance(ops[0], movable_ops.ConvertDtype) else None


def on_shard(
    pieces: EncodedShards, ops: tuple[movable_ops.Op, ...], weight: ShardedParam
) -> tuple[EncodedShards, DimSharding]:
    """Do `ops` to this device's piece of a weight."""
    pushed = movable_ops.push(ops, weight.layout, weight.shape)
    assert pushed is not None
    x = movable_ops.apply_on_shard(ops, pieces.join(), weight.layout, weight.shape)
    return dataclasses.replace(EncodedShards.plain(x, pushed[0].dim), axes=pieces.axes), pushed[0]


def _sizes(group: GatherGroup) -> list[int]:
    """Elements of what is sent of each weight, whole."""
    slices = (movable_ops.up_to_last_slice(one.ops)[0] for one in group.gathers)
    pairs = zip(group.gathers, slices, strict=True)
    return [math.prod(View(one.weight, ops).shape) for one, ops in pairs]


def _order(
    one: Gather, pieces: EncodedShards, comm: CommSpec
) -> tuple[tuple[movable_ops.Op, ...], tuple[movable_ops.Op, ...]]:
    """Which operations come before the gather, and which after.

    What will be quantised is quantised as it is stored, and cast to the type of its use when
    it is decoded; of the operations only slices are worth doing first.
    """
    slices, rest = movable_ops.up_to_last_slice(one.ops)
    size = math.prod(View(one.weight, slices).shape)
    codecs = [comm.weight_codec(axis, size, one.weight.dtype) for axis in pieces.axes]
    if pieces.codec is not None or any(x and not x.is_elementwise for x in codecs):
        return slices, rest
    return one.ops, ()
