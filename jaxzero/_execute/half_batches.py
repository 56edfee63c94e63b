"""What two halves of the devices have to say of a gradient: three inner products for each leaf.

SimiGrad compares the gradients of two halves of a batch. Of one micro-batch these are the rows
of two halves of the devices. On the last hop of a sum a device has the pieces of all its peers
in hand before it adds them up; so S1, the sum over the first half of the peers, costs memory but
no byte on the wire, and S2 = S - S1. With weights w1, w2 of the halves (w = w1 + w2) and means
g1 = S1 / w1, g2 = S2 / w2, and with x1 = S1 / w, x2 = S2 / w, f = w1 / w:

    |g1|^2 = |x1|^2 / f^2    |g2|^2 = |x2|^2 / (1 - f)^2    g1.g2 = x1.x2 / (f (1 - f)).

Products of the pieces are summed over devices, in float32 whatever the type of the gradients:
one all-reduce of three numbers for each leaf is all that travels. Halves are of the nodes; of a
single node, of its devices. An odd number has halves that differ by one.
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
    pieces: Sequence[HalfBatchSum | None],
    copies: Sequence[int],
    weight: Array | None,
    comm: CommSpec,
) -> GradientHalves:
    """The products of all leaves, from this device's pieces.

    Args:
        pieces: of each leaf, over the weight of the whole batch; None: it has no gradient.
        copies: how many devices have the same piece.
        weight: of this device's rows; None: all examples weigh the same.
        comm: which devices are the first half.

    Returns:
        Lists with a scalar for each leaf.
    """
    pairs = zip(pieces, copies, strict=True)
    none = jnp.zeros(3, jnp.float32)
    products = jnp.concatenate(
        [none[:0], *(none if x is None else _products(x, num) for x, num in pairs)]
    )
    axis = comm.halves_axis
    half = comm.half(axis)
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
    first, second, cross = sums.reshape(len(pieces), 3).T / scale[:, None]
    return GradientHalves(list(first), list(second), list(cross), share)


def _products(x: HalfBatchSum, copies: int) -> Float32[Array, " 3"]:
    second = x.total - x.first
    products = dot(x.first, x.first), dot(second, second), dot(x.first, second)
    return jnp.stack(products) / copies
