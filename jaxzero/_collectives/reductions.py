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
from .._sharding import Layout, pad
from .comm_spec import Wire, accumulator_dtype
from .ledger import picked
from .packing import Column, can_join, in_place, join, split, widths
from .partial_sums import Addends, HalvedSum, Sum, sum_of, total_of
from .primitives import all_to_all, reduce_scatter
from .reduce_hop import encoded, reduce_to_piece, rows_of, sum_over


@dataclasses.dataclass(frozen=True)
class Summand:
    """A gradient that is to be summed over devices.

    Attributes:
        shape: of the whole array.
        dtype: of it.
        layout: how it is cut.
        hops: the axes to sum over: all, or only `local`, which leaves the node's slice.
    """

    shape: tuple[int, ...]
    dtype: Any
    layout: Layout
    hops: tuple[str, ...] = REDUCTION_HOPS


@dataclasses.dataclass(frozen=True)
class Outbox:
    """Gradients, ready to be sent over their first hop.

    Attributes:
        coded: messages side by side, one row for each receiver; None: there are none.
        summed: for each type, values side by side in such rows, to be reduce-scattered.
        rest: those that this hop leaves as they are, by number.
    """

    coded: Any  # array, or its shape
    summed: dict[str, Any]
    rest: dict[int, Any]


jax.tree_util.register_dataclass(Outbox, ["coded", "summed", "rest"], [])


def hop_axes(summands: Sequence[Summand], wire: Wire) -> tuple[str, ...]:
    """The axes that gradients are sent over together, in order; at least one."""
    axes = [axis for axis in REDUCTION_HOPS if any(axis in x.hops for x in summands)]
    return wire.long(tuple(axes)) or REDUCTION_HOPS[:1]


def start(fulls: Sequence[Shaped[Array, ...]], summands: Sequence[Summand], wire: Wire) -> Outbox:
    """Write what the first hop sends."""
    padded = [pad(x, summand.layout) for x, summand in zip(fulls, summands, strict=True)]
    return _write(padded, summands, hop_axes(summands, wire)[0], 1, wire)


def advance(outbox: Outbox, summands: Sequence[Summand], number: int, wire: Wire) -> Outbox:
    """Do hop `number` of `hop_axes`, and write what the next one sends.

    Returns:
        After the last hop, in `rest` this device's piece of each sum (not mean), in
        `accumulator_dtype` of its type; with halves, where they are wanted on that hop.
    """
    axes = hop_axes(summands, wire)
    num_summed = math.prod(wire.sizes[axis] for axis in axes[:number])
    arrays = _send(outbox, summands, axes[number], num_summed, wire)
    if number + 1 < len(axes):
        num_summed *= wire.sizes[axes[number]]
        return _write(arrays, summands, axes[number + 1], num_summed, wire)
    half = wire.half(axes[number])
    done = {
        i: jax.tree.map(lambda x, s=s: x.astype(accumulator_dtype(s.dtype)), sum_of(x, half))
        for i, (x, s) in enumerate(zip(arrays, summands, strict=True))
    }
    return Outbox(None, {}, done)


def reduce(
    full: Shaped[Array, ...],
    layout: Layout,
    wire: Wire,
    hops: tuple[str, ...] = REDUCTION_HOPS,
) -> Sum:
    """Sum one gradient over devices, and keep this device's piece: `start` and all hops."""
    summands = [Summand(tuple(full.shape), full.dtype, layout, hops)]
    outbox = start([full], summands, wire)
    for number in range(len(hop_axes(summands, wire))):
        outbox = advance(outbox, summands, number, wire)
    return outbox.rest[0]


def _cuts(summand: Summand, axis: str, wire: Wire) -> bool:
    """Whether this hop cuts the gradient into pieces."""
    return axis in summand.hops and axis in wire.axes and wire.sizes[axis] > 1


def _codec(summand: Summand, axis: str, wire: Wire) -> Codec | None:
    return wire.gradient_codec(axis, math.prod(summand.shape), summand.dtype)


def _groups(
    summands: Sequence[Summand], axis: str, wire: Wire
) -> tuple[list[int], dict[str, list[int]]]:
    """The numbers of those that are encoded, and of those that are not, by type."""
    coded: list[int] = []
    summed: dict[str, list[int]] = {}
    for i, summand in enumerate(summands):
        if not _cuts(summand, axis, wire):
            continue
        if _codec(summand, axis, wire) is not None:
            coded.append(i)
        else:
            dtype = _dtype_at(summand, axis, wire)
            name = str(dtype) if can_join(dtype) else f"{dtype} {i}"
            summed.setdefault(name, []).append(i)
    return coded, summed


