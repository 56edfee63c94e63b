"""Run a hop over `local` as one kernel: it encodes, exchanges, and decodes or adds up.

With a codec whose `exchange_format` is not None (`implementation="nvlink"`), the kernels
`quantized_all_gather` and `quantized_reduce_scatter` take the place of three steps: an encoding,
XLA's collective and a decoding. Buckets then hold arrays, not messages. Before a gather the array
is the shard, and after it the full weight, in the dtype that it is read in. Before a reduction it
is the full gradient, and after it the sum. Results equal those of the three steps bit for bit: each
array of a bucket is encoded by itself, with the same seed, and sums are in float32, in the order of
the devices.

Small arrays share a kernel. Each then begins with a tile of its own, and is copied into the bucket
and out of it; large arrays are read and written where they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from .. import pallas_kernels as kernels
from .._codecs import Codec
from .._mesh import LOCAL, TOKENS, AnyMesh, SimulatedMesh, device_index, physical
from .._sharding import PerAxis
from .ledger import note


@dataclasses.dataclass(frozen=True)
class KernelHop:
    """The settings of the kernel that will encode, gather and decode a shard.

    Attributes:
        codec: the codec, which has a kernel for whole hops.
        seed_axes: axes along which devices hold different shards, as in `EncodedShards.encode`.
        dtype: dtype of the gathered array.
    """

    codec: Codec
    seed_axes: tuple[str, ...]
    dtype: Any

    def gather(
        self,
        x: Float[Array, ...],
        dim: int,
        axis: str,
        parts: Sequence[int] = (),
        *,
        of_leaves: bool = False,
    ) -> Float[Array, ...]:
        """Gather shards along `dim`.

        Args:
            x: this device's shard, or a row `[1, sum(parts)]` of several shards.
            dim: the dim along which shards are joined.
            axis: the mesh axis.
            parts: sizes of the arrays in `x`, each of which is encoded by itself; empty: `x` is
                one.
            of_leaves: whether parts belong to different leaves.

        Returns:
            The gathered array in `dtype`; with `parts`, `[devices, sum(parts)]`.

        Raises:
            NotImplementedError: the kernel does not support `x`, with the reason.
        """
        _check_axis(axis)
        format = _format(self.codec)
        with jax.named_scope("exchange"):
            full = kernels.quantized_all_gather(
                x,
                axis,
                format,
                dim,
                parts=parts,
                dtype=self.dtype,
                seed=device_index(self.seed_axes),
                implementation="mosaic_gpu",
            )
        num = full.size // x.size
        _note("all-gather", x.shape, dim, axis, self.codec, num, parts, of_leaves)
        return full


def scatter(
    x: Float[Array, ...],
    dim: int,
    axis: str,
    codec: Codec,
    seed: Array,
    parts: Sequence[int] = (),
) -> Float32[Array, ...]:
    """Sum `x` over devices by one kernel, and keep this device's shard along `dim`.

    Args:
        x: this device's addend, or rows `[devices, sum(parts)]` of several addends.
        dim: the dim that is cut into shards.
        axis: the mesh axis.
        codec: the codec, which has a kernel for whole hops.
        seed: seed of stochastic rounding.
        parts: sizes of the arrays in `x`, each of which is encoded by itself; empty: `x` is one.

    Raises:
        NotImplementedError: the kernel does not support `x`, with the reason.
    """
    _check_axis(axis)
    with jax.named_scope("exchange"):
        total = kernels.quantized_reduce_scatter(
            x, axis, _format(codec), dim, parts=parts, seed=seed, implementation="mosaic_gpu"
        )
    shape = list(x.shape)
    num = x.size // total.size
    shape[dim] //= num
    _note("all-to-all", tuple(shape), dim, axis, codec, num, parts, bool(parts))
    return total


def check_kernel_hops(
    mesh: AnyMesh, weights: PerAxis, gradients: PerAxis, *, halves_local: bool
) -> None:
    """Check that a mesh can run those hops whose codec asks for a single kernel.

    Args:
        mesh: the mesh of the program.
        weights: codecs of gathers.
        gradients: codecs of reductions.
        halves_local: whether the sum over the first half of `local` is needed too.

    Raises:
        NotImplementedError: the mesh cannot run them, with the reason.
    """
    wanted = {"weights.local": weights.local, "gradients.local": gradients.local}
    wanted = {k: v for k, v in wanted.items() if v is not None and v.exchange_format is not None}
    if not wanted or mesh.shape[LOCAL] == 1:
        return
    reason = _gap(mesh)
    if reason is None and halves_local and "gradients.local" in wanted:
        reason = "it adds up what it receives, and the sum over half of the devices is needed too"
    if reason is not None:
        name, codec = next(iter(wanted.items()))
        raise NotImplementedError(
            f"`{name}` cannot be {codec} here: {reason}. Leave out "
            '`implementation="nvlink"`: the same numbers are then sent by XLA\'s collectives.'
        )


def _gap(mesh: AnyMesh) -> str | None:
    """Return the reason why a mesh cannot run kernels that store into peers' memory, or None."""
    if isinstance(mesh, SimulatedMesh):
        return "its devices are simulated, and the kernel stores into the memory of real ones"
    if mesh.shape.get(TOKENS, 1) > 1:
        return f"the kernel cannot exchange weights that the mesh axis `{TOKENS}` splits"
    devices = physical(mesh).devices.flatten().tolist()
    # JAX gives such a kernel the addresses of all devices of the mesh, whatever axis it uses, and
    # XLA exchanges them inside one process.
    if len({device.process_index for device in devices}) > 1:
        return "the mesh has devices of several processes, and XLA finds peers in one only"
    return kernels.remote_gap(devices[0].platform)


def _check_axis(axis: str) -> None:
    assert axis == LOCAL, "`check_codec` lets no such codec be given for another axis"


def _format(codec: Codec) -> kernels.Format:
    assert codec.exchange_format is not None
    return codec.exchange_format


def _note(
    collective: str,
    shape: tuple[int, ...],
    dim: int,
    axis: str,
    codec: Codec,
    num: int,
    parts: Sequence[int],
    of_leaves: bool,
) -> None:
    """Record a kernel's hop in the ledger, as the collective that it replaces.

    Args:
        collective: the name of the collective.
        shape: the shape of one shard.
        dim: the dim along which shards are joined or cut.
        axis: the mesh axis.
        codec: the codec.
        num: the number of devices, into whose memory the kernel stores.
        parts: sizes of the arrays in a shard; empty: the shard is one array.
        of_leaves: whether parts belong to different leaves.
    """
    sizes = kernels.exchange_bytes(shape, dim, _format(codec), parts)
    sent = jax.ShapeDtypeStruct((num * sum(sizes),), jnp.uint8)
    note(collective, axis, sent, sizes if of_leaves else (), (codec,))


def lead_parts(shape: tuple[int, ...], lead: int) -> tuple[int, ...]:
    """Return the number of elements of each layer of a stack, as `parts` of a kernel's hop.

    `lead` is the number of leading dims of `shape` that count layers.
    """
    return (math.prod(shape[lead:]),) * math.prod(shape[:lead])
