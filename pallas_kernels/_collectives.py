"""All-gather and reduce-scatter of quantized numbers, along one axis of a mesh.

Each is quantize, exchange, dequantize. As implementation `xla` these are three steps, and the
meaning of the operation. As `mosaic_gpu` they are one kernel on every device, which writes into
its peers' memory over NVLink: compiles, never executed. No machine with several GPUs has run
it, so it is never chosen: only who asks for it by name gets it.

Legend: o, n, i as in `_reference`, n being the devices of the axis.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jax import lax
from jaxtyping import Array, Float, Float32, Integer, UInt32

from . import _dispatch as dispatch
from . import _reference as reference
from ._config import Implementation
from ._format import Format

if TYPE_CHECKING:
    from ._remote import RemoteConfig

_LARGEST_BLOCK = 2048  # two of them are as much as a warpgroup's registers hold


def quantized_all_gather(
    x: Float[Array, ...],
    axis: str,
    format: Format,
    dim: int = 0,
    *,
    seed: Integer[Array, ""] | int | None = None,
    implementation: Implementation | None = None,
    config: RemoteConfig | None = None,
) -> Float[Array, ...]:
    """Gather shards along `dim`, quantized on the wire; inside `shard_map`.

    `implementation="mosaic_gpu"` does it in one kernel, which compiles, never executed: it is
    there to be tried on a machine with several GPUs, whose numbers are to be compared.

    Args:
        x: this device's shard.
        axis: of the mesh; all of its devices get the same.
        format: of the numbers on the wire.
        dim: along which shards are joined, in the order of the devices; from the end if less
            than 0.
        seed: of stochastic rounding. None is 0.
        implementation: "xla" or "mosaic_gpu"; None is "xla".
        config: how the kernel is cut up; None: see `RemoteConfig`.

    Returns:
        All shards, each rounded as `format` says, in the type of `x`.

    Raises:
        ValueError: `implementation` is no name of one.
        NotImplementedError: the kernel cannot do it; the message says why.
    """
    dim = range(x.ndim)[dim]
    outer, size, inner = _around(x.shape, dim)
    x_oi, seed = x.reshape(outer, size * inner), dispatch.as_uint32(seed)
    if _wants_kernel(implementation, x, format, lax.axis_size(axis) * x.size):
        from ._all_gather import all_gather  # Pallas is only imported where it is used
        from ._remote import RemoteConfig

        x_oni = all_gather(x_oi, axis, format, seed, config or RemoteConfig())
    else:
        x_oni = gather_reference(x_oi, axis, format, seed)
    return x_oni.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def quantized_reduce_scatter(
    x: Float[Array, ...],
    axis: str,
    format: Format,
    dim: int = 0,
    *,
    seed: Integer[Array, ""] | int | None = None,
    implementation: Implementation | None = None,
    config: RemoteConfig | None = None,
) -> Float32[Array, ...]:
    """Sum over devices, each of which keeps its piece along `dim`; inside `shard_map`.

    Every number is quantized once, by the device that has it, and sums are taken in float32.
    `implementation="mosaic_gpu"` does it in one kernel, which compiles, never executed: it is
    there to be tried on a machine with several GPUs, whose numbers are to be compared.

    Args:
        x: what this device adds, whole.
        axis: of the mesh.
        format: of the numbers on the wire.
        dim: along which the sum is cut, in the order of the devices; from the end if less than 0.
        seed: of stochastic rounding: give each device one of its own. None is 0.
        implementation: "xla" or "mosaic_gpu"; None is "xla".
        config: how the kernel is cut up; None: see `RemoteConfig`.

    Returns:
        This device's piece of the sum, added up in the order of the devices.

    Raises:
        ValueError: `dim` cannot be cut, or `implementation` is no name of one.
        NotImplementedError: the kernel cannot do it; the message says why.
    """
    devices, dim = lax.axis_size(axis), range(x.ndim)[dim]
    outer, size, inner = _around(x.shape, dim)
    if size % devices:
        raise ValueError(
            f"`dim` {dim} of `x` must be a multiple of the {devices} devices of {axis!r}; got "
            f"shape {x.shape}. Pad it with zeros."
        )
    x_oni, seed = x.reshape(outer, devices, size // devices * inner), dispatch.as_uint32(seed)
    if _wants_kernel(implementation, x, format, x.size):
        from ._reduce_scatter import reduce_scatter  # Pallas is only imported where it is used
        from ._remote import RemoteConfig

        x_oi = reduce_scatter(x_oni, axis, format, seed, config or RemoteConfig())
    else:
        x_oi = scatter_reference(x_oni, axis, format, seed)
    return x_oi.reshape(*x.shape[:dim], size // devices, *x.shape[dim + 1 :])


def gather_reference(
    x_oi: Float[Array, "o i"], axis: str, format: Format, seed: UInt32[Array, ""]
) -> Float[Array, "o n i"]:
    """Quantize, all-gather the messages, dequantize."""
    # The barrier keeps XLA from moving what quantizes across the exchange (jax issue 23543).
    (message,) = lax.optimization_barrier(reference.quantize(x_oi[:, None], format, seed))
    messages = lax.all_gather(message, axis)
    outer, inner = x_oi.shape
    return reference.dequantize(messages, format, outer, inner, x_oi.dtype)


def scatter_reference(
    x_oni: Float[Array, "o n i"], axis: str, format: Format, seed: UInt32[Array, ""]
) -> Float32[Array, "o i"]:
    """Quantize, send every device its message, dequantize and sum in the order of devices."""
    outer, _, inner = x_oni.shape
    messages = lax.optimization_barrier(reference.quantize(x_oni, format, seed))
    messages = lax.all_to_all(messages, axis, 0, 0, tiled=True)
    return reference.dequantize_sum(messages, format, outer * inner).reshape(outer, inner)


def _wants_kernel(
    implementation: str | None, x: Float[Array, ...], format: Format, size: int
) -> bool:
    """Whether the kernel is wanted, for arrays of `size` elements at most."""
    if implementation not in (None, "xla", "mosaic_gpu"):
        raise ValueError(
            f'`implementation` must be "xla", "mosaic_gpu" or None; got {implementation!r}.'
        )
    if implementation != "mosaic_gpu":
        return False
    reason = dispatch.gap("mosaic_gpu", x.dtype, size)
    reason = reason or dispatch.kind_gap("mosaic_gpu", format.kind)
    if reason is None and format.hadamard:
        reason = "it does not rotate, for which tiles would pass through shared memory"
    if reason is None and format.block > _LARGEST_BLOCK:
        reason = f"a block has {_LARGEST_BLOCK} numbers at most, and not {format.block}"
    if reason is None and not x.size:
        reason = "there is nothing to send"
    if reason is not None:
        raise NotImplementedError(
            f'`implementation="mosaic_gpu"` cannot do this: {reason}. Take "xla", or `None` for '
            "what can."
        )
    return True


def _around(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """How much lies before a dim, in it, and behind it."""
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])