def _dtype_at(summand: Summand, axis: str, wire: Wire) -> Any:
    """The type of the sum so far, before a hop: decoded values are float32."""
    for hop in REDUCTION_HOPS[: REDUCTION_HOPS.index(axis)]:
        if _cuts(summand, hop, wire) and _codec(summand, hop, wire) is not None:
            return jnp.dtype(jnp.float32)
    return accumulator_dtype(summand.dtype)


def _write(
    arrays: Sequence[Array | Addends],
    summands: Sequence[Summand],
    axis: str,
    num_summed: int,
    wire: Wire,
) -> Outbox:
    """What one hop sends.

    Values that travel in 16 bits or fewer are exchanged all-to-all and summed in float32,
    once. A reduce-scatter of the same bytes would round after each of its steps. What is
    sent is the mean of the devices summed so far: a sum could overflow where the mean does
    not.
    """
    coded, summed = _groups(summands, axis, wire)
    messages = []
    for i in coded:
        summand, codec = summands[i], _codec(summands[i], axis, wire)
        assert codec is not None
        dim, num = summand.layout.dim, wire.sizes[axis]
        messages.append(encoded(arrays[i], dim, num, summand.dtype, codec, axis, num_summed))
    whole = {i: total_of(x) for i, x in enumerate(arrays) if i not in coded}
    beside = {}
    for name, numbers in summed.items():
        if len(numbers) == 1:
            beside[name] = whole[numbers[0]]
        else:
            rows = [rows_of(whole[i], summands[i].layout.dim, wire.sizes[axis]) for i in numbers]
            beside[name] = join(rows)
    rest = {i: whole[i] for i, s in enumerate(summands) if not _cuts(s, axis, wire)}
    # The barrier keeps XLA from moving the decoding across the exchange.
    joined = lax.optimization_barrier(join(messages)) if messages else None
    return Outbox(joined, beside, rest)


def _send(
    outbox: Outbox, summands: Sequence[Summand], axis: str, num_summed: int, wire: Wire
) -> list[Any]:
    """Do one hop: arrays, with halves where they are wanted on it, or what is to be added up."""
    coded, summed = _groups(summands, axis, wire)
    arrays: dict[int, Any] = dict(outbox.rest)
    if outbox.coded is not None:
        columns = [_message_column(summands[i], axis, wire) for i in coded]
        with picked(coded):
            arrived = all_to_all(outbox.coded, axis, shares=widths(columns))
        for i, message in zip(coded, in_place(arrived, columns), strict=True):
            codec, shape = _codec(summands[i], axis, wire), _piece(summands[i], axis, wire)
            assert codec is not None
            arrays[i] = Addends(message, codec, shape, num_summed)
    for name, numbers in summed.items():
        with picked(numbers):
            arrays.update(_scatter(outbox.summed[name], numbers, summands, axis, wire))
    for i in outbox.rest:
        if axis in summands[i].hops:
            size = math.prod(summands[i].shape)
            arrays[i], _ = sum_over(arrays[i], axis, size, wire, num_summed)
    return [arrays[i] for i in range(len(summands))]


def _scatter(
    x: Array, numbers: Sequence[int], summands: Sequence[Summand], axis: str, wire: Wire
) -> dict[int, Sum]:
    if len(numbers) == 1:
        i = numbers[0]
        return {i: reduce_to_piece(x, axis, summands[i].layout.dim, wire)}
    shapes = [_piece(summands[i], axis, wire) for i in numbers]
    columns = [(math.prod(shape), x.dtype) for shape in shapes]
    parts: Sequence[Sum]
    if half := wire.half(axis):
        arrived = split(all_to_all(x, axis, shares=widths(columns)), columns)
        parts = [HalvedSum.of(part, half) for part in arrived]
    else:
        parts = split(reduce_scatter(x, axis, 0, widths(columns)), columns)
    each = zip(numbers, parts, shapes, strict=True)
    return {
        i: jax.tree.map(lambda x, shape=shape: x.reshape(shape), part) for i, part, shape in each
    }


def _piece(summand: Summand, axis: str, wire: Wire) -> tuple[int, ...]:
    """The shape of a piece after one hop."""
    done = REDUCTION_HOPS[: REDUCTION_HOPS.index(axis) + 1]
    shape, dim = list(summand.layout.pad_shape(summand.shape)), summand.layout.dim
    shape[dim] //= math.prod(wire.sizes[hop] for hop in done if _cuts(summand, hop, wire))
    return tuple(shape)


def _message_column(summand: Summand, axis: str, wire: Wire) -> Column:
    codec = _codec(summand, axis, wire)
    assert codec is not None
    return _message_size(codec, math.prod(_piece(summand, axis, wire)), summand.dtype)


@functools.cache
def _message_size(codec: Codec, num: int, dtype: Any) -> Column:
    """Of the message of `num` numbers: the layers of a program send the same ones."""
    message = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((1, num), dtype))
    return message.shape[1], message.dtype
