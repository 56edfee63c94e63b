"""All-gather and reduce-scatter of quantized numbers, along one axis of a mesh.

Each one quantizes, communicates and dequantizes. Implementation `xla` does this in three steps
and is the reference. `mosaic_gpu` is one kernel on every device, which writes into its peers'
memory over NVLink: compiles, never executed. Since no machine with several GPUs has run it, it
is used only when it is requested by name.

Legend: o, n, i as in `_reference`, with n the devices of the axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Integer, Shaped, UInt32

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
    parts: Sequence[int] = (),
    dtype: DTypeLike | None = None,
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
        parts: sizes of several arrays that lie side by side in `x`, `[1, sum(parts)]`, gathered
            along dim 0: each is quantized by itself, with blocks of its own. Empty for one array.
        dtype: of the result. None means that of `x`.
        seed: seed of stochastic rounding. None means 0.
        implementation: "xla" or "mosaic_gpu"; None means "xla".
        config: tile sizes of the kernel. None means `RemoteConfig()`.

    Returns:
        All shards, each rounded to `format`; equal on all devices.

    Raises:
        ValueError: `implementation` is unknown, or `parts` are not those of `x`.
        NotImplementedError: the kernel does not support these arguments, with the reason.
    """
    dim = range(x.ndim)[dim]
    outer, size, inner = _around(x.shape, dim)
    _check_parts(parts, x.shape, dim)
    x_oi, seed = x.reshape(outer, size * inner), dispatch.as_uint32(seed)
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if _wants_kernel(implementation, x, format, lax.axis_size(axis) * x.size, dtype):
        from ._all_gather import all_gather  # Pallas is only imported where it is used
        from ._remote import RemoteConfig

        x_oni = all_gather(x_oi, axis, format, seed, config or RemoteConfig(), dtype, parts)
    else:
        x_oni = _of_parts(
            lambda x_oi: gather_reference(x_oi, axis, format, seed, dtype), x_oi, parts
        )
    return x_oni.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def quantized_reduce_scatter(
    x: Float[Array, ...],
    axis: str,
    format: Format,
    dim: int = 0,
    *,
    parts: Sequence[int] = (),
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
        parts: sizes of several arrays that lie side by side in the rows of `x`,
            `[devices, sum(parts)]`, of which each device gets one: each is quantized by itself,
            with blocks of its own. Empty for one array.
        seed: seed of stochastic rounding; use a different one on each device. None means 0.
        implementation: "xla" or "mosaic_gpu"; None means "xla".
        config: tile sizes of the kernel. None means `RemoteConfig()`.

    Returns:
        This device's shard of the sum (float32), added in the order of the devices.

    Raises:
        ValueError: the number of devices does not divide `dim`, `implementation` is unknown, or
            `parts` are not those of `x`.
        NotImplementedError: the kernel does not support these arguments, with the reason.
    """
    devices, dim = lax.axis_size(axis), range(x.ndim)[dim]
    outer, size, inner = _around(x.shape, dim)
    if size % devices:
        raise ValueError(
            f"`dim` {dim} of `x` must be a multiple of the {devices} devices of {axis!r}; got "
            f"shape {x.shape}. Pad it with zeros."
        )
    _check_parts(parts, (size // devices, *x.shape[1:]), dim)
    x_oni, seed = x.reshape(outer, devices, size // devices * inner), dispatch.as_uint32(seed)
    if _wants_kernel(implementation, x, format, x.size):
        from ._reduce_scatter import reduce_scatter  # Pallas is only imported where it is used
        from ._remote import RemoteConfig

        x_oi = reduce_scatter(x_oni, axis, format, seed, config or RemoteConfig(), parts)
    else:
        x_oi = _of_parts(lambda x_oni: scatter_reference(x_oni, axis, format, seed), x_oni, parts)
    return x_oi.reshape(*x.shape[:dim], size // devices, *x.shape[dim + 1 :])


def gather_reference(
    x_oi: Float[Array, "o i"],
    axis: str,
    format: Format,
    seed: UInt32[Array, ""],
    dtype: DTypeLike,
) -> Float[Array, "o n i"]:
    """Quantize `x_oi`, all-gather the messages, and dequantize those of all devices, in XLA."""
    # Without the barrier XLA may move the quantization behind the all-gather (jax issue 23543).
    (message,) = lax.optimization_barrier(reference.quantize(x_oi[:, None], format, seed))
    messages = lax.all_gather(message, axis)
    outer, inner = x_oi.shape
    return reference.dequantize(messages, format, outer, inner, jnp.dtype(dtype))


def scatter_reference(
    x_oni: Float[Array, "o n i"], axis: str, format: Format, seed: UInt32[Array, ""]
) -> Float32[Array, "o i"]:
    """Quantize `x_oni`, exchange messages by all-to-all, and sum them in the order of devices."""
    outer, _, inner = x_oni.shape
    # The barrier keeps the quantization before the exchange, as in `gather_reference`.
    messages = lax.optimization_barrier(reference.quantize(x_oni, format, seed))
    messages = lax.all_to_all(messages, axis, 0, 0, tiled=True)
    return reference.dequantize_sum(messages, format, outer * inner).reshape(outer, inner)


def _of_parts(
    one: Callable[[Array], Array], x: Shaped[Array, "... i"], parts: Sequence[int]
) -> Array:
    """Apply the collective `one` to each part of the last dim, and concatenate the results.

    `parts` are the sizes of the parts; if there are less than two, `x` is one part.
    """
    if len(parts) < 2:
        return one(x)
    ends = itertools.accumulate(parts)
    pairs = zip(parts, ends, strict=True)
    return jnp.concatenate([one(x[..., end - size : end]) for size, end in pairs], axis=-1)


def _check_parts(parts: Sequence[int], shape: tuple[int, ...], dim: int) -> None:
    """Raise `ValueError` unless `parts` is empty, or `shape` is a row of `sum(parts)` numbers."""
    if parts and (len(shape) != 2 or shape[0] != 1 or dim or sum(parts) != shape[1]):
        raise ValueError(
            f"`parts` must add up to the columns of one row for each device, along `dim` 0; got "
            f"{tuple(parts)}, for rows {shape} and `dim` {dim}. Flatten each array, and lay them "
            "side by side."
        )


def exchange_bytes(
    shape: tuple[int, ...], dim: int, format: Format, parts: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the bytes that the kernel stores into the memory of each peer, for each of `parts`.

    Without `parts`, the result has one entry, for the whole array. The bytes are more than
    `Format.num_bytes` says, since the kernel sends whole tiles.

    Args:
        shape: shape of the array that one device sends to another.
        dim: dimension along which arrays are gathered, or sums are divided.
        format: wire format.
        parts: as in `quantized_all_gather`.
    """
    from ._remote import RemoteConfig, Tiling  # Pallas is only imported where it is used

    outer, size, inner = _around(shape, dim)
    return Tiling.of(outer, size * inner, format, RemoteConfig(), parts).sent_bytes()


def exchange_gap(format: Format) -> str | None:
    """Return why no single kernel can gather or reduce-scatter in `format`; None if one can."""
    if (reason := dispatch.kind_gap("mosaic_gpu", format.kind)) is not None:
        return reason
    if format.hadamard:
        return "it has no Hadamard rotation, which needs tiles in shared memory"
    if format.block > _LARGEST_BLOCK:
        return f"blocks may have at most {_LARGEST_BLOCK} numbers; got {format.block}"
    return None


def remote_gap(platform: str) -> str | None:
    """Return why devices of a platform cannot run these single kernels; None if they can."""
    if (reason := dispatch.gap("mosaic_gpu", jnp.float32, 0)) is not None:
        return reason
    from . import _memory  # Pallas is only imported where it is used

    if platform in ("gpu", "cuda") or _memory.is_interpreted():
        return None
    return f"it is a kernel for NVIDIA GPUs, and the devices of the mesh are of platform {platform}"


def _wants_kernel(
    implementation: str | None,
    x: Float[Array, ...],
    format: Format,
    size: int,
    result: DTypeLike | None = None,
) -> bool:
    """Return whether `implementation` names the kernel; raise if the kernel cannot be used.

    Args:
        implementation: the name that the caller gave.
        x: this device's array.
        format: wire format.
        size: the largest number of elements that the kernel reads or writes.
        result: dtype of the result; None for that of `x`.

    Raises:
        ValueError: `implementation` is unknown.
        NotImplementedError: the kernel is named and cannot do this.
    """
    if implementation not in (None, "xla", "mosaic_gpu"):
        raise ValueError(
            f'`implementation` must be "xla", "mosaic_gpu" or None; got {implementation!r}.'
        )
    if implementation != "mosaic_gpu":
        return False
    dtypes = (x.dtype, x.dtype if result is None else jnp.dtype(result))
    reasons = [dispatch.gap("mosaic_gpu", dtype, size) for dtype in dtypes]
    reason = reasons[0] or reasons[1] or exchange_gap(format)
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
