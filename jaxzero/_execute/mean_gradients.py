"""Average gradients over devices and micro-batches: the last part of a step.

For each leaf, the program leaves one of three arrays on a device: its shard of the sum over all
devices; its node slice of the sum over its node, which is summed over nodes here, once for all
micro-batches; or the full gradient of its own rows, which is all-reduced here. In these three cases

    mean = sum / (micro-batches of all devices), or sum / (sum of the weights).

With one micro-batch and no weights, the array may already be this device's shard of the mean: then
the sum was divided where it was reduced (`final_gradients`).

[Note: halves] SimiGrad compares the gradients of two halves of a batch. Within one micro-batch,
each half of the devices has one half of the rows. On the last axis of a reduction a device receives
its peers' shards before it adds them up. So the sum S1 over the first half of the peers takes
memory, but no byte on the wire, and S2 = S - S1. With weights w1, w2 of the halves (w = w1 + w2),
means g1 = S1 / w1, g2 = S2 / w2, and with x1 = S1 / w, x2 = S2 / w, f = w1 / w:

    |g1|^2 = |x1|^2 / f^2    |g2|^2 = |x2|^2 / (1 - f)^2    g1.g2 = x1.x2 / (f (1 - f)).

The products of shards are summed over devices in float32, whatever the dtype of the gradients: one
all-reduce of three numbers for each leaf. The halves are halves of the nodes, or of the devices if
there is one node. If the number of nodes (devices) is odd, the first half has one fewer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from .._collectives import (
    CommSpec,
    HalfBatchSum,
    ReduceSpec,
    accumulator_dtype,
    all_reduce,
    as_pair,
    copy_to_host,
    labelled,
    move_split,
    reduce_over_node,
    sum_full,
    sum_over_devices,
)
from .._mesh import AXES, LOCAL, NODE, in_host
from .._sharding import DimSharding, LeafSpec
from .._simigrad import GradientHalves, dot
from .microbatches import Accumulators


@dataclasses.dataclass(frozen=True)
class GradientTarget:
    """A differentiated leaf: how the program reduces its gradient, and how the mean is stored."""

    leaf: LeafSpec
    stored: DimSharding | None  # split of the stored gradient; None if stored in full
    reduce_spec: ReduceSpec | None  # the reduction inside the program; None if there is none
    size: int  # elements of the leaf, or of one layer if the program scans it
    is_mean: bool = False  # whether the program leaves the mean, in the dtype of the leaf
    is_summed: bool = False  # whether operations of the program sum it over devices (tables)
    is_value: bool = False  # whether it does not depend on the loss: no derivative, but a value

    @property
    def in_node_only(self) -> bool:
        """Whether the program reduces over `local` only, so that this module sums over nodes."""
        return self.reduce_spec is not None and NODE not in self.reduce_spec.hops

    @property
    def is_final(self) -> bool:
        """Whether the program leaves the sum over all devices, split along the dim of storage."""
        spec = self.reduce_spec
        return (
            spec is not None
            and not self.is_value
            and not self.is_summed
            and not self.in_node_only
            and self.stored is not None
            and self.stored.dim == spec.layout.dim
        )


@dataclasses.dataclass(frozen=True)
class MeanGradients:
    """Loss and gradients averaged over devices and micro-batches.

    Attributes:
        loss: mean over the full batch, a scalar.
        gradients: for each differentiated leaf its mean gradient, laid out as stored; None if the
            gradient is not a float.
        residuals: for each leaf, the rounding error of this step (error feedback); None if the leaf
            has no error feedback.
        halves: inner products of half-batch gradients, if requested.
    """

    loss: Array
    gradients: list[Any]
    residuals: list[Array | None]
    halves: GradientHalves | None


def mean_over_devices(
    sums: Accumulators,
    targets: Sequence[GradientTarget],
    errors: Sequence[Array | None],
    num_microbatches: int,
    comm: CommSpec,
    share: Array | float | None = None,
    all_halves: Callable[[HalfSums], HalfSums] | None = None,
) -> MeanGradients:
    """Average loss and gradients over the full batch.

    Args:
        sums: this device's sums over its micro-batches.
        targets: for each gradient in `sums`, how it was reduced and is to be stored.
        errors: for each gradient, the residual of the previous step; None without error feedback.
        num_microbatches: how many micro-batches a device sums; with `comm.node_microbatches`, a
            device of the node that sums most.
        comm: axes and codecs of the reductions.
        share: the factor by which each loss was multiplied before it was differentiated; None: 1.
        all_halves: with stages, converts the sums of gradients over half-batches (for SimiGrad)
            from one for each array of this stage to one for each leaf. None: there are no stages.
    """
    with labelled("other", "loss"):
        loss = sum_over_devices(sums.loss, comm)
        count = jnp.asarray(comm.num_runs(num_microbatches), loss.dtype)
        total = count if sums.weight is None else sum_over_devices(sums.weight, comm)
    of_gradients = total if share is None else total * jnp.asarray(share, total.dtype)
    pairs = enumerate(zip(sums.gradients, targets, strict=True))
    full = [i for i, (x, target) in pairs if x is not None and target.reduce_spec is None]
    with labelled("gradients"):
        summed = sum_full([sums.gradients[i] for i in full], [targets[i].size for i in full], comm)
    all_reduced = dict(zip(full, zip(*summed, strict=True), strict=True))
    means = []
    for i, (gradient, target, error) in enumerate(
        zip(sums.gradients, targets, errors, strict=True)
    ):
        gradient, half_sum = all_reduced[i] if i in all_reduced else as_pair(gradient)
        divisor = count if target.is_value else of_gradients
        means.append(_mean(gradient, half_sum, target, error, divisor, comm))
    halves = None
    if comm.halves:
        copies = [comm.num_sum_replicas if i in all_reduced else 1 for i in range(len(targets))]
        half_sums = HalfSums([half_sum for *_, half_sum in means], copies, sums.weight)
        halves = gradient_halves(half_sums if all_halves is None else all_halves(half_sums), comm)
    return MeanGradients(
        loss / total.astype(loss.dtype),
        [x for x, *_ in means],
        [error for _, error, _ in means],
        halves,
    )


def host_mean(x: Array, dtype: Any, divisor: int | float, name: str) -> Array:
    """Divide a gradient's sum over all devices to the mean, and copy the mean to host memory.

    `name` is the name of the leaf in the record of copies.
    """
    mean = mean_of_one_microbatch(x, dtype, divisor)
    return copy_to_host(mean, "gradients", name, windowed=True)


def mean_of_one_microbatch(x: Array, dtype: Any, divisor: int | float) -> Array:
    """Divide a gradient's sum over all devices by `divisor`, and cast the mean to `dtype`."""
    return rounded_mean(x / jnp.asarray(divisor, x.dtype), dtype)


