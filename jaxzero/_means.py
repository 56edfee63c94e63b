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

import jax.numpy as jnp
from jaxtyping import Array

from ._accumulate import Sums
from ._collectives import Wire, accumulator_dtype, move_split, pad
from ._gradients import Demand
from ._mesh import AXES, LOCAL, NODE
from ._partition import Layout, Leaf
from ._reductions import reduce_over_node, sum_whole
from ._traffic import all_reduce, labelled


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


def mean_over_devices(
    sums: Sums,
    wanted: Sequence[Wanted],
    errors: Sequence[Array | None],
    num_microbatches: int,
    wire: Wire,
) -> tuple[Array, list[Any], list[Array | None]]:
    """The loss and the gradients of the whole batch, from every device's sums.

    Args:
        sums: of this device.
        wanted: what each of the gradients in them is.
        errors: for each, what rounding lost in the step before; None: not kept.
        num_microbatches: that went into the sums.
        wire: how gradients travel.

    Returns:
        The mean loss; mean gradients as they are stored; what rounding lost now.
    """
    with labelled("other", "loss"):
        loss = all_reduce(sums.loss, AXES)
        if sums.weight is None:
            total = jnp.asarray(wire.num_devices * num_microbatches, loss.dtype)
        else:
            total = all_reduce(sums.weight, AXES)
    gradients = list(sums.gradients)
    whole = [
        i
        for i, (x, want) in enumerate(zip(gradients, wanted, strict=True))
        if x is not None and want.demand is None
    ]
    with labelled("gradients"):
        summed = sum_whole([gradients[i] for i in whole], [wanted[i].size for i in whole], wire)
    for i, x in zip(whole, summed, strict=True):
        gradients[i] = x
    lost: list[Array | None] = []
    for i, (x, want, error) in enumerate(zip(gradients, wanted, errors, strict=True)):
        gradients[i], new_error = _mean(x, want, error, total, wire)
        lost.append(new_error)
    return loss / total.astype(loss.dtype), gradients, lost


def _mean(
    x: Any, want: Wanted, error: Array | None, total: Array, wire: Wire
) -> tuple[Any, Array | None]:
    """One gradient, as it is stored."""
    if x is None:
        return None, error
    leaf, new_error = want.leaf, None
    if not want.in_node_only:
        x = x / total.astype(x.dtype)
        x = _moved(x, want, wire, wire.axes)
    else:
        assert want.demand is not None
        nodes = jnp.asarray(wire.sizes[NODE], x.dtype)
        x = _moved(x / (total.astype(x.dtype) / nodes), want, wire, (LOCAL,))
        layout = want.stored or want.demand.layout
        with labelled("gradients", leaf.path):
            x, new_error = reduce_over_node(x, layout, want.size, leaf.dtype, wire, error)
        x = x.astype(accumulator_dtype(leaf.dtype)) / nodes.astype(accumulator_dtype(leaf.dtype))
    x = x.astype(leaf.dtype)
    return (pad(x, leaf.layout) if leaf.layout and want.demand is None else x), new_error


def _moved(x: Array, want: Wanted, wire: Wire, axes: tuple[str, ...]) -> Array:
    """Cut it as it is stored, where the program cut it along another dim."""
    if want.demand is None or want.stored is None or want.stored.dim == want.demand.layout.dim:
        return x
    new, old = want.stored, want.demand.layout
    return move_split(x, want.leaf.shape, old, new, wire.long(axes))
