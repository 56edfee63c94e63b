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
from jaxtyping import Array, DTypeLike, Shaped

from ._codecs import Codec, Draft, written
from ._collectives import Wire, accumulator_dtype, pad, unpad
from ._mesh import AXES, LOCAL, NODE, REDUCTION_HOPS, device_index
from ._messages import Column, can_join, in_place, join, split, widths
from ._partition import Layout
from ._pieces import Addends, Pieces, total_of
from ._traffic import all_reduce, all_to_all, picked, reduce_scatter


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
        `accumulator_dtype` of its type.
    """
    axes = hop_axes(summands, wire)
    num_summed = math.prod(wire.sizes[axis] for axis in axes[:number])
    arrays = _send(outbox, summands, axes[number], num_summed, wire)
    if number + 1 < len(axes):
        num_summed *= wire.sizes[axes[number]]
        return _write(arrays, summands, axes[number + 1], num_summed, wire)
    pairs = enumerate(zip(arrays, summands, strict=True))
    done = {i: total_of(x).astype(accumulator_dtype(s.dtype)) for i, (x, s) in pairs}
    return Outbox(None, {}, done)


def reduce(
    full: Shaped[Array, ...],
    layout: Layout,
    wire: Wire,
    hops: tuple[str, ...] = REDUCTION_HOPS,
) -> Shaped[Array, ...]:
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
        messages.append(_message(arrays[i], dim, num, summand.dtype, codec, axis, num_summed))
    whole = {i: total_of(x) for i, x in enumerate(arrays) if i not in coded}
    beside = {}
    for name, numbers in summed.items():
        if len(numbers) == 1:
            beside[name] = whole[numbers[0]]
        else:
            rows = [_rows(whole[i], summands[i].layout.dim, wire.sizes[axis]) for i in numbers]
            beside[name] = join(rows)
    rest = {i: whole[i] for i, s in enumerate(summands) if not _cuts(s, axis, wire)}
    # The barrier keeps XLA from moving the decoding across the exchange.
    joined = lax.optimization_barrier(join(messages)) if messages else None
    return Outbox(joined, beside, rest)


def _send(
    outbox: Outbox, summands: Sequence[Summand], axis: str, num_summed: int, wire: Wire
) -> list[Array | Addends]:
    """Do one hop."""
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
            arrays[i] = sum_over(arrays[i], axis, math.prod(summands[i].shape), wire, num_summed)
    return [arrays[i] for i in range(len(summands))]


def _scatter(
    x: Array, numbers: Sequence[int], summands: Sequence[Summand], axis: str, wire: Wire
) -> dict[int, Array]:
    if len(numbers) == 1:
        i = numbers[0]
        return {i: reduce_scatter(x, axis, summands[i].layout.dim)}
    shapes = [_piece(summands[i], axis, wire) for i in numbers]
    columns = [(math.prod(shape), x.dtype) for shape in shapes]
    parts = split(reduce_scatter(x, axis, 0, widths(columns)), columns)
    each = zip(numbers, parts, shapes, strict=True)
    return {i: part.reshape(shape) for i, part, shape in each}


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


def reduce_over_node(
    x: Shaped[Array, ...],
    layout: Layout,
    size: int,
    dtype: DTypeLike,
    wire: Wire,
    error: Shaped[Array, ...] | None = None,
) -> tuple[Shaped[Array, ...], Shaped[Array, ...] | None]:
    """The second half of `reduce`, where the first was only over `local`.

    Args:
        x: the node's slice of the sum, divided by what makes it a mean.
        layout: how the full array is cut.
        size: of the full array, or of one layer of it, for `min_quantized_size`.
        dtype: that the gradient had.
        wire: how it travels.
        error: what rounding lost in the step before, in the units of `x`; None: not kept.

    Returns:
        This device's shard of the sum over nodes, and what rounding lost now.
    """
    codec = wire.gradient_codec(NODE, size, dtype)
    if NODE not in wire.axes:
        return sum_over(x, NODE, size, wire, 1), error
    if codec is None:
        return (reduce_scatter(x, NODE, layout.dim) if wire.sizes[NODE] > 1 else x), error
    if error is None:
        return _coded_hop(x, NODE, layout.dim, dtype, codec, wire), None
    rows = _rows(x + error.astype(x.dtype), layout.dim, wire.sizes[NODE])
    message = codec.encode(rows, seed=device_index(_told_apart(NODE)))
    lost = rows - codec.decode(message, rows.shape[1], x.dtype)
    lost = jnp.where(jnp.isfinite(lost), lost, 0)  # a step that overflowed must not be the last
    shape = _piece_shape(x, layout.dim, wire.sizes[NODE])
    total = Addends(_exchange(message, NODE), codec, shape).total()
    return total, _from_rows(lost, x, layout.dim).astype(error.dtype)


def _coded_hop(
    x: Shaped[Array, ...],
    axis: str,
    dim: int,
    dtype: DTypeLike,
    codec: Codec,
    wire: Wire,
    summed: int = 1,
) -> Shaped[Array, ...]:
    """One hop of one array, in messages of `codec`; `summed` as in `_write`."""
    num = wire.sizes[axis]
    if num == 1:
        return x
    message = written(_message(x, dim, num, dtype, codec, axis, summed))
    return Addends(_exchange(message, axis), codec, _piece_shape(x, dim, num), summed).total()


def _message(
    x: Array | Addends,
    dim: int,
    num: int,
    dtype: DTypeLike,
    codec: Codec,
    axis: str,
    summed: int,
) -> Shaped[Array, "num m"] | Draft:
    """The mean of the devices `summed` so far, in `num` pieces for those along `axis`."""
    seed = device_index(_told_apart(axis))
    if isinstance(x, Addends) and x.summed == 1:
        args = (x.message, x.codec, x.shape, dim, num)
        write = functools.partial(codec.recode, *args, divisor=summed, dtype=dtype, seed=seed)
    else:
        x = total_of(x)
        mean = x if summed == 1 else x / jnp.asarray(summed, x.dtype)
        write = functools.partial(codec.encode_pieces, mean.astype(dtype), dim, num, seed=seed)
    if not codec.writes_in_place:
        return write()
    return Draft((num, codec.num_bytes(math.prod(x.shape) // num, dtype)), write)


def _told_apart(axis: str) -> tuple[str, ...]:
    """The axes along which devices round differently in a sum over `axis`, if at random.

    What is summed over `node` may be a sum over the node already, the same on all of its
    devices, and must stay the same on all of them.
    """
    return AXES if axis == LOCAL else (axis,)


def _rows(x: Shaped[Array, ...], dim: int, num: int) -> Shaped[Array, "num n"]:
    """The `num` pieces of `dim`, each as one row."""
    shape = (*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0).reshape(num, x.size // num)


def _piece_shape(x: Shaped[Array, ...], dim: int, num: int) -> tuple[int, ...]:
    return (*x.shape[:dim], x.shape[dim] // num, *x.shape[dim + 1 :])


def _from_rows(rows: Shaped[Array, "num n"], like: Shaped[Array, ...], dim: int) -> Array:
    """Undo `_rows`."""
    pieces = rows.reshape(len(rows), *_piece_shape(like, dim, len(rows)))
    return jnp.moveaxis(pieces, 0, dim).reshape(like.shape)


def _exchange(message: Shaped[Array, "num m"], axis: str) -> Shaped[Array, "num m"]:
    """Send row i to device i of the axis."""
    return all_to_all(lax.optimization_barrier(message), axis)


def sum_over(
    x: Shaped[Array, ...], axis: str, size: int, wire: Wire, summed: int
) -> Shaped[Array, ...]:
    """All-reduce over one axis; with a codec as a reduction and a gather."""
    num = wire.sizes[axis]
    if num == 1:
        return x
    codec = wire.gradient_codec(axis, size, x.dtype)
    if codec is None or getattr(wire.gradients, axis) is None:
        return all_reduce(x.astype(accumulator_dtype(x.dtype)), axis)
    layout = Layout(0, x.size, num)
    piece = _coded_hop(pad(x.reshape(-1), layout), axis, 0, x.dtype, codec, wire, summed)
    scale = jnp.asarray(summed * num, x.dtype)
    mean = Pieces.plain(piece.astype(x.dtype) / scale, 0)
    mean = mean.encode(codec, _told_apart(axis)).gather(axis)
    return unpad(mean.join() * scale, layout).reshape(x.shape)


def sum_whole(arrays: list[Array], sizes: list[int], wire: Wire) -> list[Array]:
    """Sum whole arrays over every device, in one collective for each hop and type.

    Args:
        arrays: of this device.
        sizes: of each, or of one layer of it, for `min_quantized_size`.
        wire: how they travel.
    """
    if not arrays:
        return []
    arrays = [x.astype(accumulator_dtype(x.dtype)) for x in arrays]
    summed = 1
    for axis in REDUCTION_HOPS:
        if getattr(wire.gradients, axis) is not None:
            pairs = zip(arrays, sizes, strict=True)
            arrays = [sum_over(x, axis, size, wire, summed) for x, size in pairs]
        elif wire.sizes[axis] > 1:
            arrays = list(all_reduce(arrays, axis))
        summed *= wire.sizes[axis]
    return arrays
