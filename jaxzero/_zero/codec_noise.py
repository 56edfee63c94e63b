"""Measure how much gradient noise the codecs add, so that SimiGrad can subtract it.

Let a codec change a gradient x by an error of squared norm r^2 |x|^2, independent of x and of the
errors of other gradients. On the first axis each of n devices sends its own gradient, of expected
squared norm |G|^2 + n T, where T is the noise of the mean over all devices. On the second axis each
of m nodes sends its mean, of squared norm |G|^2 + m T. So the noise of the mean is not T but

    T' = T (1 + r_l^2 + r_n^2) + |G|^2 (r_l^2 / n + r_n^2 / m),

with `r_l` and `r_n` for the codecs on the axes `local` and `node`. Both are measured on the mean
gradient, as an estimate for the gradients of devices. With k micro-batches, each sent by itself, n
and m become k times as large. With hpZ a node sends its mean over micro-batches, so m stays.

If the rows of a table are sent, a device sends the cotangents of rows, each row encoded by itself.
They are sent on over the second axis as they are, or encoded again if that axis has another codec.
In both cases there are n k gradients, and r_l and r_n are the errors of encoding rows. For a table
that is split on its columns, they are measured on one device's columns. They are then up to a third
too small if a block of the codec is wider than these columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32

from .._codecs import Codec
from .._collectives import CommSpec, RowExchange, accumulator_dtype, all_reduce
from .._execute import check_microbatches
from .._mesh import AXES, LOCAL, NODE, REDUCTION_HOPS, AnyMesh, device_index, map_devices
from .._plan import MovedRows
from .._sharding import GradientHop, LeafSpec, ZeroConfig
from .._simigrad import CodecNoise, dot


def _check(config: ZeroConfig) -> None:
    """Raise `NotImplementedError` unless the formula of this module holds for the codecs."""
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


def names_of_tables(rows: Sequence[MovedRows]) -> frozenset[str]:
    """Return the paths of the tables whose rows are sent.

    Raises:
        NotImplementedError: a table also has uses for which it is gathered as a whole.
    """
    for table in rows:
        if not table.is_alone:
            raise NotImplementedError(
                f"The noise of codecs is not known for `{table.name}` of `rows`: a part of its "
                "gradient is sent as rows, the other one as a whole. Leave out `codec_noise`."
            )
    return frozenset(table.name for table in rows)


def measure_codec_noise(
    leaves: tuple[LeafSpec, ...],
    mesh: AnyMesh,
    config: ZeroConfig,
    microbatches: int,
    tables: frozenset[str],
    gradients: Sequence[Array],
) -> CodecNoise:
    """Measure the errors of encoding gradient shards. This sends one all-reduce of three scalars.

    Args:
        leaves: layouts of the parameters.
        mesh: the mesh that the gradients are on.
        config: gives the codecs.
        microbatches: the number of micro-batches of a device over which the gradients are means.
        tables: paths of the tables whose rows are sent, frozen tables included.
        gradients: mean gradients, in stored form.

    Raises:
        ValueError: `microbatches` is not an integer of at least 1.
        NotImplementedError: the config uses error feedback, encodes sums twice, or has
            `ungathered`.
    """
    check_microbatches(microbatches)
    _check(config)
    pairs = zip(leaves, gradients, strict=True)
    floats = [(leaf, x) for leaf, x in pairs if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    measure = _measurement([leaf for leaf, _ in floats], mesh, config, tables)
    energy, *errors = measure([x for _, x in floats])
    scale = jnp.where(energy > 0, 1 / energy, 0.0)
    by_devices, by_nodes = (x * scale for x in errors)
    nodes = mesh.shape[NODE]
    sent_by_nodes = nodes * (1 if config.hpz is not None else microbatches)
    sent_by_devices = nodes * mesh.shape[LOCAL] * microbatches
    of_signal = by_devices / sent_by_devices + by_nodes / sent_by_nodes
    return CodecNoise(by_devices + by_nodes, of_signal)


def _measurement(
    leaves: Sequence[LeafSpec], mesh: AnyMesh, config: ZeroConfig, tables: frozenset[str]
) -> Callable:
    """Make the program that measures the codecs on gradient shards `x`.

    It returns three numbers: `|x|^2`, and the squared errors of encoding `x` by the codecs on the
    axes `local` and `node`.
    """
    comm = CommSpec.of(mesh, config)

    def on_device(shards: list[Array]) -> Float32[Array, " 3"]:
        sums = jnp.zeros(3, jnp.float32)
        for leaf, x in zip(leaves, shards, strict=True):
            if leaf.path in tables:
                codecs = _codecs_of_rows(leaf, comm)
                errors = [_squared_error(_turned(x.reshape(len(x), -1)), *codecs), jnp.float32(0)]
            else:
                codecs = [_codec(leaf, axis, comm) for axis in REDUCTION_HOPS]
                errors = [_squared_error(x.reshape(1, x.size), codec) for codec in codecs]
            copies = comm.num_devices // (comm.num_shards if leaf.layout else 1)
            wide = x.astype(accumulator_dtype(x.dtype))
            sums += jnp.stack([dot(wide, wide), *errors]) / copies
        return all_reduce(sums, AXES)

    specs = [leaf.spec(config.axes, manual_only=True) for leaf in leaves]
    return map_devices(on_device, mesh, (specs,), PartitionSpec())


def _codec(leaf: LeafSpec, axis: str, comm: CommSpec) -> Codec | None:
    num = leaf.layer_size
    return comm.gradient_codec(axis, num, leaf.dtype) if comm.sizes[axis] > 1 else None


def _codecs_of_rows(leaf: LeafSpec, comm: CommSpec) -> list[Codec | None]:
    """Return the codecs that encode the cotangents of a table's rows, in the order of the axes.

    If the table is split on dim 0, whole rows are sent. Then two equal codecs count once, because
    the second axis sends on the encoded message as it is.
    """
    assert leaf.layout is not None
    size = leaf.layer_size if leaf.codec is None else 0
    exchange = RowExchange(leaf.shape, leaf.dtype, leaf.layout, comm, size)
    axes = exchange.axes(back=True)
    axes = axes if leaf.layout.dim else axes[::-1]
    codecs = [exchange.codec(axis, leaf.dtype, back=True) for axis in axes]
    return codecs if leaf.layout.dim else [*dict.fromkeys(codecs)]


def _turned(rows: Array) -> Array:
    """Rotate each pair of neighbouring elements of a row by a fixed angle. The row's norm is kept.

    Without this, the measured error would be too small: the gradient of a row that one device reads
    is a decoded message, whose elements are multiples of the codec's steps, so encoding it again
    would make no error.
    """
    even = rows.shape[1] // 2 * 2
    first, second = rows[:, 0:even:2], rows[:, 1:even:2]
    # Any rotation will do whose sine and cosine are not steps of a codec.
    turned = jnp.stack([0.8 * first - 0.6 * second, 0.6 * first + 0.8 * second], -1)
    return jnp.concatenate([turned.reshape(len(rows), even), rows[:, even:]], 1)


def _squared_error(rows: Array, *codecs: Codec | None) -> Float32[Array, ""]:
    """Return the squared norm of the error of encoding `rows` by each codec in turn."""
    if not any(codecs) or rows.size == 0:
        return jnp.zeros([], jnp.float32)
    # The mean of a few decoded messages lies near the codec's own steps, so encoding the same
    # blocks again would lose less than for a fresh gradient. The roll changes which numbers share
    # a block, unless blocks have 16. Where the devices' gradients are almost equal, the error is
    # underestimated nevertheless; but then devices make almost the same error, which is no noise.
    rows = decoded = jnp.roll(rows, 16, axis=1)
    for codec in filter(None, codecs):
        message = codec.encode_rows(decoded, seed=device_index())
        decoded = codec.decode_rows(message, rows.shape[1], jnp.float32)
    change = decoded - rows.astype(jnp.float32)
    return dot(change, change)
