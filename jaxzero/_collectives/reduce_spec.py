"""The reduction of one gradient: its axes, the codec on each, and the shapes in between.

The axes run in the reverse order of a gather: `local` first, then `node`. An axis scatters the sum,
so that each device along it keeps a part, or all-reduces it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._codecs import Codec
from .._mesh import REDUCTION_HOPS
from .._sharding import DimSharding
from .comm_spec import CommSpec, accumulator_dtype
from .packing import Column


@dataclasses.dataclass(frozen=True)
class ReduceSpec:
    """The reduce-scatter of one gradient over the mesh axes.

    Attributes:
        name: path of the leaf.
        shape: shape of the full gradient on each device, without padding.
        dtype: dtype of the full gradient.
        layout: split dim and padding of the result.
        hops: the mesh axes to sum over, in order. With `local` only, the result is this device's
            node slice of the sum over its node.
        exact: whether no codec of the config encodes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    layout: DimSharding
    hops: tuple[str, ...] = REDUCTION_HOPS
    exact: bool = False

    def scatters(self, axis: str, comm: CommSpec) -> bool:
        """Whether the reduction over `axis` scatters the gradient.

        It all-reduces instead where devices along the axis hold the same shards (`split="local"`).
        """
        return axis in self.hops and axis in comm.axes and comm.sizes[axis] > 1

    def codec(self, axis: str, comm: CommSpec) -> Codec | None:
        """The codec that the gradient is sent with over `axis`."""
        size = 0 if self.exact else math.prod(self.shape)
        return comm.gradient_codec(axis, size, self.dtype)

    def dtype_at(self, axis: str, comm: CommSpec) -> Any:
        """The dtype of the sum that is sent over `axis`: float32 once it has been decoded."""
        before = [x for x in REDUCTION_HOPS[: REDUCTION_HOPS.index(axis)] if self.scatters(x, comm)]
        if any(self.codec(hop, comm) is not None for hop in before):
            return jnp.dtype(jnp.float32)
        return accumulator_dtype(self.dtype) if before else self.dtype

    def shard_shape(self, axis: str, comm: CommSpec) -> tuple[int, ...]:
        """The shape of a device's shard after the reduction over `axis` and the axes before it."""
        done = REDUCTION_HOPS[: REDUCTION_HOPS.index(axis) + 1]
        shape, dim = list(self.layout.pad_shape(self.shape)), self.layout.dim
        shape[dim] //= math.prod(comm.sizes[hop] for hop in done if self.scatters(hop, comm))
        return tuple(shape)

    def message_column(self, axis: str, comm: CommSpec) -> Column:
        """Length and dtype of the message for each device along `axis`."""
        codec = self.codec(axis, comm)
        assert codec is not None
        num = math.prod(self.shard_shape(axis, comm))
        return _message_size(codec, num, self.dtype_at(axis, comm))


def reduce_axes(specs: Sequence[ReduceSpec], comm: CommSpec) -> tuple[str, ...]:
    """The axes that a bucket is reduced over, in order: those that any of its gradients needs.

    At least one axis is returned, even on a single device, so that every bucket runs the same code.
    """
    axes = [axis for axis in REDUCTION_HOPS if any(axis in x.hops for x in specs)]
    return comm.axes_with_peers(tuple(axes)) or REDUCTION_HOPS[:1]


# [Note: a bucket as one gradient]
# If all gradients of a bucket have the same joinable codec on each axis, they are reduced as one:
# an array with a row for each device, in the order of the shards. The devices of an axis exchange
# ranges of these rows, so nothing is cut apart and joined again between the axes. Otherwise a
# program of unrolled layers has 28 operations more for each layer of nine weights, and XLA computes
# the sums inside the concatenation of the next message, once for each weight. Results are equal
# bit for bit.


def as_one(specs: Sequence[ReduceSpec], comm: CommSpec) -> ReduceSpec | None:
    """The gradients of a bucket as one of shape `[devices, m]`; None if they are reduced apart."""
    axes, first = reduce_axes(specs, comm), specs[0]
    if len(specs) < 2 or comm.form.tiled or any(x.dtype != first.dtype for x in specs):
        return None
    num = math.prod(comm.sizes[axis] for axis in axes)
    sizes = [math.prod(x.layout.pad_shape(x.shape)) for x in specs]
    shape, layout = (num, sum(sizes) // num), DimSharding(0, num, num)
    one = ReduceSpec("", shape, first.dtype, layout, first.hops)
    for axis in axes:
        codec = one.codec(axis, comm)
        if codec is None or not codec.is_joinable:
            return None
        if not all(x.scatters(axis, comm) and x.codec(axis, comm) == codec for x in specs):
            return None
    return one


@functools.cache
def _message_size(codec: Codec, num: int, dtype: Any) -> Column:
    """Length and dtype of the message of `num` numbers; cached, as many layers share it."""
    message = codec.message(num, dtype)
    return message.shape[0], message.dtype
