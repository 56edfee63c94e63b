"""The operations as Mosaic GPU kernels: each reads its input once, and writes its output once.

One warpgroup handles one tile of blocks, all in registers, and nothing passes between tiles;
many warpgroups on a multiprocessor hide the time that memory takes. What is left at the end of
a row, less than a tile, is done by XLA, and written into the kernel's output in place. Pieces
of an array that is cut along an inner dim are read and written where they are, if whole blocks
lie in each run; else XLA transposes. Messages are read where a collective left them, among
others, and written where it is to find them (`_in_place`), unless they begin where a lane could
move fewer bytes at once.

Who writes what: every element of the output belongs to one tile, and every tile to one
warpgroup. Inputs are not written. Shared memory belongs to one warpgroup, and Mosaic puts a
barrier of it around each store.

A GPU's reciprocal, `rcp.approx` in the PTX of Mosaic as in that of XLA, may be one unit in the
last place beside the right one. For bfloat16 scales that is mended (`_blocks.refine`), so
that codes are those of a CPU. For float32 scales it is not: a kernel and XLA still take the same
reciprocal on the same GPU, but a code that is near the middle between two may be the other one on
a CPU. Both are right by the bounds that `tests/_codec_oracle.py` derives.

Legend: o, n, i as in `_reference`; a run is the `i` elements that lie together.
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

from . import _memory as memory
from . import _reference as reference
from . import _tile as tile
from ._config import TileConfig
from ._format import Format
from ._held import Held
from ._in_place import InPlace, Place
from ._memory import Window
from ._walk import Walk, plan, readable, writable

_UNROLLED = 16  # peers whose messages are loaded without a loop


def quantize(
    x_oni: Float[Array, "o n i"],
    format: Format,
    seed: UInt32[Array, ""],
    divisor: int = 1,
    place: Place | None = None,
    config: TileConfig | None = None,
) -> UInt8[Array, "n _"]:
    """As `_reference.quantize`."""
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
    held = walk.held

    def body(x_ref: Any, *refs: Any, **scratch: Any) -> None:
        start, piece, first = _here(walk)
        parts = held.read(x_ref, start, held.block, scratch.get("numbers"))
        parts = [x.astype(jnp.float32) for x in parts]
        message = there.start + piece * there.shape[1]
        _write(refs[-1], message, first, num, parts, format, held, refs[:-1], scratch, divisor)

    scratch = _scratch(held, numbers=(held.block, x_oni.dtype), codes=(_bytes(format), jnp.uint8))
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
    """As `_reference.dequantize`."""
    message = readable(message, config)
    pieces = len(message)
    num, shape = outer * inner, (outer, pieces, inner)
    walk = plan(shape, [format], config, [inner, *message.offsets])
    if walk is None and outer > 1:
        rows = dequantize(message, format, 1, num, dtype, config)
        return jnp.moveaxis(rows.reshape(pieces, outer, inner), 0, 1)
    if walk is None:
        return reference.dequantize(message.cut_out(), format, outer, inner, dtype)
    held = walk.held

    def body(message_ref: Any, out_ref: Any, **scratch: Any) -> None:
        start, piece, first = _here(walk)
        parts = _read(message_ref, message.begin(piece), first, num, format, held, scratch)
        held.write(
            out_ref, start, held.block, [_fit(x, dtype) for x in parts], scratch.get("numbers")
        )

    scratch = _scratch(held, numbers=(held.block, dtype), codes=(_bytes(format), jnp.uint8))
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
    """As `_reference.dequantize_sum`."""
    message = readable(message, config)
    walk = plan((1, 1, num), [format], config, message.offsets)
    if walk is None:
        return reference.dequantize_sum(message.cut_out(), format, num)
    held = walk.held

    def body(message_ref: Any, out_ref: Any, **scratch: Any) -> None:
        start, _, first = _here(walk)
        parts = _sum(message_ref, message, first, num, format.unrotated, held, scratch)
        parts = _rotated(parts) if format.hadamard else parts
        held.write(out_ref, start, held.block, parts, scratch.get("numbers"))

    scratch = _scratch(held, numbers=(held.block, jnp.float32), codes=(_bytes(format), jnp.uint8))
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
    """As `_reference.dequantize_sum_requantize`; in two kernels, if blocks do not match, or a
    rotation is between them."""
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
    held = walk.held

    def body(message_ref: Any, *refs: Any) -> None:
        start, piece, first = _here(walk)
        block = lax.div(start, jnp.int32(held.block))
        parts = _sum(message_ref, message, block, total, source, held, {})
        into = there.start + piece * there.shape[1]
        _write(refs[-1], into, first, num, parts, target, held, refs[:-1], {}, divisor)

    seeds = [seed.reshape(1)] if target.rounding == "stochastic" else []
    fill = _fill("dequantize_sum_requantize", body, there, walk.grid, {})
    assert walk.done == shape[2]  # whole blocks, and tiles that share them out
    return fill(message.array.reshape(-1), *seeds)


def _put(place: Place | None, message: UInt8[Array, "n m"]) -> UInt8[Array, "n _"]:
    return message if place is None else place.put(message)


def _here(walk: Walk) -> tuple[Any, Any, Any]:
    """Of this warpgroup's tile: its place in the array, its piece, its first block in that."""
    outer, pieces, inner = walk.shape
    block, rows = walk.held.block, walk.held.rows
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
    """As `_call`: a kernel whose output is an array, of which it writes some columns."""

    def filled(*args: Array) -> Array:
        if place.array is None:
            out = jax.ShapeDtypeStruct((math.prod(place.shape),), jnp.uint8)
            return _call(name, body, out, grid, scratch)(*args).reshape(place.shape)
        ref = jax.new_ref(place.array.reshape(-1))
        _call(name, body, (), grid, scratch)(*args, ref)
        return jax.freeze(ref).reshape(place.shape)

    return filled


