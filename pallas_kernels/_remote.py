"""A block of a kernel that writes into the memory of other devices: what both collectives share.

It is a `Party` (`_protocol`): `exchange` says what it is to do when, and it emits that as
instructions. Compiles, never executed: nobody has run this on several GPUs.

An inbox is two outputs of the kernel, which nobody sees: the codes of tiles, and their scales.
Every device's own tiles go through it too, so that all are treated alike, and what a device
gets of itself is rounded as what the others get of it.

Legend: o, n, i as in `_reference`; w, r, b as in `_tile`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import DTypeLike

from . import _memory as memory
from . import _reference as reference
from . import _tile as tile
from ._format import Format
from ._held import Held
from ._protocol import Party, Semaphore, exchange

_plgpu: Any = plgpu  # what pyright reads is the oldest JAX


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """How a collective of one kernel is cut up. Nothing of this was measured.

    Args:
        elements: numbers in a tile, a power of two. Two blocks at least.
        vector: neighbours that a lane loads at once, a power of two.
        slots: how many tiles of each sender a block has room for in its inbox.
        blocks: of a device. They wait for those of other devices, so all of them must run at
            once: two at most for each multiprocessor, whose registers are enough for as many.

    Raises:
        ValueError: one of them is less than 1, or not a power of two where it must be.
    """

    elements: int = 4096
    vector: int = 8
    slots: int = 4
    blocks: int = 128  # an H100 has 114 or 132 multiprocessors, an H200 132

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1 or (name in ("elements", "vector") and value & (value - 1)):
                kind = "a power of two" if name in ("elements", "vector") else "1 or more"
                raise ValueError(f"`{name}` must be {kind}; got {value!r}.")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How what one device sends to another is cut up: `outer` runs of whole tiles.

    Attributes:
        outer: runs. One, filled up with zeros, if tiles do not lie in runs.
        inner: numbers of a run, that are not only there to fill it up.
        format: of the codes.
        rows: blocks of numbers in a tile.
        config: the rest.
    """

    outer: int
    inner: int
    format: Format
    rows: int
    config: RemoteConfig

    @classmethod
    def of(cls, outer: int, inner: int, format: Format, config: RemoteConfig) -> Plan:
        """For `outer` runs of `inner` numbers. Blocks go on from one run to the next."""
        rows = max(2, config.elements // format.block)  # one scale would be no array
        while not cls(outer, inner, format, rows, config).held.vector:
            rows *= 2
        if inner % (rows * format.block):
            return cls(1, outer * inner, format, rows, config)
        return cls(outer, inner, format, rows, config)

    @property
    def tile(self) -> int:
        """Numbers of a tile."""
        return self.rows * self.format.block

    @property
    def run(self) -> int:
        """Tiles of a run."""
        return max(1, math.ceil(self.inner / self.tile))

    @property
    def tiles(self) -> int:
        return self.outer * self.run

    @property
    def blocks(self) -> int:
        """Of a device."""
        return min(self.config.blocks, self.tiles)

    @property
    def most_tiles(self) -> int:
        """Of a block."""
        return math.ceil(self.tiles / self.blocks)

    @property
    def slots(self) -> int:
        return min(self.config.slots, self.most_tiles)

    @property
    def held(self) -> Held:
        """A tile in registers: two parts if codes are packed."""
        block, halves = self.format.block, self.format.codes_per_byte
        vector = tile.fitting_vector(block // halves, self.rows, self.config.vector)
        return Held(self.rows, block, halves, rotated=False, vector=vector)

    def inbox(self, devices: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Places for codes, and for scales."""
        places = (devices, self.blocks, self.slots, self.rows)
        codes = (*places, self.format.code_bytes(self.format.block))
        return (
            jax.ShapeDtypeStruct(codes, jnp.uint8),
            jax.ShapeDtypeStruct(places, self.format.scale_dtype),
        )

    def cut(self, x_oni: Array) -> Array:
        """Pieces as tiles: runs, pieces, tiles of a run, blocks, numbers."""
        outer, pieces, _ = x_oni.shape
        if outer != self.outer:
            x_oni = reference.to_rows(x_oni)[None]
        missing = self.run * self.tile - self.inner
        x_oni = jnp.pad(x_oni, ((0, 0), (0, 0), (0, missing))) if missing else x_oni
        return x_oni.reshape(self.outer, pieces, self.run, self.rows, self.format.block)

    def join(self, tiles: Array, outer: int) -> Array:
        """Undo `cut`, of pieces that had `outer` runs."""
        pieces = tiles.shape[1]
        x_oni = tiles.reshape(self.outer, pieces, self.run * self.tile)[..., : self.inner]
        if outer != self.outer:
            x_oni = jnp.moveaxis(x_oni[0].reshape(pieces, outer, self.inner // outer), 0, 1)
        return x_oni


class Block(Party):
    """One block of a device: one warpgroup.

    Attributes:
        name: of the kernel.
        source: numbers of this device, cut by `Plan`: one piece, or one for each peer.
        result: what is made of those that arrive.
        codes: the inbox, by sender, block and slot.
        scales: the same for scales.
    """

    name: ClassVar[str]

    def __init__(self, axis: str, plan: Plan, refs: Sequence[Any], semaphores: Sequence[Any]):
        self.axis, self.plan = axis, plan
        self.source, *self.seeds, self.result, self.codes, self.scales = refs
        self.entered, self.arrived, self.free = semaphores
        self.num_devices = lax.axis_size(axis)
        self.device = lax.axis_index(axis)
        self.block = lax.axis_index("block")

    def repeat(self, num: Any, body: Callable[[Any], None]) -> None:
        def step(i: Array, nothing: None) -> None:
            body(i)

        lax.fori_loop(0, num, step, None)

    def when(self, condition: Any, body: Callable[[], None]) -> None:
        pl.when(condition)(body)

    def signal(self, semaphore: Semaphore, peer: Any) -> None:
        ref = self._semaphore(semaphore, self.device)
        pl.semaphore_signal(ref, 1, device_id={self.axis: peer})

    def wait(self, semaphore: Semaphore, count: int, peer: int = 0) -> None:
        pl.semaphore_wait(self._semaphore(semaphore, peer), count)

    def _semaphore(self, name: Semaphore, sender: Any) -> Any:
        if name == "arrived":
            return self.arrived.at[sender]
        return self.entered if name == "entered" else self.free

    @property
    def num_tiles(self) -> Any:
        """Of this block."""
        last = jnp.int32(self.plan.tiles + self.plan.blocks - 1)
        return lax.div(last - self.block, jnp.int32(self.plan.blocks))

    def _number(self, tile: Any) -> Any:
        """Of a tile of this block among all."""
        return tile * self.plan.blocks + self.block

    def of_piece(self, ref: Any, piece: Any, tile: Any) -> Any:
        """A tile of this block in one piece of an array."""
        number, run = self._number(tile), jnp.int32(self.plan.run)
        return ref.at[lax.div(number, run), piece, lax.rem(number, run)]

    def to_peers(self, body: Callable[[Any], None]) -> None:
        """The next device first, so that they do not all write to the same at once."""
        num = jnp.int32(self.num_devices)
        self.repeat(self.num_devices, lambda j: body(lax.rem(self.device + j + 1, num)))

    def encoded(self, ref: Any, tile_number: Any) -> tuple[Array, Array]:
        """Codes and scales of the tile in `ref`."""
        format, held = self.plan.format, self.plan.held
        parts_w = [load_tile(x, held.shape.layout).astype(jnp.float32) for x in self._parts(ref)]
        scale_r = tile.scales(parts_w, format)
        seed = indices = None
        if self.seeds:  # numbers are told apart by their place among all of the piece
            seed = self.seeds[0][0]
            first = (self._number(tile_number) * self.plan.tile).astype(jnp.uint32)
            indices = [index_w + first for index_w in held.indices()]
        (codes_b,) = tile.encode(parts_w, scale_r, held.shape, format, indices, seed)
        return codes_b, scale_r.astype(format.scale_dtype)  # exact

    def _parts(self, ref: Any) -> list[Any]:
        """Columns of a tile in memory."""
        held = self.plan.held
        width = held.shape.width
        return [ref.at[:, pl.ds(h * width, width)] for h in range(held.halves)]

    def put(self, peer: Any, slot: Any, codes_b: Array, scale_r: Array) -> None:
        """Into this device's place in the inbox of a peer."""
        there: Any = {self.axis: peer}
        codes, scales = (
            plgpu.remote_ref(ref, there).at[self.device, self.block, slot]
            for ref in (self.codes, self.scales)
        )
        store_tile(codes, codes_b)
        store_tile(scales, scale_r)

    def take(self, peer: int, slot: Any) -> list[Array]:
        """Out of the place of a peer in this device's inbox, decoded."""
        shape = self.plan.held.shape
        codes_b = load_tile(self.codes.at[peer, self.block, slot], shape.layout)
        scale_r = load_tile(self.scales.at[peer, self.block, slot], shape.row_layout)
        scale_w = tile.along(scale_r.astype(jnp.float32), shape)
        return [x_w * scale_w for x_w in tile.decode([codes_b], self.plan.format)]

    def keep(self, ref: Any, parts_w: Sequence[Array]) -> None:
        """As the result, in `ref`."""
        for part, x_w in zip(self._parts(ref), parts_w, strict=True):
            store_tile(part, x_w.astype(part.dtype))


def clipped(x_w: Array, dtype: DTypeLike) -> Array:
    """Half a step above the largest number of a type lies infinity. NaN stays."""
    largest = jnp.float32(reference.largest(dtype))
    return jnp.minimum(jnp.maximum(x_w, -largest), largest)


def run(
    block: type[Block],
    source: Array,
    seed: Array,
    result: jax.ShapeDtypeStruct,
    axis: str,
    plan: Plan,
) -> Array:
    """Run a kernel on every device of an axis, inside `shard_map`.

    Args:
        block: what its blocks do.
        source: this device's numbers, cut by `plan`.
        seed: of stochastic rounding.
        result: of the same form.
        axis: of the mesh.
        plan: how it is all cut up.
    """
    devices = lax.axis_size(axis)
    seeds = [seed.reshape(1)] if plan.format.rounding == "stochastic" else []

    def kernel(*refs: Any) -> None:
        party = block(axis, plan, refs[:-3], refs[-3:])
        exchange(party, num_tiles=party.num_tiles, most_tiles=plan.most_tiles, slots=plan.slots)

    kernel.__name__ = block.name
    found, *_ = plgpu.kernel(
        kernel,
        out_type=(result, *plan.inbox(devices)),
        grid=(plan.blocks,),
        grid_names=("block",),
        scratch_types=semaphores(devices),
        **memory.interpret_options(),  # `skip_device_barrier` stays False: see `_protocol`
    )(source, *seeds)
    return found


def semaphores(devices: int) -> list[Any]:
    """`entered`, `arrived` and `free`, of which every block of the grid has its own."""
    regular = plgpu.SemaphoreType.REGULAR
    return [regular, regular((devices,)), regular]


def load_tile(ref: Any, layout: Any) -> Array:
    """Into registers."""
    return _plgpu.load(ref, layout=layout, optimized=False)


def store_tile(ref: Any, value: Array) -> None:
    """Out of registers."""
    if hasattr(plgpu, "store"):  # JAX 0.12 must be told that some lanes write few bytes
        _plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
