"""The operations of `_columns` as kernels for TPUs, in which a loop handles one block at a time.

XLA compiles an operation on columns as five to ten fusions, each unrolled over many tiles, and does
so anew for every shape. In a kernel, a grid walks over a message, 128 columns and a chunk of blocks
at a time, and a loop walks over the blocks of a chunk. A block, which is a matrix of `b` x 128, is
read, rotated, rounded and packed; or it is decoded, added up and rotated back. A kernel has a
thirtieth of the instructions of the fusions.

In a message, the rows of scales follow those of codes. A kernel that writes a message keeps scales
in the core's memory until the last step of its grid writes them. A kernel that reads a message gets
it as two operands: one is read by blocks of codes, the other by blocks of scales.

The bits are those of `_columns`, except that a sum of products may be rounded in another order.
None of these kernels was ever executed on a TPU; they are tested in Pallas' interpreter.

Letters in shapes: n = messages that are added up; p = pieces; k = blocks in a column; b = numbers
in a block; t = rows in a message; r = columns of a message; h = rows of codes in a block. A step of
the grid sees 128 columns.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, DTypeLike, Float, Float32, Int32, UInt8, UInt32

from . import _blockwise as blocks
from ._column_walk import LANES, Rows, Walk
from ._format import Format
from ._reference import to_dtype

_MATRIX = 128  # rows of the matrix of a rotation: four groups


@functools.partial(jax.jit, static_argnames=("format", "walk", "divisor", "interpret"))
def quantize(
    pieces: Float[Array, "p rows w"],
    seed: UInt32[Array, ""],
    *,
    format: Format,
    walk: Walk,
    divisor: int = 1,
    interpret: bool = False,
) -> UInt8[Array, "p t r"]:
    """Encode each piece, a matrix that is divided by `divisor`, as a message in columns."""
    num, rows, _ = pieces.shape
    target = Rows(format, walk.num_blocks)

    def kernel(seed_ref: Any, matrix_ref: Any, x_ref: Any, out_ref: Any, scales_ref: Any) -> None:
        # Outside of `block`: in a loop the interpreter does not know `pl.program_id`.
        first_row = pl.program_id(1) * LANES

        def block(i: Int32[Array, ""]) -> Float32[Array, "b 128"]:
            x_rb = x_ref[0, :, _range(i, format.block)]
            if rows % LANES:
                row = first_row + lax.broadcasted_iota(jnp.int32, x_rb.shape, 0)
                x_rb = jnp.where(row < rows, x_rb, jnp.zeros_like(x_rb))
            return x_rb.astype(jnp.float32).T

        matrix = matrix_ref[...] if format.hadamard else None
        _write(block, matrix, pieces.dtype, out_ref, scales_ref, seed_ref, target, walk, divisor)

    last = walk.num_chunks - 1
    x_block = (1, LANES, walk.chunk * format.block)
    return pl.pallas_call(
        kernel,
        grid=(num, math.ceil(rows / LANES), walk.num_chunks + 1),
        in_specs=[
            _SEED,
            _MATRIX_SPEC,
            pl.BlockSpec(x_block, lambda p, r, c: (p, r, jnp.minimum(c, last))),
        ],
        **_message(num, rows, target, walk),
        scratch_shapes=[_memory(target)],
        compiler_params=_PARAMETERS,
        interpret=interpret,
        name="quantize_columns",
    )(seed.reshape(1, 1), _hadamard(), pieces)


@functools.partial(jax.jit, static_argnames=("format", "walk", "rows", "dtype", "interpret"))
def dequantize_sum(
    message: UInt8[Array, "n p t r"],
    *,
    format: Format,
    walk: Walk,
    rows: int,
    dtype: DTypeLike,
    interpret: bool = False,
) -> Float[Array, "p rows w"]:
    """Decode the `n` messages of each piece, and add them up; a piece has `rows` rows."""
    num, pieces, _, _ = message.shape
    source = Rows(format, walk.num_blocks)

    def kernel(
        matrix_ref: Any, codes_ref: Any, sent_ref: Any, out_ref: Any, scales_ref: Any
    ) -> None:
        _read_scales(sent_ref, scales_ref)
        matrix = matrix_ref[...] if format.hadamard else None
        first = pl.program_id(2) * walk.chunk

        def block(i: Int32[Array, ""], _: None) -> None:
            total = _sum(codes_ref, scales_ref, i, first + i, source, matrix, dtype)
            out_ref[0, :, _range(i, format.block)] = total.T.astype(dtype)

        lax.fori_loop(0, walk.chunk, block, None)

    width = walk.num_blocks * format.block
    return pl.pallas_call(
        kernel,
        grid=(pieces, math.ceil(rows / LANES), walk.num_chunks),
        in_specs=[
            _MATRIX_SPEC,
            *_source_specs(num, source, walk, lambda p, r, c: (p, c, r)),
        ],
        out_specs=pl.BlockSpec((1, LANES, walk.chunk * format.block), lambda p, r, c: (p, r, c)),
        out_shape=jax.ShapeDtypeStruct((pieces, rows, width), dtype),
        scratch_shapes=[_memory(source, num)],
        compiler_params=_PARAMETERS,
        interpret=interpret,
        name="dequantize_sum_columns",
    )(_hadamard(), message, message)


@functools.partial(
    jax.jit,
    static_argnames=(
        "source",
        "target",
        "walk",
        "num",
        "rows",
        "source_blocks",
        "divisor",
        "interpret",
    ),
)
def dequantize_sum_requantize(
    message: UInt8[Array, "n cut t r"],
    seed: UInt32[Array, ""],
    *,
    source: Format,
    target: Format,
    walk: Walk,
    num: int,
    rows: int,
    source_blocks: int,
    divisor: int = 1,
    interpret: bool = False,
) -> UInt8[Array, "num t2 r2"]:
    """Sum messages, divide the sum by `divisor`, and encode `num` pieces of it as messages.

    Args:
        message: of each of `n` senders, a message for each piece (`cut` is `num`), or one for all
            (`cut` is 1): a piece is then some blocks of each column, or a multiple of 128 columns.
        walk: how the grid walks over a piece.
        rows: rows of a piece; source_blocks: blocks in a column of `message`.
    """
    senders, cut, _, _ = message.shape
    read, write = Rows(source, source_blocks), Rows(target, walk.num_blocks)

    def place(p: Any, r: Any, c: Any) -> tuple[Any, Any, Any]:
        c = jnp.minimum(c, walk.num_chunks - 1)
        if cut > 1:
            return p, c, r
        if source_blocks > walk.num_blocks:
            return 0, p * walk.num_chunks + c, r
        return 0, c, p * (rows // LANES) + r

    def kernel(
        seed_ref: Any,
        matrix_ref: Any,
        codes_ref: Any,
        sent_ref: Any,
        out_ref: Any,
        read_ref: Any,
        scales_ref: Any,
    ) -> None:
        _read_scales(sent_ref, read_ref)
        to_read, to_write = (matrix_ref[...] if x.hadamard else None for x in (source, target))
        _, chunk, _ = place(pl.program_id(0), 0, pl.program_id(2))

        def block(i: Int32[Array, ""]) -> Float32[Array, "b 128"]:
            k = chunk * walk.chunk + i
            return _sum(codes_ref, read_ref, i, k, read, to_read, jnp.float32)

        _write(block, to_write, jnp.float32, out_ref, scales_ref, seed_ref, write, walk, divisor)

    return pl.pallas_call(
        kernel,
        grid=(num, math.ceil(rows / LANES), walk.num_chunks + 1),
        in_specs=[_SEED, _MATRIX_SPEC, *_source_specs(senders, read, walk, place)],
        **_message(num, rows, write, walk),
        scratch_shapes=[_memory(read, senders), _memory(write)],
        compiler_params=_PARAMETERS,
        interpret=interpret,
        name="dequantize_sum_requantize_columns",
    )(seed.reshape(1, 1), _hadamard(), message, message)


_SEED = pl.BlockSpec(memory_space=pltpu.SMEM)
_MATRIX_SPEC = pl.BlockSpec((_MATRIX, _MATRIX), lambda p, r, c: (0, 0))
# Steps of the last dim of a grid share scales.
_PARAMETERS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


def _hadamard() -> Float[Array, "128 128"]:
    """Return a matrix of four Hadamard matrices along its diagonal, exact in bfloat16."""
    return jnp.asarray(blocks.hadamard(_MATRIX), jnp.bfloat16)


def _message(num: int, rows: int, target: Rows, walk: Walk) -> dict[str, Any]:
    """Return the output arguments of `pl.pallas_call` for `num` messages, written by chunks."""
    lanes = math.ceil(rows / LANES) * LANES
    shape = (num, target.of_codes + target.of_scales, lanes)
    block = (1, walk.chunk * target.of_block, LANES)
    return {
        "out_shape": jax.ShapeDtypeStruct(shape, jnp.uint8),
        "out_specs": pl.BlockSpec(block, lambda p, r, c: (p, c, r)),
    }


def _source_specs(num: int, source: Rows, walk: Walk, place: Any) -> list[pl.BlockSpec]:
    """Return the specs of the two blocks of `num` messages that a grid step reads: codes, scales.

    `place` maps the three indices of the step to those of a piece, a chunk and 128 columns.
    """
    block = (num, 1, walk.chunk * source.of_block, LANES)
    end = source.num_blocks // walk.chunk

    def scales(p: Any, r: Any, c: Any) -> tuple[Any, ...]:
        piece, _, lanes = place(p, r, c)
        return 0, piece, end, lanes

    return [pl.BlockSpec(block, lambda p, r, c: (0, *place(p, r, c))), pl.BlockSpec(block, scales)]


def _memory(rows: Rows, *num: int) -> Any:
    """Return the scratch shape, in VMEM, of scales in 128 columns: one byte in each int32."""
    return pltpu.VMEM((*num, rows.of_scales, LANES), jnp.int32)


def _range(i: Int32[Array, ""], size: int) -> Any:
    return pl.ds(pl.multiple_of(i * size, size), size)


def _write(
    block: Any,
    matrix: Float[Array, "128 128"] | None,
    dtype: DTypeLike,
    out_ref: Any,
    scales_ref: Any,
    seed_ref: Any,
    target: Rows,
    walk: Walk,
    divisor: int,
) -> None:
    """Encode and write the blocks of a chunk; in the last step of a piece, write its scales.

    `block(i)` returns block `i` of the chunk, whose numbers are exact in `dtype`.
    """
    chunk, first_row, format = pl.program_id(2), pl.program_id(1) * LANES, target.format

    @pl.when(chunk == 0)
    def _fill_up():
        scales_ref[...] = jnp.zeros_like(scales_ref)

    @pl.when(chunk < walk.num_chunks)
    def _codes():
        def body(i: Int32[Array, ""], _: None) -> None:
            k = chunk * walk.chunk + i
            x_br, is_kept = block(i), None
            if matrix is not None:
                is_kept = blocks.has_zero(x_br, 0)
                # Still exact in `dtype`, so that bfloat16 numbers need one product, not three.
                parts = blocks.bfloat16_parts((x_br * (1 / blocks.GROUP)).astype(dtype))
                x_br = jnp.where(is_kept, x_br, _rotated(parts, matrix))
            codes, scale = _encoded(x_br, k, first_row, seed_ref[0, 0], target, divisor)
            scale = scale if is_kept is None else jnp.where(is_kept, -scale, scale)
            out_ref[0, _range(i, target.of_block), :] = codes.astype(jnp.uint8)
            bits = lax.bitcast_convert_type(scale, jnp.uint32)
            for plane in range(format.scale_bytes):
                byte = bits >> jnp.uint32(8 * (4 - format.scale_bytes + plane))
                row = pl.ds(plane * target.num_blocks + k, 1)
                scales_ref[row, :] = (byte & jnp.uint32(255)).astype(jnp.int32)

        lax.fori_loop(0, walk.chunk, body, None)

    @pl.when(chunk == walk.num_chunks)
    def _scales():
        out_ref[0, : target.of_scales, :] = scales_ref[...].astype(jnp.uint8)


def _encoded(
    x_br: Float32[Array, "b 128"],
    k: Int32[Array, ""],
    first_row: Int32[Array, ""],
    seed: UInt32[Array, ""],
    target: Rows,
    divisor: int,
) -> tuple[Int32[Array, "h 128"], Float32[Array, "1 128"]]:
    """Encode block `k` of each column: return its codes, a byte in each int32, and its scales.

    The first of the 128 columns is row `first_row` of the piece.
    """
    format, width = target.format, target.num_blocks * target.format.block
    largest = jnp.max(jnp.abs(x_br), axis=0, keepdims=True)
    scale = blocks.scales(largest, format.limit, format.scale_dtype, divisor)
    u_br = None
    if format.rounding == "stochastic":
        b, r = (lax.broadcasted_iota(jnp.int32, x_br.shape, dim) for dim in (0, 1))
        index = (first_row + r) * width + k * format.block + b
        u_br = blocks.uniforms_at(index.astype(jnp.uint32), x_br, scale, seed)
    inverse = blocks.inverse(scale, format.scale_dtype, divisor)
    scaled_br = jnp.clip(x_br * inverse, -format.limit, format.limit)
    codes = blocks.round_to_integer(scaled_br, u_br).astype(jnp.int32)
    if format.bits == 8:
        return codes & 255, scale
    half = format.block // 2
    return (codes[:half] & 15) | ((codes[half:] & 15) << 4), scale


def _read_scales(sent_ref: Any, scales_ref: Any) -> None:
    """Copy the bytes of the scales from `sent_ref` to VMEM, in the first step for 128 columns."""

    @pl.when(pl.program_id(2) == 0)
    def _keep():
        num, rows, _ = scales_ref.shape

        def body(i: Int32[Array, ""], _: None) -> None:
            scales_ref[i] = sent_ref[i, 0, :rows].astype(jnp.int32)

        lax.fori_loop(0, num, body, None)


def _sum(
    codes_ref: Any,
    scales_ref: Any,
    i: Int32[Array, ""],
    k: Int32[Array, ""],
    source: Rows,
    matrix: Float[Array, "128 128"] | None,
    dtype: DTypeLike,
) -> Float32[Array, "b 128"]:
    """Decode block `k` of a column in each message, and sum over messages.

    `codes_ref` holds a chunk, whose block `i` this is. Rotated blocks are rotated back by `matrix`,
    if given. Each message's numbers are rounded to `dtype` before they are added.
    """

    def decoded(sender: Any) -> Float32[Array, "b 128"]:
        packed = codes_ref[sender, 0, _range(i, source.of_block), :].astype(jnp.int32)
        x = _unpacked(packed, source.format.bits).astype(jnp.float32)
        scale = _scale(scales_ref, sender, k, source)
        if matrix is not None:
            x = jnp.where(scale < 0, x, _rotated([x.astype(jnp.bfloat16)], matrix))
            scale = jnp.abs(scale)
        return to_dtype(x * scale, dtype).astype(jnp.float32)

    num = scales_ref.shape[0]
    return lax.fori_loop(1, num, lambda sender, total: total + decoded(sender), decoded(0))


def _unpacked(packed: Int32[Array, "h 128"], bits: int) -> Int32[Array, "b 128"]:
    """Return codes as int32, one for each number, with their sign."""
    if bits == 8:
        return (packed << 24) >> 24
    return jnp.concatenate(((packed << 28) >> 28, (packed << 24) >> 28))


def _rotated(
    parts_br: list[BFloat16[Array, "b 128"]], matrix: Float[Array, "128 128"]
) -> Float32[Array, "b 128"]:
    """Multiply each 128 rows of the sum of `parts_br` by `matrix`."""
    plain = (((1,), (0,)), ((), ()))

    def product(i: int) -> Float32[Array, "128 128"]:
        x = [part[i : i + _MATRIX] for part in parts_br]
        wide: dict[str, Any] = {"preferred_element_type": jnp.float32}
        return functools.reduce(jnp.add, [lax.dot_general(matrix, y, plain, **wide) for y in x])

    return jnp.concatenate([product(i) for i in range(0, len(parts_br[0]), _MATRIX)])


def _scale(
    scales_ref: Any, sender: Any, k: Int32[Array, ""], source: Rows
) -> Float32[Array, "1 128"]:
    """Return the scales of block `k` in 128 columns of the message of `sender`."""
    size, bits = source.format.scale_bytes, jnp.int32(0)
    for plane in range(size):
        byte = scales_ref[sender, pl.ds(plane * source.num_blocks + k, 1), :]
        bits = bits | (byte << (8 * (4 - size + plane)))
    return lax.bitcast_convert_type(bits, jnp.float32)
