"""All-gather and reduce-scatter of quantized numbers, along one axis of a mesh.

Each one quantizes, communicates and dequantizes. Implementation `xla` does this in three steps
and is the reference. `mosaic_gpu` is one kernel on every device, which writes into its peers'
memory over NVLink: compiles, never executed. Since no machine with several GPUs has run it, it
is used only when it is requested by name.

Legend: o, n, i as in `_reference`, with n the devices of the axis.
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

_LARGEST_BLOCK = 2048  # a tile has at least two blocks and must fit a warpgroup's registers


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
    """Gather shards along `dim`, quantized on the wire. Call it inside `shard_map`.

    `implementation="mosaic_gpu"` is one kernel, which compiles, never executed. It is meant for
    experiments on a machine with several GPUs; compare its results with those of "xla".

    Args:
        x: this device's shard.
        axis: mesh axis to gather over.
        format: wire format.
        dim: dimension along which shards are concatenated, in the order of the devices;
            negative values count from the end.
        seed: seed of stochastic rounding. None means 0.
        implementation: "xla" or "mosaic_gpu"; None means "xla".
        config: tile sizes of the kernel. None means `RemoteConfig()`.

    Returns:
        All shards, each rounded to `format`, in the dtype of `x`; equal on all devices.

    Raises:
        ValueError: `implementation` is unknown.
        NotImplementedError: the kernel does not support these arguments, with the reason.
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
    """Sum `x` over devices, and return this device's shard along `dim`; call it in `shard_map`.

    Each device quantizes its numbers once, and sums are accumulated in float32.
    `implementation="mosaic_gpu"` is one kernel, which compiles, never executed. It is meant for
    experiments on a machine with several GPUs; compare its results with those of "xla".

    Args:
        x: this device's addend, of the full shape.
        axis: mesh axis to reduce over.
        format: wire format.
        dim: dimension along which the sum is divided, in the order of the devices; negative
            values count from the end.
        seed: seed of stochastic rounding; use a different one on each device. None means 0.
        implementation: "xla" or "mosaic_gpu"; None means "xla".
        config: tile sizes of the kernel. None means `RemoteConfig()`.

    Returns:
        This device's shard of the sum (float32), added in the order of the devices.

    Raises:
        ValueError: the number of devices does not divide `dim`, or `implementation` is unknown.
        NotImplementedError: the kernel does not support these arguments, with the reason.
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
    # Without the barrier XLA may move the quantization behind the all-gather (jax issue 23543).
    (message,) = lax.optimization_barrier(reference.quantize(x_oi[:, None], format, seed))
    messages = lax.all_gather(message, axis)
    outer, inner = x_oi.shape
    return reference.dequantize(messages, format, outer, inner, x_oi.dtype)


def scatter_reference(
    x_oni: Float[Array, "o n i"], axis: str, format: Format, seed: UInt32[Array, ""]
) -> Float32[Array, "o i"]:
    """Quantize, exchange messages by all-to-all, dequantize and sum in the order of devices."""
    outer, _, inner = x_oni.shape
    messages = lax.optimization_barrier(reference.quantize(x_oni, format, seed))
    messages = lax.all_to_all(messages, axis, 0, 0, tiled=True)
    return reference.dequantize_sum(messages, format, outer * inner).reshape(outer, inner)


def _wants_kernel(
    implementation: str | None, x: Float[Array, ...], format: Format, size: int
) -> bool:
    """Return True if the kernel was requested and can handle arrays of up to `size` elements."""
    if implementation not in (None, "xla", "mosaic_gpu"):
        raise ValueError(
            f'`implementation` must be "xla", "mosaic_gpu" or None; got {implementation!r}.'
        )
    if implementation != "mosaic_gpu":
        return False
    reason = dispatch.gap("mosaic_gpu", x.dtype, size)
    reason = reason or dispatch.kind_gap("mosaic_gpu", format.kind)
    if reason is None and format.hadamard:
        reason = "it has no Hadamard rotation, which needs tiles in shared memory"
    if reason is None and format.block > _LARGEST_BLOCK:
        reason = f"blocks may have at most {_LARGEST_BLOCK} numbers; got {format.block}"
    if reason is None and not x.size:
        reason = "there is nothing to send"
    if reason is not None:
        raise NotImplementedError(
            f'`implementation="mosaic_gpu"` cannot do this: {reason}. Use "xla" or `None`.'
        )
    return True


def _around(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """Return the number of elements in the dims before `dim`, in `dim`, and in those after it."""
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])
