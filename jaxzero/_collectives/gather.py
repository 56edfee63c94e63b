"""All-gather weights in buckets, one mesh axis at a time, with a codec for each axis.

Gathers run over `node` first and `local` second, reductions (`reductions`) the other way round.
Only a shard then crosses between nodes, the smallest array of all, and the gathered shards are in
the order of storage (`_sharding.layout`). `start_gather` encodes the buckets; each call of
`gather_hop` then gathers over one axis.

Legend: a `shard` is what one device owns; `full` is the array in its own shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from .._codecs import Codec, DeferredMessage
from .bucket import GatherBucket, pack
from .comm_spec import CommSpec
from .encoded_shards import EncodedShards


def start_gather(
    shards: Sequence[EncodedShards], sizes: Sequence[int], comm: CommSpec
) -> list[GatherBucket]:
    """Encode this device's shards for the first axis of their gather, and pack them into buckets.

    Args:
        shards: for each weight, what this device has of it; `axes` says what is yet to gather.
        sizes: for each weight, the elements of the full array (of one layer, if it is a stack);
            compared with `min_quantized_size`.
        comm: axes and codecs.
    """
    sent = [_encoded(x, size, comm) for x, size in zip(shards, sizes, strict=True)]
    return pack(sent, comm.form)


def gather_hop(
    buckets: Sequence[GatherBucket], sizes: Sequence[int], comm: CommSpec
) -> list[GatherBucket]:
    """All-gather each bucket over the next of its axes.

    If the axis after that uses the same codecs, the gathered messages are sent on as they are;
    otherwise they are decoded and encoded again. A fully gathered bucket is returned unchanged.
    """
    result = []
    for bucket in buckets:
        axis = _next_axis(bucket.parts[0], comm)
        if axis is None:
            result.append(bucket)
            continue
        bucket = bucket.gather(axis, comm.form)
        bucket_sizes = [sizes[i] for i in bucket.positions]
        if all(
            _codec(x, size, comm) == x.codec
            for x, size in zip(bucket.parts, bucket_sizes, strict=True)
        ):
            result.append(bucket)
        else:
            encoded = start_gather(bucket.unpack(), bucket_sizes, comm)
            result += [x.renumbered(bucket.positions) for x in encoded]
    return result


def _next_axis(shards: EncodedShards, comm: CommSpec) -> str | None:
    """The next axis to gather over; None if the gather is complete."""
    return next(iter(comm.axes_with_peers(shards.axes)), None)


def _encoded(
    shards: EncodedShards, size: int, comm: CommSpec
) -> tuple[EncodedShards, DeferredMessage | None]:
    """Encode shards for the next axis, as a deferred message if the codec can write in place."""
    axis = _next_axis(shards, comm)
    if axis is None:
        return shards, None
    # Devices along these axes hold different shards. Those along the other axis hold the same
    # ones, and must encode the same messages, also where rounding is stochastic.
    split_axes = comm.axes[: comm.axes.index(axis) + 1]
    codec = _codec(shards, size, comm)
    if comm.form.tiled:
        return shards.encode(codec, split_axes, tiled=True), None
    return shards.draft(codec, split_axes) or (shards.encode(codec, split_axes), None)


def _codec(shards: EncodedShards, size: int, comm: CommSpec) -> Codec | None:
    """The codec for the next axis; the present one if the gather is complete or pinned."""
    axis = _next_axis(shards, comm)
    if shards.pinned or axis is None:
        return shards.codec
    if shards.kept is not None:
        return comm.weight_hop.codec
    return comm.weight_codec(axis, size, shards.dtype)
