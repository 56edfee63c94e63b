"""Encode and decode messages in columns, by kernels in programs for TPUs and by XLA elsewhere.

A message holds the quantized numbers of a piece of an array, as `_columns` describes. A kernel is
used only for pieces whose rows are not cut into parts, for blocks of 128 to 1024 numbers with
integer codes, and inside a `shard_map` over all axes (`_column_walk`). If the caller names the
implementation "xla", no kernel is used.

Letters in shapes: as in `_columns`.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, UInt8, UInt32

from . import _columns
from ._column_walk import LANES, Rows, Walk, takes
from ._config import Implementation
from ._format import Format


def quantize(
    pieces: Float[Array, "n ..."],
    format: Format,
    seed: UInt32[Array, ""],
    *,
    divisor: int,
    implementation: Implementation | None,
) -> UInt8[Array, "n t r"]:
    """Encode each piece, divided by `divisor`, as a message in columns."""
    num, *shape = pieces.shape

    def in_xla(pieces: Any, seed: Any) -> Any:
        x = _columns.to_blocks(pieces, format)
        return _columns.encode(x, format, tuple(shape), seed=seed, divisor=divisor)

    def by_kernel(pieces: Any, seed: Any) -> Any:
        from . import _column_kernels  # here, since Pallas takes most of a second to import

        matrices = pieces.reshape(num, math.prod(shape[:-1]), shape[-1])
        return _column_kernels.quantize(matrices, seed, format=format, walk=walk, divisor=divisor)

    walk = None
    is_free = implementation is None and _columns.num_parts(tuple(shape), format) == 1
    if is_free and takes(format, dtype=pieces.dtype):
        rows = Rows(format, shape[-1] // format.block)
        read = pieces.dtype.itemsize * format.block * LANES
        size = read + rows.of_block * LANES
        walk = Walk.of(rows.num_blocks, [rows], size, rows.kept_bytes)
    return _choose(walk, by_kernel, in_xla, pieces, seed)


def dequantize(
    message: UInt8[Array, "n t r"],
    format: Format,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    implementation: Implementation | None,
) -> Float[Array, "n ..."]:
    """Decode each message in columns to its piece, of `shape`."""

    def in_xla(message: Any) -> Any:
        return _columns.from_blocks(_columns.decode(message, format, shape, dtype), shape)

    options = {"shape": shape, "dtype": dtype, "implementation": implementation}
    return _decoded(message[None], format, lambda x: in_xla(x[0]), **options)


def dequantize_sum(
    message: UInt8[Array, "n t r"],
    format: Format,
    *,
    shape: tuple[int, ...],
    implementation: Implementation | None,
) -> Float32[Array, "1 ..."]:
    """Decode messages in columns, each of a piece of `shape`, and sum the pieces."""

    def in_xla(message: Any) -> Any:
        return _columns.from_blocks(_columns.decode_sum(message[:, 0], format, shape), shape)

    options = {"shape": shape, "dtype": jnp.float32, "implementation": implementation}
    return _decoded(message[:, None], format, in_xla, **options)


def _decoded(
    message: UInt8[Array, "n p t r"],
    format: Format,
    in_xla: Any,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    implementation: Implementation | None,
) -> Float[Array, "p ..."]:
    num, pieces, _, _ = message.shape

    def by_kernel(message: Any) -> Any:
        from . import _column_kernels

        options = {"rows": math.prod(shape[:-1]), "dtype": jnp.dtype(dtype)}
        x = _column_kernels.dequantize_sum(message, format=format, walk=walk, **options)
        return x.reshape(pieces, *shape)

    walk = None
    is_free = implementation is None and _columns.num_parts(shape, format) == 1
    if is_free and takes(format, dtype=dtype):
        rows = Rows(format, shape[-1] // format.block)
        written = jnp.dtype(dtype).itemsize * format.block * LANES
        # A step reads the codes and the scales of each message, in arrays of equal size.
        size = 2 * num * rows.of_block * LANES + written
        walk = Walk.of(rows.num_blocks, [rows], size, num * rows.kept_bytes)
    return _choose(walk, by_kernel, in_xla, message)


def dequantize_sum_requantize(
    message: UInt8[Array, "n t r"],
    source: Format,
    target: Format,
    seed: UInt32[Array, ""],
    *,
    shape: tuple[int, ...],
    dim: int,
    num: int,
    divisor: int,
    implementation: Implementation | None,
) -> UInt8[Array, "num t2 r2"]:
    """Decode and sum messages, divide the sum by `divisor`, and encode `num` pieces of it.

    The sum has `shape`, and is cut along `dim`. Neither its rows nor those of a piece may be cut
    into parts, and both formats must have the same block size.
    """
    piece = (*shape[:dim], shape[dim] // num, *shape[dim + 1 :])

    def in_xla(message: Any, seed: Any) -> Any:
        pieces = _columns.decode_sum_and_cut(message, source, shape, dim, num)
        return _columns.encode(pieces, target, piece, seed=seed, divisor=divisor)

    rows = math.prod(piece[:-1])
    along_columns = dim == len(shape) - 1
    whole = along_columns or rows % LANES == 0

    def by_kernel(message: Any, seed: Any) -> Any:
        from . import _column_kernels

        cut = message[:, None] if whole else _columns.cut_columns(message, num, rows)
        return _column_kernels.dequantize_sum_requantize(
            cut,
            seed,
            source=source,
            target=target,
            walk=walk,
            num=num,
            rows=rows,
            source_blocks=read.num_blocks,
            divisor=divisor,
        )

    read, written = (Rows(f, x[-1] // f.block) for f, x in ((source, shape), (target, piece)))
    walk = None
    in_order = along_columns or math.prod(shape[:dim]) == 1
    if implementation is None and in_order and takes(source, target):
        size = (2 * len(message) * read.of_block + written.of_block) * LANES
        kept = len(message) * read.kept_bytes + written.kept_bytes
        walk = Walk.of(written.num_blocks, [read, written], size, kept)
    return _choose(walk, by_kernel, in_xla, message, seed)


def _choose(walk: Walk | None, by_kernel: Any, in_xla: Any, *operands: Any) -> Any:
    """Return `by_kernel(*operands)` in programs for TPUs, and `in_xla(*operands)` in others.

    If `walk` is None, the kernel cannot handle the operands, and `in_xla` is called everywhere.
    """
    if walk is None:
        return in_xla(*operands)
    return lax.platform_dependent(*operands, tpu=by_kernel, default=in_xla)
