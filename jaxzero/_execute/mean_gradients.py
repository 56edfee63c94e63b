"""From the sums of one device to the means of all: the last part of a step.

What a program left on each device is, leaf by leaf, one of three things: its shard of a
sum over all devices; its node's slice of a sum over the node, which is then summed over
nodes, once for all micro-batches; or a whole gradient of its own, which is all-reduced.
Everything is divided by the number of devices and micro-batches, or by the sum of the
weights: one mean, on every path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._collectives import (
    HalvedSum,
    Wire,
    accumulator_dtype,
    all_reduce,
    as_pair,
    labelled,
    move_split,
    reduce_over_node,
    sum_whole,
)
from .._mesh import AXES, LOCAL, NODE
from .._plan import Demand
from .._sharding import Layout, Leaf, pad
from .._simigrad import GradientHalves
from .half_batches import gradient_halves
from .microbatches import Sums


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One differentiated leaf, and what the program leaves of its gradient."""

    leaf: Leaf
    stored: Layout | None  # how its gradient is stored; None: whole
    demand: Demand | None  # what the program reduces it to; None: nothing
    size: int  # elements; of one layer, if it is scanned

    @property
    def in_node_only(self) -> bool:
        """Whether the sum over nodes is still to be taken."""
        return self.demand is not None and NODE not in self.demand.hops


@dataclasses.dataclass(frozen=True)
class Means:
    """What a step is after.

    Attributes:
        loss: the mean over the whole batch.
        gradients: means, as they are stored; None: not a float.
        lost: of each what rounding lost now; None: not kept.
        halves: of the devices, if they are wanted: lists with a scalar for each leaf.
    """

    loss: Array
    gradients: list[Any]
    lost: list[Array | None]
    halves: GradientHalves | None


def mean_over_devices(
    sums: Sums,
    wanted: Sequence[Wanted],
    errors: Sequence[Array | None],
    num_microbatches: int,
    wire: Wire,
) -> Means:
    """The loss and the gradients of the whole batch, from every device's sums.

    Args:
        sums: of this device.
        wanted: what each of the gradients in them is.
        errors: for each, what rounding lost in the step before; None: not kept.
        num_microbatches: that went into the sums.
        wire: how gradients travel.
    """
    with labelled("other", "loss"):
        loss = all_reduce(sums.loss, AXES)
        if sums.weight is None:
            total = jnp.asarray(wire.num_devices * num_microbatches, loss.dtype)
        else:
            total = all_reduce(sums.weight, AXES)
    pairs = enumerate(zip(sums.gradients, wanted, strict=True))
    whole = [i for i, (x, want) in pairs if x is not None and want.demand is None]
    with labelled("gradients"):
        summed = sum_whole(
            [sums.gradients[i] for i in whole], [wanted[i].size for i in whole], wire
        )
    known = dict(zip(whole, zip(*summed, strict=True), strict=True))
    means = []
    for i, (x, want, error) in enumerate(zip(sums.gradients, wanted, errors, strict=True)):
        if i in known:
            x, piece = known[i]
        else:
            x, piece = as_pair(x)
        means.append(_mean(x, piece, want, error, total, wire))
    halves = None
    if wire.halves:
        copies = [wire.num_copies if i in known else 1 for i in range(len(wanted))]
        halves = gradient_halves([piece for *_, piece in means], copies, sums.weight, wire)
    return Means(
        loss / total.astype(loss.dtype),
        [x for x, *_ in means],
        [error for _, error, _ in means],
        halves,
    )


def _mean(
    x: Any,
    piece: HalvedSum | None,
    want: Wanted,
    error: Array | None,
    total: Array,
    wire: Wire,
) -> tuple[Any, Array | None, HalvedSum | None]:
    """One gradient, as it is stored; what rounding lost; and a piece of it in halves."""
    if x is None:
        return None, error, None
    leaf, new_error = want.leaf, None
    if not want.in_node_only:
        x = x / total.astype(x.dtype)
        piece = jax.tree.map(lambda part: part / total.astype(part.dtype), piece)
        x = _moved(x, want, wire, wire.axes)
    else:
        assert want.demand is not None
        nodes = jnp.asarray(wire.sizes[NODE], x.dtype)
        x = _moved(x / (total.astype(x.dtype) / nodes), want, wire, (LOCAL,))
        layout = want.stored or want.demand.layout
        with labelled("gradients", leaf.path):
            x, piece, new_error = reduce_over_node(x, layout, want.size, leaf.dtype, wire, error)
        piece = jax.tree.map(lambda part: part / nodes.astype(part.dtype), piece)
        x = x.astype(accumulator_dtype(leaf.dtype)) / nodes.astype(accumulator_dtype(leaf.dtype))
    x = x.astype(leaf.dtype)
    return (pad(x, leaf.layout) if leaf.layout and want.demand is None else x), new_error, piece


def _moved(x: Array, want: Wanted, wire: Wire, axes: tuple[str, ...]) -> Array:
    """Cut it as it is stored, where the program cut it along another dim."""
    if want.demand is None or want.stored is None or want.stored.dim == want.demand.layout.dim:
        return x
    new, old = want.stored, want.demand.layout
    return move_split(x, want.leaf.shape, old, new, wire.long(axes))
