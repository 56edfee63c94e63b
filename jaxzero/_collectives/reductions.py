"""Sum gradients over devices, several in one message, hop by hop, with a codec for each.

The hops of a gather run backwards: over `local` first, then, with what is then the
smallest piece, over `node`. Every codec is used hop by hop: encode the pieces, exchange
them all-to-all, decode and sum in float32, and start again on the next axis (ZeRO++, qgZ).
What has no codec is summed by a reduce-scatter of its own type.
Legend: `full` is a whole gradient of one device, `rows` its pieces, each as one row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._codecs import Codec
from .._mesh import REDUCTION_HOPS
from .._sharding import DimSharding, pad
from .comm_spec import CommSpec, accumulator_dtype
from .ledger import picked
from .packing import Column, can_join, in_place, join, split, widths
from .partial_sums import HalfBatchSum, PartialSums, Sum, sum_of, total_of
from .primitives import all_to_all, reduce_scatter
from .reduce_hop import encoded, reduce_to_piece, rows_of, sum_over


@dataclasses.dataclass(frozen=True)
class ReduceSpec:
    """A reduce-scatter of one gradient over the mesh axes.

    Attributes:
        name: of the leaf.
        shape: of the full gradient on each device.
        dtype: of it.
        layout: which dim of it is split, and how far that is padded.
        hops: the axes to sum over, in order. Only `local` leaves the node's slice.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    layout: DimSharding
    hops: tuple[str, ...] = REDUCTION_HOPS


@dataclasses.dataclass(frozen=True)
class ReduceBucket:
    """Gradients, ready to be sent over their first hop.

    Attributes:
        coded: messages side by side, one row for each receiver; None: there are none.
        summed: for each type, values side by side in such rows, to be reduce-scattered.
        rest: those that this hop leaves as they are, by number.
    """

    coded: Any  # array, or its shape
    summed: dict[str, Any]
    rest: dict[int, Any]


jax.tree_util.register_dataclass(ReduceBucket, ["coded", "summed", "rest"], [])


def reduce_axes(specs: Sequence[ReduceSpec], comm: CommSpec) -> tuple[str, ...]:
    """The axes that gradients are sent over together, in order; at least one."""
    axes = [axis for axis in REDUCTION_HOPS if any(axis in x.hops for x in specs)]
    return comm.long(tuple(axes)) or REDUCTION_HOPS[:1]


def start_reduction(
    fulls: Sequence[Shaped[Array, ...]], specs: Sequence[ReduceSpec], comm: CommSpec
) -> ReduceBucket:
    """Write what the first hop sends."""
    padded = [pad(x, spec.layout) for x, spec in zip(fulls, specs, strict=True)]
    return _write(padded, specs, reduce_axes(specs, comm)[0], 1, comm)


def reduce_next_axis(
    bucket: ReduceBucket, specs: Sequence[ReduceSpec], number: int, comm: CommSpec
) -> ReduceBucket:
    """Do hop `number` of `reduce_axes`, and write what the next one sends.

    Returns:
        After the last hop, in `rest` this device's piece of each sum (not mean), in
        `accumulator_dtype` of its type; with halves, where they are wanted on that hop.
    """
    axes = reduce_axes(specs, comm)
    num_summed = math.prod(comm.sizes[axis] for axis in axes[:number])
    arrays = _send(bucket, specs, axes[number], num_summed, comm)
    if number + 1 < len(axes):
        num_summed *= comm.sizes[axes[number]]
        return _write(arrays, specs, axes[number + 1], num_summed, comm)
    half = comm.half(axes[number])
    done = {
        i: jax.tree.map(lambda x, s=s: x.astype(accumulator_dtype(s.dtype)), sum_of(x, half))
        for i, (x, s) in enumerate(zip(arrays, specs, strict=True))
    }
    return ReduceBucket(None, {}, done)


def reduce_gradient(full: Shaped[Array, ...], spec: ReduceSpec, comm: CommSpec) -> Sum:
    """Sum one gradient over devices, and keep this device's shard: all axes, one after another."""
    specs = [dataclasses.replace(spec, shape=tuple(full.shape), dtype=full.dtype)]
    bucket = start_reduction([full], specs, comm)
    for number in range(len(reduce_axes(specs, comm))):
        bucket = reduce_next_axis(bucket, specs, number, comm)
    return bucket.rest[0]


def _cuts(spec: ReduceSpec, axis: str, comm: CommSpec) -> bool:
    """Whether this hop cuts the gradient into pieces."""
    return axis in spec.hops and axis in comm.axes and comm.sizes[axis] > 1


def _codec(spec: ReduceSpec, axis: str, comm: CommSpec) -> Codec | None:
    return comm.gradient_codec(axis, math.prod(spec.shape), spec.dtype)


def _groups(
    specs: Sequence[ReduceSpec], axis: str, comm: CommSpec
) -> tuple[list[int], dict[str, list[int]]]:
    """The numbers of those that are encoded, and of those that are not, by type."""
    coded: list[int] = []
    summed: dict[str, list[int]] = {}
    for i, spec in enumerate(specs):
        if not _cuts(spec, axis, comm):
            continue
        if _codec(spec, axis, comm) is not None:
            coded.append(i)
        else:
            dtype = _dtype_at(spec, axis, comm)
            name = str(dtype) if can_join(dtype) else f"{dtype} {i}"
            summed.setdefault(name, []).append(i)
    return coded, summed


