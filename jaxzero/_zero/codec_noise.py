"""Measure how much gradient noise the codecs add, so that SimiGrad can subtract it.

Let a codec change a gradient x by an error of squared norm r^2 |x|^2, independent of x and of the
errors of other gradients. On the first axis each of n devices sends its own gradient, of expected
squared norm |G|^2 + n T, where T is the noise of the mean over all devices; on the second axis each
of m nodes sends its mean, of |G|^2 + m T. So the noise of the mean is not T but

    T' = T (1 + r_l^2 + r_n^2) + |G|^2 (r_l^2 / n + r_n^2 / m),

with `r_l` and `r_n` for the codecs on the axes `local` and `node`. Both are measured on the mean
gradient, as an estimate for the gradients of devices. With k micro-batches, each sent by itself, n
and m are k times as large; with hpZ a node sends the mean over its micro-batches, and m stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    """Raise `NotImplementedError` for configs whose codec errors do not follow the formula."""
    gradients = config.gradients
    if isinstance(gradients.node, GradientHop):
        hop = type(gradients.node).__name__
        what = f"`{hop}` makes up for errors later, so they are no noise of one batch"
    elif gradients.node is not None and config.split != "all":
        what = 'with `split="local"` sums over nodes are encoded twice'
    elif config.ungathered is not None:
        what = "those of `ungathered` leaves are encoded over nodes only"
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
    mesh: AnyMesh,
    config: ZeroConfig,
    microbatches: int,
    gradients: Sequence[Array],
) -> CodecNoise:
    """Measure the errors of encoding gradient shards; sends one all-reduce of three scalars.

    Args:
        leaves: layouts of the parameters.
        mesh: the mesh that the gradients are on.
        config: gives the codecs.
        microbatches: number of micro-batches of a device that the gradients are means over.
        gradients: mean gradients, in stored form.

    Raises:
        ValueError: `microbatches` is not an integer of at least 1.
        NotImplementedError: the config uses error feedback, or encodes sums twice.
    """
    check_microbatches(microbatches)
    _check(config)
    pairs = zip(leaves, gradients, strict=True)
    known = [(leaf, x) for leaf, x in pairs if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    measure = _measurement([leaf for leaf, _ in known], mesh, config)
    energy, local_error, node_error = measure([x for _, x in known])
    scale = jnp.where(energy > 0, 1 / energy, 0.0)
    local, node = local_error * scale, node_error * scale  # r_l^2, r_n^2
    nodes = mesh.shape[NODE]
    sent_by_nodes = nodes * (1 if config.hpz is not None else microbatches)
    of_signal = local / (nodes * mesh.shape[LOCAL] * microbatches) + node / sent_by_nodes
    return CodecNoise(local + node, of_signal)


def _measurement(leaves: Sequence[LeafSpec], mesh: AnyMesh, config: ZeroConfig) -> Callable:
    """The program that returns `[|x|^2, squared error on local, squared error on node]`."""
    comm = CommSpec.of(mesh, config)

    def on_device(shards: list[Array]) -> Float32[Array, " 3"]:
        sums = jnp.zeros(3, jnp.float32)
        for leaf, x in zip(leaves, shards, strict=True):
            errors = [_squared_error(x, _codec(leaf, axis, comm)) for axis in REDUCTION_HOPS]
            copies = comm.num_devices // (comm.num_shards if leaf.layout else 1)
            wide = x.astype(accumulator_dtype(x.dtype))
            sums += jnp.stack([dot(wide, wide), *errors]) / copies
        return all_reduce(sums, AXES)

    specs = [leaf.spec(config.axes, manual_only=True) for leaf in leaves]
    return map_devices(on_device, mesh, (specs,), PartitionSpec())


def _codec(leaf: LeafSpec, axis: str, comm: CommSpec) -> Codec | None:
    num = leaf.layer_size
    return comm.gradient_codec(axis, num, leaf.dtype) if comm.sizes[axis] > 1 else None


def _squared_error(x: Array, codec: Codec | None) -> Float32[Array, ""]:
    """The squared norm of the error that encoding and decoding makes in `x`."""
    if codec is None or x.size == 0:
        return jnp.zeros([], jnp.float32)
    # The mean of a few decoded messages lies near the codec's own steps, so encoding the same
    # blocks again would lose less than for a fresh gradient. The roll changes which numbers share
    # a block.
    rows = jnp.roll(x.reshape(1, x.size), 16, axis=1)
    message = codec.encode_rows(rows, seed=device_index())
    change = codec.decode_rows(message, x.size, jnp.float32) - rows.astype(jnp.float32)
    return dot(change, change)