def _scratch(held: Held, **tiles: tuple[int, DTypeLike]) -> dict[str, Any]:
    if not held.rotated:
        return {}
    return {name: held.scratch(size, dtype) for name, (size, dtype) in tiles.items()}


def _bytes(format: Format) -> int:
    """Of the codes of a block."""
    return format.code_bytes(format.block)


def _write(
    ref: Any,
    message: Any,
    first: Any,
    num: int,
    parts: list[Array],
    format: Format,
    held: Held,
    seeds: tuple[Any, ...],
    scratch: dict[str, Any],
    divisor: int,
) -> None:
    """Write a tile, whose first block is number `first`, into the message at `message`."""
    if format.hadamard:
        parts = _rotated([x * jnp.float32(1 / 32) for x in parts])
    scale_r = tile.scales(parts, format, divisor)
    indices = seed = None
    if seeds:
        seed = seeds[0][0]
        before = (first * held.block).astype(jnp.uint32)
        indices = [index + before for index in held.indices()]
    codes = tile.encode(parts, scale_r, held.shape, format, indices, seed, divisor)
    size = _bytes(format)
    held.write(ref, message + first * size, size, codes, scratch.get("codes"))
    start = message + format.code_bytes(num) + first * format.scale_bytes
    for i, byte in enumerate(tile.scale_bytes(scale_r, format)):
        memory.store(ref, Window(start, held.rows, format.scale_bytes, i), byte)


def _read(
    ref: Any,
    message: Any,
    first: Any,
    num: int,
    format: Format,
    held: Held,
    scratch: dict[str, Any],
) -> list[Array]:
    """Undo `_write`, in float32."""
    size = _bytes(format)
    codes = held.read(ref, message + first * size, size, scratch.get("codes"))
    parts = tile.decode(codes, format)
    if format.hadamard:
        parts = _rotated(parts)
    start = message + format.code_bytes(num) + first * format.scale_bytes
    windows = [Window(start, held.rows, format.scale_bytes, i) for i in range(format.scale_bytes)]
    layout = held.shape.row_layout
    scale_r = tile.read_scales([memory.load(ref, w, layout) for w in windows], format)
    return [_clipped(x * tile.along(scale_r, held.shape), jnp.float32) for x in parts]


def _sum(
    ref: Any,
    messages: InPlace,
    first: Any,
    num: int,
    format: Format,
    held: Held,
    scratch: dict[str, Any],
) -> list[Array]:
    """The sum of a tile over all messages, one after the other."""

    def add(peer: Any, total: list[Array]) -> list[Array]:
        parts = _read(ref, messages.begin(peer), first, num, format, held, scratch)
        return [x + y for x, y in zip(total, parts, strict=True)]

    peers = len(messages)
    parts = _read(ref, messages.begin(0), first, num, format, held, scratch)
    total = [x + jnp.float32(0) for x in parts]
    if peers > (_UNROLLED if not held.rotated else 1):  # through shared memory they are long
        return lax.fori_loop(1, peers, add, total)
    for peer in range(1, peers):
        total = add(peer, total)
    return total


def _rotated(parts: list[Array]) -> list[Array]:
    """Each 32 of the parts."""
    groups = [tile.rotate(parts[i : i + 32]) for i in range(0, len(parts), 32)]
    return [x for group in groups for x in group]


def _clipped(x: Array, dtype: DTypeLike) -> Array:
    largest = jnp.float32(reference.largest(dtype))
    return jnp.minimum(jnp.maximum(x, -largest), largest)


def _fit(x: Array, dtype: DTypeLike) -> Array:
    return (x if dtype == jnp.float32 else _clipped(x, dtype)).astype(dtype)


def _tail(
    messages: InPlace, format: Format, num: int, done: int
) -> tuple[UInt8[Array, "n _"], UInt8[Array, "n _"], Format, int]:
    """What of messages belongs to the numbers from `done` on, as `_reference.decode` takes it."""
    message, end = messages.cut_out(), format.code_bytes(num)  # XLA cuts out the tail alone
    codes = message[:, format.code_bytes(done) : end]
    scales = message[:, end + done // format.block * format.scale_bytes :]
    return codes, scales, format, num - done
