"""Gather weights over the two axes, several in one message, hop by hop, with a codec for each.

Gathers go over `node` first and `local` second, reductions (`reductions`) the other way
round: what crosses between nodes is then the smallest piece, and arrives in order
(`_sharding.layout`). A gather is written by `start_gather`, and done one hop at a time.
Legend: `shard` is what one device owns, `slice` what the devices of one position in all
nodes own together, `full` the whole array in its own shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from .._codecs import Codec, DeferredMessage
from .._mesh import LOCAL, NODE
from .bucket import GatherBucket, pack, unpack
from .comm_spec import CommSpec
from .encoded_shards import EncodedShards


def start_gather(
    pieces: Sequence[EncodedShards], sizes: Sequence[int], comm: CommSpec
) -> list[GatherBucket]:
    """Write what the first hop of a gather sends: one message of all weights.

    Args:
        pieces: this device's, each with the axes that it still is cut along.
        sizes: of each whole array, or of one layer of it, for `min_quantized_size`.
        comm: how they travel.
    """
    return pack([_sent(x, size, comm) for x, size in zip(pieces, sizes, strict=True)])


def gather_hop(
    buckets: Sequence[GatherBucket], sizes: Sequence[int], comm: CommSpec
) -> list[GatherBucket]:
    """One all-gather of each message, over the next axis that its weights are cut along.

    What arrived is passed on over the axis after that as it is, if that has the same codecs;
    else it is decoded and encoded again.
    """
    result = []
    for bucket in buckets:
        axis = _next_axis(bucket.parts[0], comm)
        if axis is None:
            result.append(bucket)
            continue
        bucket = bucket.gather(axis)
        mine = [sizes[i] for i in bucket.positions]
        if all(
            _codec(x, size, comm) == x.codec for x, size in zip(bucket.parts, mine, strict=True)
        ):
            result.append(bucket)
        else:
            again = start_gather(bucket.unpack(), mine, comm)
            result += [x.renumbered(bucket.positions) for x in again]
    return result


def _next_axis(pieces: EncodedShards, comm: CommSpec) -> str | None:
    """The axis of the next hop; None: everything has arrived."""
    return next(iter(comm.long(pieces.axes)), None)


def _sent(
    pieces: EncodedShards, size: int, comm: CommSpec
) -> tuple[EncodedShards, DeferredMessage | None]:
    """As the next hop sends them; with what is to be written in place, if it is."""
    axis = _next_axis(pieces, comm)
    if axis is None:
        return pieces, None
    cut = comm.axes[: comm.axes.index(axis) + 1]
    codec = _codec(pieces, size, comm)
    return pieces.draft(codec, cut) or (pieces.encode(codec, cut), None)


def _codec(pieces: EncodedShards, size: int, comm: CommSpec) -> Codec | None:
    """What pieces are written with for their next hop; their own, if there is none."""
    axis = _next_axis(pieces, comm)
    if pieces.pinned or axis is None:
        return pieces.codec
    return comm.weight_codec(axis, size, pieces.dtype)


def node_slices(
    shards: Sequence[EncodedShards],
    sizes: Sequence[int],
    comm: CommSpec,
    pin: Callable[[list[GatherBucket]], list[GatherBucket]] = lambda buckets: buckets,
) -> list[EncodedShards]:
    """What a node keeps of weights for a whole step (hpZ): one gather between nodes.

    `pin` sees the messages, once they are written and before they are sent.
    """
    first = [dataclasses.replace(x, axes=(NODE,)) for x in shards]
    slices = unpack(gather_hop(pin(start_gather(first, sizes, comm)), sizes, comm))
    kept = [x if x.pinned else keep(x, size, comm) for x, size in zip(slices, sizes, strict=True)]
    return [dataclasses.replace(x, axes=(LOCAL,)) for x in kept]


def keep(pieces: EncodedShards, size: int, comm: CommSpec) -> EncodedShards:
    """A node's slice as hpZ stores it; `size` as for `gather`."""
    assert comm.hpz is not None
    return pieces.encode(comm.suitable(comm.hpz.codec, size, pieces.dtype), (LOCAL,))
