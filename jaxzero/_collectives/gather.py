"""Gather weights over the two axes, several in one message, hop by hop, with a codec for each.

Gathers go over `node` first and `local` second, reductions (`_reductions`) the other way
round: what crosses between nodes is then the smallest piece, and arrives in order
(`_partition`). A gather is written by `start_gather`, and done one hop at a time.
Legend: `shard` is what one device owns, `slice` what the devices of one position in all
nodes own together, `full` the whole array in its own shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from .._codecs import Codec, Draft
from .._mesh import LOCAL, NODE
from .bucket import Parcel, pack, unpack
from .comm_spec import Wire
from .encoded_shards import Pieces


def start_gather(pieces: Sequence[Pieces], sizes: Sequence[int], wire: Wire) -> list[Parcel]:
    """Write what the first hop of a gather sends: one message of all weights.

    Args:
        pieces: this device's, each with the axes that it still is cut along.
        sizes: of each whole array, or of one layer of it, for `min_quantized_size`.
        wire: how they travel.
    """
    return pack([_sent(x, size, wire) for x, size in zip(pieces, sizes, strict=True)])


def gather_hop(parcels: Sequence[Parcel], sizes: Sequence[int], wire: Wire) -> list[Parcel]:
    """One all-gather of each message, over the next axis that its weights are cut along.

    What arrived is passed on over the axis after that as it is, if that has the same codecs;
    else it is decoded and encoded again.
    """
    result = []
    for parcel in parcels:
        axis = _next_axis(parcel.parts[0], wire)
        if axis is None:
            result.append(parcel)
            continue
        parcel = parcel.gather(axis)
        mine = [sizes[i] for i in parcel.positions]
        if all(
            _codec(x, size, wire) == x.codec for x, size in zip(parcel.parts, mine, strict=True)
        ):
            result.append(parcel)
        else:
            again = start_gather(parcel.unpack(), mine, wire)
            result += [x.renumbered(parcel.positions) for x in again]
    return result


def _next_axis(pieces: Pieces, wire: Wire) -> str | None:
    """The axis of the next hop; None: everything has arrived."""
    return next(iter(wire.long(pieces.axes)), None)


def _sent(pieces: Pieces, size: int, wire: Wire) -> tuple[Pieces, Draft | None]:
    """As the next hop sends them; with what is to be written in place, if it is."""
    axis = _next_axis(pieces, wire)
    if axis is None:
        return pieces, None
    cut = wire.axes[: wire.axes.index(axis) + 1]
    codec = _codec(pieces, size, wire)
    return pieces.draft(codec, cut) or (pieces.encode(codec, cut), None)


def _codec(pieces: Pieces, size: int, wire: Wire) -> Codec | None:
    """What pieces are written with for their next hop; their own, if there is none."""
    axis = _next_axis(pieces, wire)
    if pieces.pinned or axis is None:
        return pieces.codec
    return wire.weight_codec(axis, size, pieces.dtype)


def node_slices(
    shards: Sequence[Pieces],
    sizes: Sequence[int],
    wire: Wire,
    pin: Callable[[list[Parcel]], list[Parcel]] = lambda parcels: parcels,
) -> list[Pieces]:
    """What a node keeps of weights for a whole step (hpZ): one gather between nodes.

    `pin` sees the messages, once they are written and before they are sent.
    """
    first = [dataclasses.replace(x, axes=(NODE,)) for x in shards]
    slices = unpack(gather_hop(pin(start_gather(first, sizes, wire)), sizes, wire))
    kept = [x if x.pinned else keep(x, size, wire) for x, size in zip(slices, sizes, strict=True)]
    return [dataclasses.replace(x, axes=(LOCAL,)) for x in kept]


def keep(pieces: Pieces, size: int, wire: Wire) -> Pieces:
    """A node's slice as hpZ stores it; `size` as for `gather`."""
    assert wire.hpz is not None
    return pieces.encode(wire.suitable(wire.hpz.codec, size, pieces.dtype), (LOCAL,))
