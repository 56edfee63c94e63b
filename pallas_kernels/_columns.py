"""Encode arrays, on TPUs, as messages `[messages, t, columns]`, in which a column holds a row.

An array is cut into pieces, and each piece becomes a message. The blocks of a piece lie along its
rows. A TPU keeps the last two dims of an array in tiles, and computes with rows of 128 lanes. So a
piece `[rows, width]` is transposed: row `j` of the piece is column `j` of the message. The numbers
of a block are then below each other, and 128 blocks are side by side. Maxima, products with
a scale and the packing of codes are operations between whole rows of lanes, and no number leaves
its lane. If blocks were along the lanes, nearly all numbers would move. XLA writes and reads the
decoded array (a weight, a gradient) transposed, as it does for matrix products. If a piece has
few rows, each row is cut into parts, and the columns are part 0 of all rows, then part 1 and so on.

The first rows of a message are codes: 8-bit codes in the order of the piece's columns, 4-bit codes
in pairs, `i` and `i + b/2` of a block in one byte. Then follow byte 0 of the scales, byte 1 and so
on, filled up with zeros to tiles of 32 rows. Decoded numbers equal those of `_reference`, whose
messages are rows of bytes.

Letters in shapes: n = messages; k = blocks in a column; b = numbers in a block; r = columns; h =
bytes that hold the codes of a block; t = rows in a message.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Shaped, UInt8, UInt32

from . import _blockwise as blocks
from . import _reference
from ._column_walk import LANES, TILE_ROWS
from ._format import Format

_MATRIX = 128  # rows of the matrix of a rotation: four groups


def num_parts(shape: tuple[int, ...], format: Format) -> int:
    """Return into how many parts each row of a piece of `shape` is cut, to fill the lanes.

    A part is some whole blocks. If a piece has many rows, the result is 1. If too many of the 128
    lanes are empty with any number of parts, it is 0: the messages cannot be columns.
    """
    rows, width = math.prod(shape[:-1]), shape[-1]
    if not rows or not width or width % format.block:
        return 0
    num_blocks = width // format.block
    choices = (2**i for i in range(LANES.bit_length()) if num_blocks % 2**i == 0)
    return next((num for num in choices if _fills_lanes(num * rows)), 0)


def _fills_lanes(num: int) -> bool:
    """Return whether `num` columns leave at most an eighth of the lanes empty."""
    return 8 * (_lanes(num) - num) <= _lanes(num)


def _lanes(num: int) -> int:
    """Return `num` rounded up to a multiple of the 128 lanes."""
    return math.ceil(num / LANES) * LANES


def to_blocks(pieces: Float[Array, "n ..."], format: Format) -> Float[Array, "n k b r"]:
    """Transpose pieces, cut their columns into blocks, and add columns of zeros to fill lanes."""
    num, *shape = pieces.shape
    parts = num_parts(tuple(shape), format)
    rows, width = math.prod(shape[:-1]), shape[-1] // parts
    if parts == 1:  # padded before the transpose, since XLA transposes whole tiles
        missing = _lanes(rows) - rows
        x = jnp.pad(pieces.reshape(num, rows, width), ((0, 0), (0, missing), (0, 0)))
        columns = jnp.swapaxes(x, 1, 2)
    else:
        columns = jnp.transpose(pieces.reshape(num, rows, parts, width), (0, 3, 2, 1))
        columns = _filled(columns.reshape(num, width, parts * rows))
    return columns.reshape(num, width // format.block, format.block, columns.shape[2])


def _filled(columns: Shaped[Array, "*dims r"]) -> Shaped[Array, "*dims lanes"]:
    """Pad the last dim with zeros to a multiple of the 128 lanes."""
    *dims, num = columns.shape
    return jnp.pad(columns, [(0, 0)] * len(dims) + [(0, _lanes(num) - num)])


def from_blocks(x_nkbr: Shaped[Array, "n k b r"], shape: tuple[int, ...]) -> Shaped[Array, "n ..."]:
    """Join blocks to the pieces of `shape` that they were cut from; the reverse of `to_blocks`."""
    num, num_blocks, block, lanes = x_nkbr.shape
    rows, width = math.prod(shape[:-1]), num_blocks * block
    parts = shape[-1] // width
    columns = x_nkbr.reshape(num, width, lanes)
    if parts == 1:
        x = jnp.swapaxes(columns, 1, 2)[:, :rows]
    else:
        x = columns[:, :, : parts * rows].reshape(num, width, parts, rows)
        x = jnp.transpose(x, (0, 3, 2, 1))
    return x.reshape(num, *shape)


def encode(
    x_nkbr: Float[Array, "n k b r"],
    format: Format,
    shape: tuple[int, ...],
    *,
    seed: UInt32[Array, ""],
    divisor: int = 1,
) -> UInt8[Array, "n t r"]:
    """Encode blocks, divided by `divisor`, as messages, each of a piece of `shape`."""
    is_kept_nkr = None
    if format.hadamard:
        rotated = _rotated(x_nkbr, 1 / blocks.GROUP)
        x_nkbr = blocks.to_float32(x_nkbr)
        is_kept = blocks.has_zero(x_nkbr, 2)
        x_nkbr, is_kept_nkr = jnp.where(is_kept, x_nkbr, rotated), is_kept[:, :, 0]
    x_nkrb = jnp.swapaxes(blocks.to_float32(x_nkbr), 2, 3)
    index = _index(x_nkrb.shape, shape) if format.rounding == "stochastic" else None
    codes_nkrb, scale_nkr = _reference.round_blocks(
        x_nkrb, format, seed, divisor=divisor, index_kb=index
    )
    if is_kept_nkr is not None:
        scale_nkr = jnp.where(is_kept_nkr, -scale_nkr, scale_nkr)
    codes_nkhr = _packed(jnp.swapaxes(codes_nkrb, 2, 3), format.bits)
    num, num_blocks, size, rows = codes_nkhr.shape
    scales = _scale_bytes(scale_nkr, format)
    missing = jnp.zeros((num, -scales.shape[1] % TILE_ROWS, rows), jnp.uint8)
    codes = codes_nkhr.reshape(num, num_blocks * size, rows)
    return lax.concatenate((codes, scales, missing), 1)


def decode(
    message: UInt8[Array, "n t r"], format: Format, shape: tuple[int, ...], dtype: DTypeLike
) -> Float[Array, "n k b r"]:
    """Decode messages, each of a piece of `shape`, to blocks of numbers of `dtype`."""
    x_nkbr, scale_nk1r = _read(message, format, shape)
    # Rotated before the product with scales: codes are exact in bfloat16, and so are their sums.
    if format.hadamard:
        rotated = _rotated(x_nkbr.astype(jnp.bfloat16), 1.0)
        x_nkbr, scale_nk1r = jnp.where(scale_nk1r < 0, x_nkbr, rotated), jnp.abs(scale_nk1r)
    return _reference.to_dtype(x_nkbr * scale_nk1r, dtype)


def _read(
    message: UInt8[Array, "n t r"], format: Format, shape: tuple[int, ...]
) -> tuple[Float32[Array, "n k b r"], Float32[Array, "n k 1 r"]]:
    """Return the codes of messages as numbers, not yet scaled, and the scales with their sign."""
    num, _, rows = message.shape
    width = shape[-1] // num_parts(shape, format)
    num_blocks, size = width // format.block, format.code_bytes(format.block)
    codes = lax.slice_in_dim(message, 0, num_blocks * size, axis=1)
    codes_nkbr = _unpacked(codes.reshape(num, num_blocks, size, rows), format.bits)
    scale_nkr = _read_scales(message, num_blocks * size, num_blocks, format)
    return _reference.from_codes(codes_nkbr, format), scale_nkr[:, :, None]


def decode_sum(
    message: UInt8[Array, "n t r"], format: Format, shape: tuple[int, ...]
) -> Float32[Array, "1 k b r"]:
    """Decode messages, each of an array of `shape`, and return the blocks of their sum."""
    return _sum(message[:, None], format, shape)


def decode_sum_and_cut(
    message: UInt8[Array, "n t r"], format: Format, shape: tuple[int, ...], dim: int, num: int
) -> Float32[Array, "num k b columns"]:
    """Decode and sum messages, and return the blocks of `num` pieces of the sum.

    The sum, of `shape`, is cut along `dim`. The rows of the sum and of a piece must not be cut into
    parts (`num_parts` is 1).
    """
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim:-1]) // num
    if dim == len(shape) - 1:
        total = decode_sum(message, format, shape)[0]
        return total.reshape(num, total.shape[0] // num, *total.shape[1:])
    if outer == 1:  # the messages are cut, which are a quarter of the sum's bytes or less
        return _sum(cut_columns(message, num, inner), format, (inner, shape[-1]))
    num_blocks, block, _ = (total := decode_sum(message, format, shape)[0]).shape
    x = total[:, :, : outer * num * inner].reshape(num_blocks, block, outer, num, inner)
    return _filled(jnp.moveaxis(x, 3, 0).reshape(num, num_blocks, block, outer * inner))


def cut_columns(
    message: UInt8[Array, "n t r"], num: int, size: int
) -> UInt8[Array, "n num t lanes"]:
    """Cut each message into the messages of `num` pieces, of `size` columns each, padded."""
    ends = range(size, num * size + 1, size)
    cut = [lax.slice_in_dim(message, end - size, end, axis=2) for end in ends]
    return jnp.stack([_filled(x) for x in cut], axis=1)


def _sum(
    message: UInt8[Array, "n p t r"], format: Format, shape: tuple[int, ...]
) -> Float32[Array, "p k b r"]:
    """Decode the messages of each of `p` pieces of `shape`, and sum them over the `n` senders.

    If the format rotates, a TPU rotates each message back: its matrix unit multiplies codes exactly
    in one pass. Other platforms rotate back only the sum, which is float32; a TPU would need three
    passes for that, and longer to compile.
    """
    if not format.hadamard:
        decoded = functools.partial(decode, format=format, shape=shape, dtype=jnp.float32)
        return _sum_of(decoded, message)
    return lax.platform_dependent(
        message,
        tpu=functools.partial(_sum_of_decoded, format=format, shape=shape),
        default=functools.partial(_sum_rotated_after, format=format, shape=shape),
    )


def _sum_of(
    decoded: Callable[[UInt8[Array, "p t r"]], Float32[Array, "p k b r"]],
    message: UInt8[Array, "n p t r"],
) -> Float32[Array, "p k b r"]:
    """Apply `decoded` to the messages of each sender, and sum the results over senders."""
    if len(message) > blocks.ADDED:
        return blocks.add_up(jax.vmap(decoded)(message))
    # Messages are cut apart before they are decoded: XLA then fuses decoding with the additions,
    # where otherwise it would write every decoded message to memory in float32.
    senders = (lax.index_in_dim(message, i, keepdims=False) for i in range(len(message)))
    return functools.reduce(jnp.add, map(decoded, senders))


def _sum_of_decoded(
    message: UInt8[Array, "n p t r"], format: Format, shape: tuple[int, ...]
) -> Float32[Array, "p k b r"]:
    num, pieces, *rest = message.shape
    x = decode(message.reshape(num * pieces, *rest), format, shape, jnp.float32)
    return blocks.add_up(x.reshape(num, pieces, *x.shape[1:]))


def _sum_rotated_after(
    message: UInt8[Array, "n p t r"], format: Format, shape: tuple[int, ...]
) -> Float32[Array, "p k b r"]:
    def scaled(message: UInt8[Array, "p t r"], rotated: bool) -> Float32[Array, "p k b r"]:
        x_pkbr, scale_pk1r = _read(message, format, shape)
        x_pkbr = x_pkbr * blocks.scales_of(scale_pk1r, rotated=rotated)
        return _reference.to_dtype(x_pkbr, jnp.float32)

    rotated, kept = (_sum_of(functools.partial(scaled, rotated=x), message) for x in (True, False))
    return _rotated(rotated, 1.0) + kept


def _index(shape: tuple[int, ...], piece: tuple[int, ...]) -> UInt32[Array, "n k r b"]:
    """Return the index of each number in its flattened piece, for stochastic rounding.

    `shape` is that of the result: of blocks whose last two dims are swapped. `piece` is the shape
    of a piece. In columns of padding the indices have no meaning.
    """
    k, column, b = (lax.broadcasted_iota(jnp.uint32, shape, dim) for dim in (1, 2, 3))
    rows = jnp.uint32(math.prod(piece[:-1]))
    width, block = jnp.uint32(shape[1] * shape[3]), jnp.uint32(shape[3])
    return column % rows * jnp.uint32(piece[-1]) + column // rows * width + k * block + b


def _rotated(x_nkbr: Float[Array, "n k b r"], factor: float) -> Float32[Array, "n k b r"]:
    """Multiply each group of 32 numbers by Hadamard's matrix, and by `factor`, a power of two."""
    num, _, block, rows = x_nkbr.shape
    width = min(block, _MATRIX)
    matrix = blocks.hadamard(width) * np.float32(factor)
    x = x_nkbr.reshape(num, x_nkbr.shape[1] * block // width, width, rows)
    rotated = lax.platform_dependent(
        x,
        tpu=functools.partial(_product_in_parts, matrix),
        default=functools.partial(_product, matrix),
    )
    return rotated.reshape(x_nkbr.shape)


def _product(
    matrix: Float32[np.ndarray, "w w"], x_nkwr: Float[Array, "n k w r"]
) -> Float32[Array, "n k w r"]:
    x_nkrw = jnp.swapaxes(x_nkwr.astype(jnp.float32), 2, 3)
    product = jnp.matmul(x_nkrw, jnp.asarray(matrix), precision=lax.Precision.HIGHEST)
    return jnp.swapaxes(product, 2, 3)


def _product_in_parts(
    matrix: Float32[np.ndarray, "w w"], x_nkwr: Float[Array, "n k w r"]
) -> Float32[Array, "n k w r"]:
    """Multiply each group of `x_nkwr` by `matrix` on a TPU: in bfloat16, summed in float32.

    The matrix is exact in bfloat16, and a float32 is the sum of three bfloat16 parts, so all
    products are exact. XLA by itself would also cut the matrix into parts, of which all but one are
    zero, and take four times as long to compile.
    """
    wide = (((2,), (0,)), ((), ()))
    products = [
        lax.dot_general(
            part,
            jnp.asarray(matrix, jnp.bfloat16),
            wide,
            preferred_element_type=jnp.float32,
        )
        for part in blocks.bfloat16_parts(x_nkwr)
    ]
    return jnp.moveaxis(functools.reduce(jnp.add, products), -1, 2)


def _packed(codes_nkbr: UInt8[Array, "n k b r"], bits: int) -> UInt8[Array, "n k h r"]:
    if bits == 8:
        return codes_nkbr
    half = codes_nkbr.shape[2] // 2
    low, high = codes_nkbr[:, :, :half], codes_nkbr[:, :, half:]
    return (low & jnp.uint8(15)) | (high << jnp.uint8(4))


def _unpacked(packed_nkhr: UInt8[Array, "n k h r"], bits: int) -> UInt8[Array, "n k b r"]:
    """Unpack the `h` bytes that hold the codes of a block into `b` codes of one byte each.

    Codes of 8 bits are returned as they are. Codes of 4 bits, two in a byte (`h` is `b / 2`), are
    integers with a sign, which is extended to 8 bits.
    """
    if bits == 8:
        return packed_nkhr
    num, num_blocks, half, rows = packed_nkhr.shape
    # Both halves by one shift with a broadcast array: XLA would not fuse a concatenation of two
    # shifted arrays with the operations that follow.
    shifts = jnp.asarray([28, 24], jnp.int32).reshape(1, 1, 2, 1, 1)
    wide = packed_nkhr.astype(jnp.int32)[:, :, None]
    codes = (wide << shifts) >> jnp.int32(28)
    return lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8).reshape(
        num, num_blocks, 2 * half, rows
    )


def _scale_bytes(scale_nkr: Float32[Array, "n k r"], format: Format) -> UInt8[Array, "n _ r"]:
    """Return byte 0 of all scales, then byte 1 of all, and so on; a bfloat16 scale has two."""
    bits = lax.bitcast_convert_type(scale_nkr, jnp.uint32)
    first = 4 - format.scale_bytes
    return lax.concatenate(
        [(bits >> jnp.uint32(8 * i)).astype(jnp.uint8) for i in range(first, 4)], 1
    )


def _read_scales(
    message: UInt8[Array, "n t r"], start: int, num_blocks: int, format: Format
) -> Float32[Array, "n k r"]:
    """Read scales from messages, whose rows of scales begin at `start`; undoes `_scale_bytes`."""
    first, bits = 4 - format.scale_bytes, jnp.uint32(0)
    for i in range(format.scale_bytes):
        begin = start + i * num_blocks
        plane = lax.slice_in_dim(message, begin, begin + num_blocks, axis=1)
        bits = bits | (plane.astype(jnp.uint32) << jnp.uint32(8 * (first + i)))
    return lax.bitcast_convert_type(bits, jnp.float32)
