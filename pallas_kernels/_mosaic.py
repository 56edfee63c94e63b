"""Quantize and dequantize by Mosaic GPU kernels, which read inputs and write outputs once.

One warpgroup handles one tile of blocks in registers, without communication between tiles; the many
warpgroups on a multiprocessor hide memory latency. XLA writes the rest of a row, less than a tile,
into the kernel's output in place. Pieces of an array cut along an inner dim are read and written in
place if runs hold whole blocks; else XLA transposes them. Messages are read from and written to the
operand of a bucketed collective (`_in_place`), unless their start would force shorter vectors.

No two warpgroups write the same memory: every element of the output belongs to one tile, and every
tile to one warpgroup. Inputs are not written. Each warpgroup has its own shared memory, and Mosaic
puts a barrier of that warpgroup around each store.

A GPU's reciprocal (`rcp.approx` in the PTX of Mosaic and of XLA) may be wrong by one unit in the
last place. For bfloat16 scales `_blockwise.refine` corrects it, so that codes are those of a CPU.
For float32 scales it is not corrected: a kernel and XLA still use the same reciprocal on one GPU,
but a number halfway between two codes may be rounded differently on a CPU. Both results are within
the bounds that `tests/codecs/_codec_oracle.py` derives.

Legend: o, n, i as in `_reference`; a run is `i` contiguous elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import DTypeLike, Float, Float32, UInt8, UInt32

from . import _blockwise as blocks
from . import _memory as memory
from . import _reference as reference
from . import _tile as tile
from ._config import TileConfig
from ._format import Format
from ._in_place import InPlace, Place
from ._memory import Window
from ._tile_layout import TileLayout
from ._walk import Walk, plan, readable, writable

_UNROLLED = 16  # sums over at most this many peers are unrolled


def quantize(
    x_oni: Float[Array, "o n i"],
    format: Format,
    seed: UInt32[Array, ""],
    divisor: int = 1,
    place: Place | None = None,
    config: TileConfig | None = None,
) -> UInt8[Array, "n _"]:
    """Quantize each piece to a message; see `_reference.quantize`."""
    outer, pieces, inner = x_oni.shape
    num = outer * inner
    size = format.num_bytes(num)
    there = writable(place, pieces, size, config)
    if there is None:
        return _put(place, quantize(x_oni, format, seed, divisor, None, config))
    walk = plan(x_oni.shape, [format], config, [inner, *there.offsets])
    if walk is None and outer > 1:
        return quantize(reference.to_rows(x_oni)[None], format, seed, divisor, place, config)
    if walk is None:
        return _put(place, reference.quantize(x_oni, format, seed, divisor))
    tile_layout = walk.tile_layout

    def body(x_ref: Any, *refs: Any, **scratch: Any) -> None:
        start, piece, first = _here(walk)
        parts = tile_layout.read(x_ref, start, tile_layout.block, scratch.get("numbers"))
        parts = [x.astype(jnp.float32) for x in parts]
        message = there.start + piece * there.shape[1]
        _write(
            refs[-1], message, first, num, parts, format, tile_layout, refs[:-1], scratch, divisor
        )

    scratch = _scratch(
        tile_layout, numbers=(tile_layout.block, x_oni.dtype), codes=(_bytes(format), jnp.uint8)
    )
    seeds = [seed.reshape(1)] if format.rounding == "stochastic" else []
    array = _fill("quantize", body, there, walk.grid, scratch)(x_oni.reshape(-1), *seeds)
    if walk.done == inner:
        return array
    rest = x_oni[0, :, walk.done :]
    codes, scales = reference.encode(rest, format, seed, walk.done, divisor)
    array = dataclasses.replace(there, array=array).put(codes, format.code_bytes(walk.done))
    before = format.code_bytes(num) + walk.done // format.block * format.scale_bytes
    return dataclasses.replace(there, array=array).put(scales, before)


def dequantize(
    message: UInt8[Array, "n m"] | InPlace,
    format: Format,
    outer: int,
    inner: int,
    dtype: DTypeLike,
    config: TileConfig | None = None,
) -> Float[Array, "o n i"]:
    """Dequantize messages into an array; see `_reference.dequantize`."""
    message = readable(message, config)
    pieces = len(message)
    num, shape = outer * inner, (outer, pieces, inner)
    walk = plan(shape, [format], config, [inner, *message.offsets])
    if walk is None and outer > 1:
        rows = dequantize(message, format, 1, num, dtype, config)
        return jnp.moveaxis(rows.reshape(pieces, outer, inner), 0, 1)
    if walk is None:
        return reference.dequantize(message.cut_out(), format, outer, inner, dtype)
    tile_layout = walk.tile_layout

    def body(message_ref: Any, out_ref: Any, **scratch: Any) -> None:
        start, piece, first = _here(walk)
        parts = _read(message_ref, message.begin(piece), first, num, format, tile_layout, scratch)
        tile_layout.write(
            out_ref,
            start,
            tile_layout.block,
            [_fit(x, dtype) for x in parts],
            scratch.get("numbers"),
        )

    scratch = _scratch(
        tile_layout, numbers=(tile_layout.block, dtype), codes=(_bytes(format), jnp.uint8)
    )
    out = jax.ShapeDtypeStruct((math.prod(shape),), dtype)
    x_oni = _call("dequantize", body, out, walk.grid, scratch)(message.array.reshape(-1))
    x_oni = x_oni.reshape(shape)
    if walk.done == inner:
        return x_oni
    rest = reference.decode(*_tail(message, format, num, walk.done), dtype)
    return lax.dynamic_update_slice(x_oni, rest[None], (0, 0, walk.done))


def dequantize_sum(
    message: UInt8[Array, "n m"] | InPlace,
    format: Format,
    num: int,
    config: TileConfig | None = None,
) -> Float32[Array, " num"]:
    """Sum the arrays in all messages; see `_reference.dequantize_sum`."""
    message = readable(message, config)
    walk = plan((1, 1, num), [format], config, message.offsets)
    if walk is None:
        return reference.dequantize_sum(message.cut_out(), format, num)
    tile_layout = walk.tile_layout

    def body(message_ref: Any, out_ref: Any, **scratch: Any) -> None:
        start, _, first = _here(walk)
        parts = _sum(message_ref, message, first, num, format, tile_layout, scratch)
        tile_layout.write(out_ref, start, tile_layout.block, parts, scratch.get("numbers"))

    scratch = _scratch(
        tile_layout, numbers=(tile_layout.block, jnp.float32), codes=(_bytes(format), jnp.uint8)
    )
    out = jax.ShapeDtypeStruct((num,), jnp.float32)
    total = _call("dequantize_sum", body, out, walk.grid, scratch)(message.array.reshape(-1))
    if walk.done == num:
        return total
    rest = reference.decode_sum(*_tail(message, format, num, walk.done))
    return lax.dynamic_update_slice(total, rest, (walk.done,))


def dequantize_sum_requantize(
    message: UInt8[Array, "n m"] | InPlace,
    source: Format,
    target: Format,
    shape: tuple[int, int, int],
    seed: UInt32[Array, ""],
    divisor: int,
    place: Place | None = None,
    config: TileConfig | None = None,
) -> UInt8[Array, "k _"]:
    """Sum messages and quantize the sum; see `_reference.dequantize_sum_requantize`.

    This takes two kernels if block sizes differ, blocks cross pieces, or a format rotates.
    """
    message = readable(message, config)
    total, num = math.prod(shape), shape[0] * shape[2]
    result = target.num_bytes(num)
    there = writable(place, shape[1], result, config)
    if there is None:
        args = (message, source, target, shape, seed, divisor)
        return _put(place, dequantize_sum_requantize(*args, None, config))
    whole = shape[2] % source.block == 0 and source.block == target.block
    rotates = source.hadamard or target.hadamard
    offsets = [shape[2], *message.offsets, *there.offsets]
    walk = plan(shape, [source, target], config, offsets) if whole and not rotates else None
    if walk is None:
        x = dequantize_sum(message, source, total, config)
        return quantize(x.reshape(shape), target, seed, divisor, place, config)
    tile_layout = walk.tile_layout

    def body(message_ref: Any, *refs: Any) -> None:
        start, piece, first = _here(walk)
        block = lax.div(start, jnp.int32(tile_layout.block))
        parts = _sum(message_ref, message, block, total, source, tile_layout, {})
        into = there.start + piece * there.shape[1]
        _write(refs[-1], into, first, num, parts, target, tile_layout, refs[:-1], {}, divisor)

    seeds = [seed.reshape(1)] if target.rounding == "stochastic" else []
    fill = _fill("dequantize_sum_requantize", body, there, walk.grid, {})
    assert walk.done == shape[2]  # `plan` leaves a remainder only for a single format
    return fill(message.array.reshape(-1), *seeds)


def _put(place: Place | None, message: UInt8[Array, "n m"]) -> UInt8[Array, "n _"]:
    return message if place is None else place.put(message)


def _here(walk: Walk) -> tuple[Any, Any, Any]:
    """Return where the tile of this warpgroup begins in an array of shape `walk.shape`.

    As three indices: of an element of the flat array, of a piece, and of a block of the piece.
    """
    outer, pieces, inner = walk.shape
    block, rows = walk.tile_layout.block, walk.tile_layout.rows
    number, t = _divmod(lax.axis_index("tile"), walk.tiles)
    piece, run = _divmod(number, outer)
    start = (run * pieces + piece) * inner + t * (rows * block)
    return start, piece, run * (inner // block) + t * rows


def _divmod(x: Any, y: int) -> tuple[Any, Any]:
    return lax.div(x, jnp.int32(y)), lax.rem(x, jnp.int32(y))


def _call(
    name: str, body: Callable[..., None], out: Any, grid: int, scratch: dict[str, Any]
) -> Callable[..., Array]:
    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(grid,),
        grid_names=("tile",),
        scratch_types=scratch,
        **memory.interpret_options(),
    )


def _fill(
    name: str, body: Callable[..., None], place: Place, grid: int, scratch: dict[str, Any]
) -> Callable[..., UInt8[Array, "n _"]]:
    """Return a function that runs the kernel `body` to write messages into the array of `place`."""

    def filled(*args: Array) -> Array:
        if place.array is None:
            out = jax.ShapeDtypeStruct((math.prod(place.shape),), jnp.uint8)
            return _call(name, body, out, grid, scratch)(*args).reshape(place.shape)
        ref = jax.new_ref(place.array.reshape(-1))
        _call(name, body, (), grid, scratch)(*args, ref)
        return jax.freeze(ref).reshape(place.shape)

    return filled


def _scratch(tile_layout: TileLayout, **tiles: tuple[int, DTypeLike]) -> dict[str, Any]:
    if not tile_layout.rotated:
        return {}
    return {name: tile_layout.scratch(size, dtype) for name, (size, dtype) in tiles.items()}


def _bytes(format: Format) -> int:
    """Return the number of bytes of the codes of one block."""
    return format.code_bytes(format.block)


def _write(
    ref: Any,
    message: Any,
    first: Any,
    num: int,
    parts: list[Array],
    format: Format,
    tile_layout: TileLayout,
    seeds: tuple[Any, ...],
    scratch: dict[str, Any],
    divisor: int,
) -> None:
    """Quantize a tile, `parts`, and write it to where `_load`, with equal arguments, reads it."""
    is_kept_r = None
    if format.hadamard:
        rotated = tile.rotate([x * jnp.float32(1 / 32) for x in parts])
        parts, is_kept_r = tile.keep_zeros(parts, rotated, tile_layout.shape)
    scale_r = tile.scales(parts, format, divisor)
    indices = seed = None
    if seeds:
        seed = seeds[0][0]
        before = (first * tile_layout.block).astype(jnp.uint32)
        indices = [index + before for index in tile_layout.indices()]
    codes = tile.encode(parts, scale_r, tile_layout.shape, format, indices, seed, divisor)
    size = _bytes(format)
    tile_layout.write(ref, message + first * size, size, codes, scratch.get("codes"))
    start = message + format.code_bytes(num) + first * format.scale_bytes
    scale_r = scale_r if is_kept_r is None else jnp.where(is_kept_r, -scale_r, scale_r)
    for i, byte in enumerate(tile.scale_bytes(scale_r, format)):
        memory.store(ref, Window(start, tile_layout.rows, format.scale_bytes, i), byte)


def _read(
    ref: Any,
    message: Any,
    first: Any,
    num: int,
    format: Format,
    tile_layout: TileLayout,
    scratch: dict[str, Any],
) -> list[Array]:
    """Read a tile by `_load`, and dequantize it to float32; undoes `_write`."""
    shape = tile_layout.shape
    parts, scale_r = _load(ref, message, first, num, format, tile_layout, scratch)
    if format.hadamard:
        is_kept_w, rotated = tile.along(scale_r, shape) < 0, tile.rotate(parts)
        parts = [jnp.where(is_kept_w, x, y) for x, y in zip(parts, rotated, strict=True)]
        scale_r = jnp.abs(scale_r)
    return _scaled(parts, scale_r, shape)


def _load(
    ref: Any,
    message: Any,
    first: Any,
    num: int,
    format: Format,
    tile_layout: TileLayout,
    scratch: dict[str, Any],
) -> tuple[list[Array], Array]:
    """Read a tile of a message: return the numbers of its codes, unscaled, and each row's scale.

    The message, of `num` numbers, begins at byte `message` of `ref`; the tile is its blocks from
    index `first` on. `scratch` has shared memory if tiles are rotated, and else is empty.
    """
    size = _bytes(format)
    codes = tile_layout.read(ref, message + first * size, size, scratch.get("codes"))
    start = message + format.code_bytes(num) + first * format.scale_bytes
    rows, num_bytes, layout = tile_layout.rows, format.scale_bytes, tile_layout.shape.row_layout
    windows = [Window(start, rows, num_bytes, i) for i in range(num_bytes)]
    scale_r = tile.read_scales([memory.load(ref, w, layout) for w in windows], format)
    return tile.decode(codes, format), scale_r


def _scaled(parts: list[Array], scale_r: Array, shape: tile.Shape) -> list[Array]:
    return [tile.clipped(x * tile.along(scale_r, shape), jnp.float32) for x in parts]


def _sum(
    ref: Any,
    messages: InPlace,
    first: Any,
    num: int,
    format: Format,
    tile_layout: TileLayout,
    scratch: dict[str, Any],
) -> list[Array]:
    """Decode the tile at block `first` of each message; add up in float32, in their order.

    If the format rotates, rotated blocks are summed separately, and their sum is rotated back.
    """

    def terms(peer: Any) -> list[Array]:
        begin = messages.begin(peer)
        parts, scale_r = _load(ref, begin, first, num, format, tile_layout, scratch)
        scales = [scale_r]
        if format.hadamard:
            scales = [blocks.scales_of(scale_r, rotated=kind) for kind in (True, False)]
        return [x for scale_r in scales for x in _scaled(parts, scale_r, tile_layout.shape)]

    def add(peer: Any, total: list[Array]) -> list[Array]:
        return [x + y for x, y in zip(total, terms(peer), strict=True)]

    peers = len(messages)
    total = [x + jnp.float32(0) for x in terms(0)]
    # Loads of rotated tiles go through shared memory: too many instructions to unroll.
    if peers > (_UNROLLED if not tile_layout.rotated else 1):
        total = lax.fori_loop(1, peers, add, total)
    else:
        for peer in range(1, peers):
            total = add(peer, total)
    if not format.hadamard:
        return total
    half = len(total) // 2
    return [x + y for x, y in zip(tile.rotate(total[:half]), total[half:], strict=True)]


def _fit(x: Array, dtype: DTypeLike) -> Array:
    return (x if dtype == jnp.float32 else tile.clipped(x, dtype)).astype(dtype)


def _tail(
    messages: InPlace, format: Format, num: int, done: int
) -> tuple[UInt8[Array, "n _"], UInt8[Array, "n _"], Format, int]:
    """Return arguments of `_reference.decode` for the numbers of messages from index `done` on."""
    # XLA fuses these slices, so only the tail is read.
    message, end = messages.cut_out(), format.code_bytes(num)
    codes = message[:, format.code_bytes(done) : end]
    scales = message[:, end + done // format.block * format.scale_bytes :]
    return codes, scales, format, num - done
