"""Quantize and dequantize by the implementation that a caller names, or by the default.

The default (`None`) can do everything. A named implementation that cannot do an operation raises an
error with the reason before anything is traced. Whether there is a GPU is not checked here, because
a program may be traced on one machine for another; JAX checks it when it compiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float32, Integer, UInt8, UInt32

from . import _reference
from ._config import DEFAULT, Implementation
from ._format import Format
from ._in_place import InPlace, Place, cut_out

_OLDEST = (0, 11, 2)  # older Mosaic GPU and its interpreter lack operations of the kernels
_FLOATS = ("bfloat16", "float16", "float32")
_KERNEL_KINDS = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")  # that `_tile` writes and reads


def quantize(
    x: Float[Array, "o n i"],
    format: Format,
    *,
    seed: Integer[Array, ""] | int | None = None,
    divisor: int = 1,
    place: Place | None = None,
    implementation: Implementation | None = None,
) -> UInt8[Array, "n _"]:
    """Write each piece of an array as a message.

    Args:
        x: array of `n` pieces along its middle dim; piece `p` is `x[:, p].reshape(-1)`. To encode
            the rows of an array `y` [n, i], pass `y[None]`.
        format: format of the messages.
        seed: seed of stochastic rounding; None means 0.
        divisor: number that `x` is divided by. The quotient is rounded only once, when it is
            encoded.
        place: columns of a larger array to write the messages into; kernels do so without a copy.
        implementation: "xla", or "mosaic_gpu": a kernel, which reads `x` once and
            writes the messages once. It compiles for an H200, and was never executed on a GPU.

    Returns:
        The messages; with `place`, the larger array.

    Raises:
        NotImplementedError: the named implementation cannot do this, with its reasons.
        ValueError: the messages do not fit into `place`.

    References:
        ZeRO++ (https://arxiv.org/abs/2306.10209), blockwise quantization.
    """
    module = _implementation(implementation, "quantize", [format], x.dtype, x.size)
    outer, pieces, inner = x.shape
    _check(place, pieces, format.num_bytes(outer * inner))
    if module is not _reference:
        return module.quantize(x, format, as_uint32(seed), divisor, place=place)
    message = module.quantize(x, format, as_uint32(seed), divisor)
    return message if place is None else place.put(message)


def dequantize(
    message: UInt8[Array, "n m"] | InPlace,
    format: Format,
    *,
    outer: int,
    inner: int,
    dtype: DTypeLike,
    implementation: Implementation | None = None,
) -> Float[Array, "o n i"]:
    """Decode messages into the array that they were made from; the reverse of `quantize`.

    Args:
        message: the message of each piece, such as an all-gather returns. A kernel reads columns
            of a larger array (`InPlace`) without a copy.
        format: format of the messages.
        outer: product of the dims before the one that was cut. If it is 1, `result[0]` holds the
            pieces as rows, `[n, i]`.
        inner: elements of a piece for each of the `outer` indices.
        dtype: dtype of the result.
        implementation: "xla" or "mosaic_gpu".

    Raises:
        NotImplementedError: the named implementation cannot do this, with its reasons.
    """
    size = len(message) * outer * inner
    module = _implementation(implementation, "dequantize", [format], dtype, size)
    return module.dequantize(_for(module, message), format, outer, inner, jnp.dtype(dtype))


def dequantize_sum(
    message: UInt8[Array, "n m"] | InPlace,
    format: Format,
    *,
    num: int,
    implementation: Implementation | None = None,
) -> Float32[Array, " num"]:
    """Sum the messages of `n` devices, each of `num` numbers, in float32.

    If the format rotates, the sum of rotated blocks is rotated back once, instead of each message.

    Args:
        message: the message of each device, such as an all-to-all returns; or columns of a larger
            array (`InPlace`).
        format: format of the messages.
        num: numbers in a message.
        implementation: "xla" or "mosaic_gpu". Kernels add one message after the other, as "xla"
            does for up to 16; with more, XLA chooses the order.

    Raises:
        NotImplementedError: the named implementation cannot do this, with its reasons.
    """
    size = len(message) * format.num_bytes(num)
    module = _implementation(implementation, "dequantize_sum", [format], jnp.float32, size)
    return module.dequantize_sum(_for(module, message), format, num)


def dequantize_sum_requantize(
    message: UInt8[Array, "n m"] | InPlace,
    source: Format,
    target: Format,
    *,
    shape: tuple[int, int, int],
    seed: Integer[Array, ""] | int | None = None,
    divisor: int = 1,
    place: Place | None = None,
    implementation: Implementation | None = None,
) -> UInt8[Array, "k _"]:
    """Sum messages, and write pieces of the sum as messages: what qgZ does between its two hops.

    A kernel keeps the sum in registers. If the two formats have different block sizes, blocks
    cross pieces, or a format rotates, there are two kernels, and the sum lies in memory between
    them.

    Args:
        message: the message of each device, or columns of a larger array (`InPlace`).
        source: format of `message`.
        target: format of the result.
        shape: shape `[o, k, i]` of the sum; its `k` pieces are written as messages.
        seed: seed of stochastic rounding; None means 0.
        divisor: number that the sum is divided by. The quotient is rounded only once, when it is
            encoded.
        place: columns of a larger array to write the messages into.
        implementation: "xla" or "mosaic_gpu".

    Returns:
        The messages; with `place`, the larger array.

    Raises:
        NotImplementedError: the named implementation cannot do this, with its reasons.
        ValueError: the messages do not fit into `place`.
    """
    num = math.prod(shape)
    size = max(len(message) * source.num_bytes(num), num)
    operation = "dequantize_sum_requantize"
    module = _implementation(implementation, operation, [source, target], jnp.float32, size)
    _check(place, shape[1], target.num_bytes(shape[0] * shape[2]))
    args = (_for(module, message), source, target, shape, as_uint32(seed), divisor)
    if module is not _reference:
        return module.dequantize_sum_requantize(*args, place)
    result = module.dequantize_sum_requantize(*args)
    return result if place is None else place.put(result)


def _check(place: Place | None, rows: int, size: int) -> None:
    """Raise `ValueError` unless `place` has room for `rows` messages of `size` bytes."""
    if place is None:
        return
    is_right = place.array is None or place.array.shape == place.shape
    if not is_right or place.shape[0] != rows or not 0 <= place.start <= place.shape[1] - size:
        array = "" if place.array is None else f", in an array of shape {place.array.shape}"
        raise ValueError(
            f"`place` must have a row for each of {rows} messages, and room for {size} bytes from "
            f"its `start` on; got shape {place.shape}, start {place.start}{array}."
        )


def as_uint32(seed: Integer[Array, ""] | int | None) -> UInt32[Array, ""]:
    """Convert a seed to uint32, the type that the hashes take; None becomes 0."""
    if seed is None or isinstance(seed, int):
        return jnp.uint32((seed or 0) % 2**32)
    return seed.astype(jnp.uint32)


def gap(implementation: Implementation, dtype: DTypeLike, size: int) -> str | None:
    """Return why an implementation cannot handle `size` numbers of type `dtype`; None if it can."""
    if implementation == "xla":
        return None
    if jax.__version_info__ < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        return f"it needs JAX {oldest} or newer, and this is {jax.__version__}"
    if jnp.dtype(dtype).name not in _FLOATS:
        return f"it handles {', '.join(_FLOATS)}, and not {jnp.dtype(dtype)}"
    if size >= 2**31:
        return f"it counts elements in 31 bits, and there are {size}"
    return None


def kind_gap(implementation: Implementation | None, kind: str) -> str | None:
    """Return why an implementation cannot handle codes of a kind; None if it can."""
    if implementation in (None, "xla") or kind in _KERNEL_KINDS:
        return None
    return f"it has kernels for {', '.join(_KERNEL_KINDS)}, and not for {kind}"


def _implementation(
    name: Implementation | None,
    operation: str,
    formats: Sequence[Format],
    dtype: DTypeLike,
    size: int,
) -> Any:
    name = name or DEFAULT
    reasons = [gap(name, dtype, size), *(kind_gap(name, format.kind) for format in formats)]
    if (reason := next(filter(None, reasons), None)) is not None:
        raise NotImplementedError(
            f'`implementation="{name}"` cannot do this `{operation}`: {reason}. Take "xla", or '
            "`None` for what can."
        )
    if name == "xla":
        return _reference
    from . import _mosaic  # here, since Pallas takes most of a second to import

    return _mosaic


def _for(module: Any, message: UInt8[Array, "n m"] | InPlace) -> Any:
    """Return messages as `module` reads them: as an array of their own unless it has kernels."""
    return cut_out(message) if module is _reference else message
