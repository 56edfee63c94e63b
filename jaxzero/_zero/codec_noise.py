"""How much of what SimiGrad takes for noise of the gradients a codec has added.

Let a codec change a gradient x by r^2 |x|^2, in directions that have nothing to do with x or with
what it does to others. On the first hop each of n devices sends its own gradient, of
|G|^2 + n T, where T is the noise of the mean over all devices; on the second each of m nodes
sends its mean, of |G|^2 + m T. So the mean has the noise

    T' = T (1 + r_l^2 + r_n^2) + |G|^2 (r_l^2 / n + r_n^2 / m),

and not T; `r_l`, `r_n` are of the codecs on the axes `local` and `node`. Both are measured on the
mean gradient, which stands for those of devices. With k micro-batches in one gradient, each sent by
itself, n and m are k times as large; with hpZ a node sends their mean, and m is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32

from .._codecs import Codec
from .._collectives import CommSpec, accumulator_dtype, all_reduce
from .._execute import check_microbatches
from .._mesh import AXES, LOCAL, NODE, REDUCTION_HOPS, AnyMesh, device_index, map_devices
from .._sharding import GradientHop, LeafSpec, ZeroConfig
from .._simigrad import CodecNoise, dot


def _check(config: ZeroConfig) -> None:
    """Raise `NotImplementedError` where errors are not what the formula takes them for."""
    gradients = config.gradients
    if isinstance(gradients.node, GradientHop):
        hop = type(gradients.node).__name__
        what = f"`{hop}` makes up for errors later, so they are no noise of one batch"
    elif gradients.node is not None and config.split != "all":
        what = 'with `split="local"` sums over nodes are encoded twice'
    elif (gradients.node or gradients.local) is not None and config.stage < 2:
        what = f"with `stage={config.stage}` sums are encoded twice"
    else:
        return
    raise NotImplementedError(
        f"The noise of codecs is known for gradients that are split over all devices: {what}. "
        "Leave out `codec_noise`."
    )


def measure_codec_noise(
    leaves: tuple[LeafSpec, ...],
    gradients: Sequence[Array],
    mesh: AnyMesh,
    config: ZeroConfig,
    microbatches: int,
) -> CodecNoise:
    """Encode and decode gradients as they travel; three sums over devices are all that is sent.

    Args:
        leaves: of the parameters.
        gradients: means, as they are stored.
        mesh: where they are.
        config: the codecs.
        microbatches: that gradients are the means of, on each device.

    Raises:
        ValueError: `microbatches` is no number of at least 1.
        NotImplementedError: errors are fed back, or sums are encoded twice.
    """
    check_microbatches(microbatches)
    _check(config)
    pairs = zip(leaves, gradients, strict=True)
    known = [(leaf, x) for leaf, x in pairs if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    measure = _measurement(tuple(leaf for leaf, _ in known), mesh, config)
    energy, lost_local, lost_node = measure([x for _, x in known])
    scale = jnp.where(energy > 0, 1 / energy, 0.0)
    local, node = lost_local * scale, lost_node * scale
    nodes = mesh.shape[NODE]
    sent_by_nodes = nodes * (1 if config.hpz is not None else microbatches)
    of_signal = local / (nodes * mesh.shape[LOCAL] * microbatches) + node / sent_by_nodes
    return CodecNoise(local + node, of_signal)


@functools.lru_cache(maxsize=64)
def _measurement(leaves: tuple[LeafSpec, ...], mesh: AnyMesh, config: ZeroConfig) -> Callable:
    """The program that gives |x|^2 and what the codecs of `REDUCTION_HOPS` change of it."""
    comm = CommSpec.of(mesh, config)

    def on_device(shards: list[Array]) -> Float32[Array, " 3"]:
        sums = jnp.zeros(3, jnp.float32)
        for leaf, x in zip(leaves, shards, strict=True):
            lost = [_lost(x, _codec(leaf, axis, comm)) for axis in REDUCTION_HOPS]
            copies = comm.num_devices // (comm.pieces if leaf.layout else 1)
            wide = x.astype(accumulator_dtype(x.dtype))
            sums += jnp.stack([dot(wide, wide), *lost]) / copies
        return all_reduce(sums, AXES)

    specs = [leaf.spec(config.axes, manual_only=True) for leaf in leaves]
    return jax.jit(map_devices(on_device, mesh, (specs,), PartitionSpec()))


def _codec(leaf: LeafSpec, axis: str, comm: CommSpec) -> Codec | None:
    num = leaf.layer_size
    return comm.gradient_codec(axis, num, leaf.dtype) if comm.sizes[axis] > 1 else None


def _lost(x: Array, codec: Codec | None) -> Float32[Array, ""]:
    if codec is None or x.size == 0:
        return jnp.zeros([], jnp.float32)
    # Sums of a few messages lie near the codec's own steps, and would lose less than another
    # gradient. So other numbers are rotated together.
    rows = jnp.roll(x.reshape(1, x.size), 16, axis=1)
    message = codec.encode_rows(rows, seed=device_index())
    change = codec.decode_rows(message, x.size, jnp.float32) - rows.astype(jnp.float32)
    return dot(change, change)
