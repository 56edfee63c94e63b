"""Bound the errors that a config's codecs make in weights and gradients.

The bounds follow from `Codec.error_bound`. A weight `w` arrives as `w + e`, where `|e|` is at most
the sum of `error_bound` over the codecs that encode the weight on its way. The effect of these
errors on losses and gradients is sampled: see `OneDevice.samples`.

Let `b` be the `error_bound` of the codec of a mesh axis. The gradient `g_d` of a device changes by
at most `b(g_d)` on the axis `local`. Then the mean over a node's devices changes by at most
`b(|mean g_d| + mean b(g_d))` on the axis `node`. So an element of the mean over all devices is off
by at most the mean of the first bounds plus the mean of the second. Where sums are not split over
the axes that they are summed over (`split="local"`, stages 0 and 1), they are encoded once more on
their way back.

If a gradient `g` is scaled wrongly, its errors `e_i` make the sum `sum e_i g_i` large. Codecs round
to nearest or without bias, so that of their errors this sum is at most `6 sqrt(sum b_i^2 g_i^2)`,
except with a probability of 3e-8 (Hoeffding).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._codecs import Codec
from .._collectives import CommSpec
from .._mesh import LOCAL, NODE
from .._sharding import LeafSpec, WeightHop, ZeroConfig

_DEVIATIONS = 6  # exceeded with a probability of 3e-8, by Hoeffding (above)


def has_codecs(config: ZeroConfig) -> bool:
    """Return True if a config has a codec for weights, gradients or node slices."""
    hops = (
        config.weights.node,
        config.weights.local,
        config.gradients.node,
        config.gradients.local,
    )
    return any(x is not None for x in hops) or (
        config.hpz is not None and config.hpz.codec is not None
    )


def weight_bound(leaf: LeafSpec, x: Any, comm: CommSpec) -> Any:
    """Return how much codecs may change each element of a weight on its way to a device.

    Args:
        leaf: the layout of the weight.
        x: the weight in full.
        comm: the codecs, and the sizes of the mesh axes.

    Returns:
        The bounds, float32 in the shape of `x`.
    """
    total = np.zeros(x.shape, np.float32)
    if (
        leaf.layout is None
        or leaf.codec is not None
        or not jnp.issubdtype(leaf.dtype, jnp.floating)
    ):
        return total
    hop = comm.weights.node
    codecs = [
        comm.weight_codec(axis, leaf.layer_size, leaf.dtype)
        for axis in (NODE, LOCAL)
        if comm.sizes[axis] > 1 and axis in comm.axes
    ]
    if comm.hpz is not None:
        codecs.append(comm.suitable_for_weights(comm.hpz.codec, leaf.layer_size, leaf.dtype))
    if isinstance(hop, WeightHop):
        codecs.append(comm.suitable_for_weights(hop.codec, leaf.layer_size, leaf.dtype))
    for codec in dict.fromkeys(c for c in codecs if c is not None):
        total += _bound(codec, leaf, x, comm.num_shards)
    return total


def row_bound(leaf: LeafSpec, x: Any, comm: CommSpec) -> Any:
    """Return how much codecs may change each element of a table whose rows are looked up.

    Each row is sent as a message to the devices that look it up, and is encoded again for each
    axis. A sum of rows is off by at most the sum of their bounds. Arguments and result are as in
    `weight_bound`.
    """
    rows = np.abs(np.asarray(x, np.float32)).reshape(len(x), -1)
    total = np.zeros(rows.shape, np.float32)
    for axis in (LOCAL, NODE) if leaf.codec is None else ():
        codec = comm.weight_codec(axis, leaf.layer_size, leaf.dtype)
        if codec is not None and comm.sizes[axis] > 1 and axis in comm.axes:
            total += codec.error_bound(rows + total).astype(np.float32)
    return total.reshape(x.shape)


def gradient_bound(leaf: LeafSpec, parts: Any, comm: CommSpec, config: ZeroConfig) -> Any:
    """Return how much codecs may change each element of a gradient, the mean over all devices.

    Args:
        leaf: the layout of the parameter.
        parts: the gradients of each device and micro-batch, `[devices, microbatches, *shape]`.
        comm: the codecs, and the sizes of the mesh axes.
        config: says over which axes sums of gradients are split.

    Returns:
        The bounds, float64 in the shape of the parameter.
    """
    sizes = comm.sizes[NODE], comm.sizes[LOCAL]
    parts = np.asarray(parts, np.float64).reshape(*sizes, *parts.shape[1:])
    shape = parts.shape[3:]
    error = np.zeros(shape)
    # Sums that are not split over the axis are encoded a second time, on their way back.
    again = 1 + (config.split != "all" or config.stage < 2)
    local = comm.gradient_codec(LOCAL, leaf.layer_size, leaf.dtype) if sizes[1] > 1 else None
    node = comm.gradient_codec(NODE, leaf.layer_size, leaf.dtype) if sizes[0] > 1 else None
    for i in range(sizes[0]):
        for k in range(parts.shape[2]):
            of_local = np.zeros(shape)
            if local is not None:
                for d in range(sizes[1]):
                    of_local += again * _bound(local, leaf, parts[i, d, k], sizes[1]) / sizes[1]
            error += of_local / (sizes[0] * parts.shape[2])
            if node is not None:
                mean = np.abs(parts[i, :, k].mean(0)) + of_local
                once = _bound(node, leaf, mean, comm.num_devices) / (sizes[0] * parts.shape[2])
                error += again * once
    return error


def bounds_of(error: Any, result: Any) -> Any:
    """Return bounds, `[3]`, of the change of a result by codecs, as `samples.measured` measures it.

    Args:
        error: for each element of a result, the bound of its error.
        result: the result.
    """
    result = np.where(np.isfinite(result), np.asarray(result, np.float64), 0)
    along = _DEVIATIONS * np.linalg.norm((error * result).ravel())
    return np.array([np.linalg.norm(error.ravel()), np.max(error, initial=0), along])


def bound_of_shards(codec: Codec, leaf: LeafSpec, x: Any) -> Any:
    """Return how much `codec` may change each element of a leaf, float32 in the leaf's shape.

    Each device encodes its shard of the leaf as one message.
    """
    num = leaf.layout.num_shards if leaf.layout else 1
    return _bound(codec, leaf, x, num, num_lead=0).astype(np.float32)


def _bound(codec: Codec, leaf: LeafSpec, x: Any, num: int, num_lead: int | None = None) -> Any:
    """Return how much a codec may change each element of a leaf that is sent in `num` shards.

    Args:
        codec: the codec.
        leaf: the layout of the leaf.
        x: the leaf in full.
        num: the number of shards.
        num_lead: the number of leading dims whose entries are messages of their own, such as the
            layers of a stack; None: that of `leaf`.
    """
    x = np.asarray(x, np.float32)
    if leaf.layout is None:
        return codec.error_bound(x.reshape(1, -1)).reshape(x.shape)
    dim = leaf.layout.dim
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, -x.shape[dim] % num)
    padded = np.pad(x, widths)
    pieces = np.stack(np.split(padded, num, axis=dim))  # [num, *piece]
    lead = leaf.num_lead if num_lead is None else num_lead
    rows = pieces.reshape(*pieces.shape[: 1 + lead], -1)
    bound = codec.error_bound(rows).reshape(pieces.shape)
    joined = np.concatenate(list(bound), axis=dim)
    return joined[tuple(slice(n) for n in x.shape)]
