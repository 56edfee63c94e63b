"""Gather weights over the two axes, several in one message, hop by hop, with a codec for each.

Gathers go over `node` first and `local` second, reductions (`_reductions`) the other way
round: what crosses between nodes is then the smallest piece, and arrives in order
(`_partition`). A gather is written by `start_gather`, and done one hop at a time.
Legend: `shard` is what one device owns, `slice` what the devices of one position in all
nodes own together, `full` the whole array in its own shape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Shaped

from ._codecs import Cast, Codec, Draft, from_bits, is_narrow_float, to_bits
from ._config import Difference, ErrorFeedback, Hops, HpZ, Schedule, ZeroConfig
from ._mesh import AXES, LOCAL, NODE
from ._messages import Parcel, pack, unpack
from ._partition import Layout
from ._pieces import Pieces
from ._simulate import AnyMesh
from ._traffic import all_to_all


@dataclasses.dataclass(frozen=True)
class Wire:
    """The links that values travel over: axes, their sizes, and the codecs on them."""

    axes: tuple[str, ...]  # that split a leaf, major first
    sizes: Mapping[str, int]  # of both axes
    weights: Hops
    gradients: Hops
    hpz: HpZ | None
    min_quantized_size: int
    schedule: Schedule
    halves: bool = False  # whether sums are wanted of the first half of the devices too

    @classmethod
    def of(cls, mesh: AnyMesh, config: ZeroConfig, halves: bool = False) -> Wire:
        sizes = {axis: mesh.shape[axis] for axis in AXES}
        return cls(
            config.axes,
            sizes,
            config.weights,
            config.gradients,
            config.hpz,
            config.min_quantized_size,
            config.schedule,
            halves,
        )

    @property
    def pieces(self) -> int:
        """How many devices share a leaf."""
        return math.prod(self.sizes[axis] for axis in self.axes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def halves_axis(self) -> str:
        """The axis that is cut in two halves: the last that gradients are summed over."""
        return NODE if self.sizes[NODE] > 1 else LOCAL

    @property
    def num_copies(self) -> int:
        """How many devices hold the same piece of a sum that is taken whole, in halves."""
        return self.num_devices // self.sizes[self.halves_axis]

    def half(self, axis: str) -> int:
        """How many of the devices along `axis` are the first half; 0: there are no halves."""
        return self.sizes[axis] // 2 if self.halves and axis == self.halves_axis else 0

    @property
    def gather_axes(self) -> tuple[str, ...]:
        """The axes that a shard is gathered over, in this order."""
        return self.axes[::-1]

    def long(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `axes` that have more than one device."""
        return tuple(axis for axis in axes if self.sizes[axis] > 1)

    def weight_codec(self, axis: str, num: int, dtype: DTypeLike) -> Codec | None:
        """What a weight of `num` elements in full is written with on one axis."""
        codec = getattr(self.weights, axis)
        if isinstance(codec, Difference):  # where no wire state is at hand
            codec = self.hpz and self.hpz.codec
        return self.suitable(codec, num, dtype)

    def gradient_codec(self, axis: str, num: int, dtype: DTypeLike) -> Codec | None:
        """The same for a gradient; 16-bit floats always travel as a `Cast` would send them."""
        codec = getattr(self.gradients, axis)
        if isinstance(codec, ErrorFeedback):
            codec = codec.codec
        codec = self.suitable(codec, num, dtype)
        return Cast(dtype) if codec is None and is_narrow_float(dtype) else codec

    def suitable(self, codec: Codec | None, num: int, dtype: DTypeLike) -> Codec | None:
        """`codec`, unless an array of `num` elements travels as it is."""
        if codec is None or not jnp.issubdtype(dtype, jnp.floating) or num == 0:
            return None
        if isinstance(codec, Cast):
            return codec if codec.wire_dtype(dtype) != dtype else None
        return codec if num >= self.min_quantized_size else None


def pad(x: Shaped[Array, ...], layout: Layout) -> Shaped[Array, ...]:
    """Append the zeros that make `layout.dim` divisible."""
    if not layout.is_padded:
        return x
    widths = [(0, 0)] * x.ndim
    widths[layout.dim] = (0, layout.padded - layout.size)
    return jnp.pad(x, widths)


def unpad(x: Shaped[Array, ...], layout: Layout) -> Shaped[Array, ...]:
    """Drop the zeros that `pad` appended."""
    return lax.slice_in_dim(x, 0, layout.size, axis=layout.dim) if layout.is_padded else x


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


def accumulator_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The type that sums are taken in: float32 for narrower floats, else the same."""
    return jnp.dtype(jnp.float32) if is_narrow_float(dtype) else jnp.dtype(dtype)


def move_split(
    x: Shaped[Array, ...],
    shape: tuple[int, ...],
    old: Layout,
    new: Layout,
    axes: tuple[str, ...],
) -> Shaped[Array, ...]:
    """Cut a split array along another dim, by one all-to-all.

    Args:
        x: this device's piece along `old`.
        shape: the full array's true shape.
        old: how it is cut.
        new: how it is wanted, on another dim.
        axes: that cut it, of more than one device each.
    """
    assert old.dim != new.dim and shape[new.dim] == new.size
    if not axes:
        return unpad(pad(x, new), old)
    bits = all_to_all(to_bits(pad(x, new)), axes, new.dim, old.dim)
    return unpad(from_bits(bits, x.dtype), old)


def gathered_aval(shard: Any, layout: Layout, wire: Wire) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of the full array, as seen inside the `shard_map`."""

    def full(x: Array) -> Array:
        for axis in reversed(wire.axes):
            x = lax.all_gather(x, axis, axis=layout.dim, tiled=True)
        return unpad(x, layout)

    return jax.eval_shape(full, shard)