def rounded_mean(mean: Array, dtype: Any) -> Array:
    """Cast a mean gradient from the dtype of the sum to `dtype`, in a way that XLA cannot undo."""
    if mean.dtype == dtype:
        return mean
    stored, summed = jnp.finfo(dtype), jnp.finfo(mean.dtype)
    if stored.bits < summed.bits and stored.nexp == summed.nexp:
        # XLA may leave out a cast to fewer bits and back; a mean that is stored has fewer bits.
        # With fewer exponents, `reduce_precision` would round subnormal numbers to zero.
        mean = lax.reduce_precision(mean, stored.nexp, stored.nmant)
    return mean.astype(dtype)


def _mean(
    x: Any,
    half_sum: HalfBatchSum | None,
    target: GradientTarget,
    error: Array | None,
    total: Array,
    comm: CommSpec,
) -> tuple[Any, Array | None, HalfBatchSum | None]:
    """Average one gradient over devices and micro-batches.

    Args:
        x: what the program leaves of the gradient; None if it is not a float.
        half_sum: the sums over half-batches, if they are made already.
        target: how the program reduced `x`, and how the mean is stored.
        error: the residual of the previous step; None without error feedback.
        total: the divisor from the sum over all devices to the mean.
        comm: axes and codecs of the reductions.

    Returns:
        The mean as stored; the new residual; and the half-batch sums, divided as the mean is.
    """
    if x is None:
        return None, error, None
    # Rows of tables are sent without error feedback: their residual stays as it is.
    leaf, residual = target.leaf, error if target.is_summed else None
    if target.is_mean or in_host(x):
        return x, residual, None
    if not target.in_node_only:
        x = x / total.astype(x.dtype)
        half_sum = jax.tree.map(lambda part: part / total.astype(part.dtype), half_sum)
        x = _moved(x, target, comm, comm.axes)
    else:
        assert target.reduce_spec is not None
        # Each node sends its own mean, not its part of the sum: a sum could overflow 16 bits
        # where the mean does not. The residual has the scale of what is sent.
        nodes = jnp.asarray(comm.sizes[NODE], x.dtype)
        x = _moved(x / (total.astype(x.dtype) / nodes), target, comm, (LOCAL,))
        layout = target.stored or target.reduce_spec.layout
        with labelled("gradients", leaf.path):
            x, half_sum, residual = reduce_over_node(
                x, layout, target.size, leaf.dtype, comm, error
            )
        half_sum = jax.tree.map(lambda part: part / nodes.astype(part.dtype), half_sum)
        x = x.astype(accumulator_dtype(leaf.dtype)) / nodes.astype(accumulator_dtype(leaf.dtype))
    x = x.astype(leaf.dtype)
    # Shards have the padding of storage already.
    return leaf.pad(x) if target.reduce_spec is None else x, residual, half_sum


