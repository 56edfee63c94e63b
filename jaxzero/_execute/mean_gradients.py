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
    CommSpec,
    HalfBatchSum,
    ReduceSpec,
    accumulator_dtype,
    all_reduce,
    as_pair,
    labelled,
    move_split,
    reduce_over_node,
    sum_whole,
)
from .._mesh import AXES, LOCAL, NODE
from .._sharding import DimSharding, LeafSpec, pad
from .._simigrad import GradientHalves
from .half_batches import gradient_halves
from .microbatches import Accumulators


@dataclasses.dataclass(frozen=True)
class GradientTarget:
    """One differentiated leaf, and what the program leaves of its gradient."""

    leaf: LeafSpec
    stored: DimSharding | None  # how its gradient is stored; None: whole
    reduce_spec: ReduceSpec | None  # what the program reduces it to; None: nothing
    size: int  # elements; of one layer, if it is scanned

    @property
    def in_node_only(self) -> bool:
        """Whether the sum over nodes is still to be taken."""
        return self.reduce_spec is not None and NODE not in self.reduce_spec.hops


@dataclasses.dataclass(frozen=True)
class MeanGradients:
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
    sums: Accumulators,
    wanted: Sequence[GradientTarget],
    errors: Sequence[Array | None],
    num_microbatches: int,
    comm: CommSpec,
) -> MeanGradients:
    """The loss and the gradients of the whole batch, from every device's sums.

    Args:
        sums: of this device.
        wanted: what each of the gradients in them is.
        errors: for each, what rounding lost in the step before; None: not kept.
        num_microbatches: that went into the sums.
        comm: how gradients travel.
    """
    with labelled("other", "loss"):
        loss = all_reduce(sums.loss, AXES)
        if sums.weight is None:
            total = jnp.asarray(comm.num_devices * num_microbatches, loss.dtype)
        else:
            total = all_reduce(sums.weight, AXES)
    pairs = enumerate(zip(sums.gradients, wanted, strict=True))
    whole = [i for i, (x, want) in pairs if x is not None and want.reduce_spec is None]
    with labelled("gradients"):
        summed = sum_whole(
            [sums.gradients[i] for i in whole], [wanted[i].size for i in whole], comm
        )
    known = dict(zip(whole, zip(*summed, strict=True), strict=True))
    means = []
    for i, (x, want, error) in enumerate(zip(sums.gradients, wanted, errors, strict=True)):
        if i in known:
            x, piece = known[i]
        else:
            x, piece = as_pair(x)
        means.append(_mean(x, piece, want, error, total, comm))
    halves = None
    if comm.halves:
        copies = [comm.num_copies if i in known else 1 for i in range(len(wanted))]
        halves = gradient_halves([piece for *_, piece in means], copies, sums.weight, comm)
    return MeanGradients(
        loss / total.astype(loss.dtype),
        [x for x, *_ in means],
        [error for _, error, _ in means],
        halves,
    )


def _mean(
    x: Any,
    piece: HalfBatchSum | None,
    want: GradientTarget,
    error: Array | None,
    total: Array,
    comm: CommSpec,
) -> tuple[Any, Array | None, HalfBatchSum | None]:
    """One gradient, as it is stored; what rounding lost; and a piece of it in halves."""
    if x is None:
        return None, error, None
    leaf, new_error = want.leaf, None
    if not want.in_node_only:
        x = x / total.astype(x.dtype)
        piece = jax.tree.map(lambda part: part / total.astype(part.dtype), piece)
        x = _moved(x, want, comm, comm.axes)
    else:
        assert want.reduce_spec is not None
        nodes = jnp.asarray(comm.sizes[NODE], x.dtype)
        x = _moved(x / (total.astype(x.dtype) / nodes), want, comm, (LOCAL,))
        layout = want.stored or want.reduce_spec.layout
        with labelled("gradients", leaf.path):
            x, piece, new_error = reduce_over_node(x, layout, want.size, leaf.dtype, comm, error)
        piece = jax.tree.map(lambda part: part / nodes.astype(part.dtype), piece)
        x = x.astype(accumulator_dtype(leaf.dtype)) / nodes.astype(accumulator_dtype(leaf.dtype))
    x = x.astype(leaf.dtype)
    return (
        (pad(x, leaf.layout) if leaf.layout and want.reduce_spec is None else x),
        new_error,
        piece,
    )


def _moved(x: Array, want: GradientTarget, comm: CommSpec, axes: tuple[str, ...]) -> Array:
    """Cut it as it is stored, where the program cut it along another dim."""
    if (
        want.reduce_spec is None
        or want.stored is None
        or want.stored.dim == want.reduce_spec.layout.dim
    ):
        return x
    new, old = want.stored, want.reduce_spec.layout
    return move_split(x, want.leaf.shape, old, new, comm.long(axes))