def _dtype_at(spec: ReduceSpec, axis: str, comm: CommSpec) -> Any:
    """The type of the sum so far, before a hop: decoded values are float32."""
    for hop in REDUCTION_HOPS[: REDUCTION_HOPS.index(axis)]:
        if _cuts(spec, hop, comm) and _codec(spec, hop, comm) is not None:
            return jnp.dtype(jnp.float32)
    return accumulator_dtype(spec.dtype)


def _write(
    arrays: Sequence[Array | PartialSums],
    specs: Sequence[ReduceSpec],
    axis: str,
    num_summed: int,
    comm: CommSpec,
) -> ReduceBucket:
    """What one hop sends.

    Values that travel in 16 bits or fewer are exchanged all-to-all and summed in float32,
    once. A reduce-scatter of the same bytes would round after each of its steps. What is
    sent is the mean of the devices summed so far: a sum could overflow where the mean does
    not.
    """
    coded, summed = _groups(specs, axis, comm)
    messages = []
    for i in coded:
        spec, codec = specs[i], _codec(specs[i], axis, comm)
        assert codec is not None
        dim, num = spec.layout.dim, comm.sizes[axis]
        messages.append(encoded(arrays[i], dim, num, spec.dtype, codec, axis, num_summed))
    whole = {i: total_of(x) for i, x in enumerate(arrays) if i not in coded}
    beside = {}
    for name, numbers in summed.items():
        if len(numbers) == 1:
            beside[name] = whole[numbers[0]]
        else:
            rows = [rows_of(whole[i], specs[i].layout.dim, comm.sizes[axis]) for i in numbers]
            beside[name] = join(rows)
    rest = {i: whole[i] for i, s in enumerate(specs) if not _cuts(s, axis, comm)}
    # The barrier keeps XLA from moving the decoding across the exchange.
    joined = lax.optimization_barrier(join(messages)) if messages else None
    return ReduceBucket(joined, beside, rest)


def _send(
    bucket: ReduceBucket, specs: Sequence[ReduceSpec], axis: str, num_summed: int, comm: CommSpec
) -> list[Any]:
    """Do one hop: arrays, with halves where they are wanted on it, or what is to be added up."""
    coded, summed = _groups(specs, axis, comm)
    arrays: dict[int, Any] = dict(bucket.rest)
    if bucket.coded is not None:
        columns = [_message_column(specs[i], axis, comm) for i in coded]
        with picked(coded):
            arrived = all_to_all(bucket.coded, axis, shares=widths(columns))
        for i, message in zip(coded, in_place(arrived, columns), strict=True):
            codec, shape = _codec(specs[i], axis, comm), _piece(specs[i], axis, comm)
            assert codec is not None
            arrays[i] = PartialSums(message, codec, shape, num_summed)
    for name, numbers in summed.items():
        with picked(numbers):
            arrays.update(_scatter(bucket.summed[name], numbers, specs, axis, comm))
    for i in bucket.rest:
        if axis in specs[i].hops:
            size = math.prod(specs[i].shape)
            arrays[i], _ = sum_over(arrays[i], axis, size, comm, num_summed)
    return [arrays[i] for i in range(len(specs))]


def _scatter(
    x: Array, numbers: Sequence[int], specs: Sequence[ReduceSpec], axis: str, comm: CommSpec
) -> dict[int, Sum]:
    if len(numbers) == 1:
        i = numbers[0]
        return {i: reduce_to_piece(x, axis, specs[i].layout.dim, comm)}
    shapes = [_piece(specs[i], axis, comm) for i in numbers]
    columns = [(math.prod(shape), x.dtype) for shape in shapes]
    parts: Sequence[Sum]
    if half := comm.half(axis):
        arrived = split(all_to_all(x, axis, shares=widths(columns)), columns)
        parts = [HalfBatchSum.of(part, half) for part in arrived]
    else:
        parts = split(reduce_scatter(x, axis, 0, widths(columns)), columns)
    each = zip(numbers, parts, shapes, strict=True)
    return {
        i: jax.tree.map(lambda x, shape=shape: x.reshape(shape), part) for i, part, shape in each
    }


def _piece(spec: ReduceSpec, axis: str, comm: CommSpec) -> tuple[int, ...]:
    """The shape of a piece after one hop."""
    done = REDUCTION_HOPS[: REDUCTION_HOPS.index(axis) + 1]
    shape, dim = list(spec.layout.pad_shape(spec.shape)), spec.layout.dim
    shape[dim] //= math.prod(comm.sizes[hop] for hop in done if _cuts(spec, hop, comm))
    return tuple(shape)


def _message_column(spec: ReduceSpec, axis: str, comm: CommSpec) -> Column:
    codec = _codec(spec, axis, comm)
    assert codec is not None
    return _message_size(codec, math.prod(_piece(spec, axis, comm)), spec.dtype)


@functools.cache
def _message_size(codec: Codec, num: int, dtype: Any) -> Column:
    """Of the message of `num` numbers: the layers of a program send the same ones."""
    message = codec.message(num, dtype)
    return message.shape[0], message.dtype