def _moved(x: Array, target: GradientTarget, comm: CommSpec, axes: tuple[str, ...]) -> Array:
    """Move the split of a gradient `x`, over `axes`, from the program's dim to the stored one."""
    if (
        target.reduce_spec is None
        or target.stored is None
        or target.stored.dim == target.reduce_spec.layout.dim
    ):
        return x
    new, old = target.stored, target.reduce_spec.layout
    leaf = target.leaf
    return move_split(x, leaf.shape, old, new, comm.axes_with_peers(leaf.split_axes(axes)))


@dataclasses.dataclass(frozen=True)
class HalfSums:
    """This device's shards of the sums of all gradients over half-batches.

    Attributes:
        shards: for each leaf, its shard divided by the weight of the full batch; None if the leaf
            has no gradient.
        copies: for each leaf, how many devices hold the same shard. Inner products are divided by
            that number, since they are summed over devices.
        weight: summed weight of this device's rows; None if all examples weigh the same.
        axes: the mesh axes over which shards are spread, and products of shards are summed.
    """

    shards: Sequence[HalfBatchSum | None]
    copies: Sequence[int]
    weight: Array | None
    axes: tuple[str, ...] = AXES


def gradient_halves(sums: HalfSums, comm: CommSpec) -> GradientHalves:
    """Compute the inner products of the half-batch gradients of each leaf.

    Args:
        sums: this device's shards of the half-batch sums.
        comm: says which devices are the first half.

    Returns:
        Three lists with a float32 scalar for each leaf: the squared norms of both halves, and their
            inner product; and the first half's share of the weight.
    """
    shards, copies, weight = sums.shards, sums.copies, sums.weight
    pairs = zip(shards, copies, strict=True)
    none = jnp.zeros(3, jnp.float32)  # also without leaves `concatenate` has an operand
    products = jnp.concatenate(
        [none[:0], *(none if x is None else _products(x, num) for x, num in pairs)]
    )
    axis = comm.halves_axis
    half = comm.first_half_size(axis)
    with labelled("other", "halves"):
        if weight is None:
            total, share = all_reduce(products, sums.axes), jnp.float32(half / comm.sizes[axis])
        else:
            mine = weight.astype(jnp.float32)
            first = jnp.where(lax.axis_index(axis) < half, mine, 0.0)
            total = all_reduce(jnp.concatenate([products, jnp.stack([first, mine])]), sums.axes)
            share, total = total[-2] / total[-1], total[:-2]
    rest = 1 - share
    scale = jnp.stack([share * share, rest * rest, share * rest])
    first, second, cross = total.reshape(len(shards), 3).T / scale[:, None]
    return GradientHalves(list(first), list(second), list(cross), share)


def _products(x: HalfBatchSum, copies: int) -> Float32[Array, " 3"]:
    second = x.total - x.first
    products = dot(x.first, x.first), dot(second, second), dot(x.first, second)
    return jnp.stack(products) / copies
