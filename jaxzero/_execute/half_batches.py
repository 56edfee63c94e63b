"""Inner products between the gradients of two half-batches: three numbers for each leaf.

SimiGrad compares the gradients of two halves of a batch. Within one micro-batch, each half of the
devices has one half of the rows. On the last axis of a reduction a device receives its peers'
shards before it adds them up, so S1, the sum over the first half of the peers, takes memory but no
byte on the wire; S2 = S - S1. With weights w1, w2 of the halves (w = w1 + w2), means
g1 = S1 / w1, g2 = S2 / w2, and with x1 = S1 / w, x2 = S2 / w, f = w1 / w:

    |g1|^2 = |x1|^2 / f^2    |g2|^2 = |x2|^2 / (1 - f)^2    g1.g2 = x1.x2 / (f (1 - f)).

The products of shards are summed over devices in float32, whatever the dtype of the gradients:
one all-reduce of three numbers for each leaf. The halves are halves of the nodes, or of the
devices if there is one node; if their number is odd, the first half has one fewer.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from .._collectives import CommSpec, HalfBatchSum, all_reduce, labelled
from .._mesh import AXES
from .._simigrad import GradientHalves, dot


def gradient_halves(
    shards: Sequence[HalfBatchSum | None],
    copies: Sequence[int],
    weight: Array | None,
    comm: CommSpec,
) -> GradientHalves:
    """The inner products of all leaves, from this device's shards of their sums.

    Args:
        shards: for each leaf, this device's shard, divided by the weight of the full batch; None if
            the leaf has no gradient.
        copies: for each leaf, how many devices hold the same shard; its products are divided by it.
        weight: summed weight of this device's rows; None if all examples weigh the same.
        comm: says which devices are the first half.

    Returns:
        Three lists with a float32 scalar for each leaf, and the first half's share of the weight.
    """
    pairs = zip(shards, copies, strict=True)
    none = jnp.zeros(3, jnp.float32)
    products = jnp.concatenate(
        [none[:0], *(none if x is None else _products(x, num) for x, num in pairs)]
    )
    axis = comm.halves_axis
    half = comm.first_half_size(axis)
    with labelled("other", "halves"):
        if weight is None:
            sums, share = all_reduce(products, AXES), jnp.float32(half / comm.sizes[axis])
        else:
            mine = weight.astype(jnp.float32)
            first = jnp.where(lax.axis_index(axis) < half, mine, 0.0)
            sums = all_reduce(jnp.concatenate([products, jnp.stack([first, mine])]), AXES)
            share, sums = sums[-2] / sums[-1], sums[:-2]
    rest = 1 - share
    scale = jnp.stack([share * share, rest * rest, share * rest])
    first, second, cross = sums.reshape(len(shards), 3).T / scale[:, None]
    return GradientHalves(list(first), list(second), list(cross), share)


def _products(x: HalfBatchSum, copies: int) -> Float32[Array, " 3"]:
    second = x.total - x.first
    products = dot(x.first, x.first), dot(second, second), dot(x.first, second)
    return jnp.stack(products) / copies
