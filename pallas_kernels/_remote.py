"""Run a kernel whose thread blocks write into other devices' memory, for both collectives.

`Block` implements the operations of `_protocol.Party` as GPU instructions, and `exchange` calls
them in order. Compiles, never executed: this has not run on several GPUs.

The inbox of a device is two extra outputs of the kernel, codes and scales, which `run` discards.
A device also sends its own tiles through its inbox, so that its own contribution is rounded
exactly like the copy that its peers receive.

An array [o, n, i] consists of n pieces: one for each device, or only one. A piece is o runs of `i`
contiguous numbers each.

Legend: o, n, i as in `_reference`; w, r, b as in `_tile`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.compute_on import compute_on
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _memory as memory
from . import _reference as reference
from . import _tile as tile
from ._format import Format
from ._memory import store_tile
from ._protocol import Party, Semaphore, exchange
from ._tile_layout import TileLayout

# Types are checked with the oldest JAX, which lacks some of the names.
_plgpu: Any = plgpu
_compute_on: Any = compute_on

_STREAM = 1  # of exchanges: they run one after the other, beside what XLA computes


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """Tile, inbox and grid sizes of a single-kernel collective. None of them was measured.

    Args:
        elements: numbers in a tile, a power of two; raised to two blocks if that is more.
        vector: consecutive elements that a lane loads at once, a power of two.
        slots: tiles per sender that fit into a block's inbox.
        blocks: thread blocks per device. They wait for blocks of other devices, so all must be
            resident at once, beside kernels on other streams that wait for devices too: NCCL's,
            with at most 64 blocks.

    Raises:
        ValueError: a value is less than 1, or not a power of two where it must be.
    """

    elements: int = 4096
    vector: int = 8
    slots: int = 4
    blocks: int = 32  # an H100 has 114 or 132 multiprocessors, an H200 132

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1 or (name in ("elements", "vector") and value & (value - 1)):
                kind = "a power of two" if name in ("elements", "vector") else "1 or more"
                raise ValueError(f"`{name}` must be {kind}; got {value!r}.")


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The division of the array that one device sends to another into runs, and of runs into tiles.

    Attributes:
        outer: number of runs. If runs do not consist of whole tiles, they are joined into a
            single run, padded with zeros.
        parts: sizes of the arrays that lie side by side in a run, without padding. There is one,
            or there are several in a single run, each of which begins with a new tile.
        format: wire format.
        rows: quantization blocks in a tile.
        config: sizes of the inbox and grid.
    """

    outer: int
    parts: tuple[int, ...]
    format: Format
    rows: int
    config: RemoteConfig

    @classmethod
    def of(
        cls, outer: int, inner: int, format: Format, config: RemoteConfig, parts: Sequence[int] = ()
    ) -> Tiling:
        """Choose tiles for `outer` runs of `inner` numbers; blocks may extend across runs.

        `parts` are the sizes of arrays that lie side by side in a single run; (): one array.
        """
        # At least 2, since the scale of a single row would be a scalar and not an array.
        rows = max(2, config.elements // format.block)
        while not cls(outer, (inner,), format, rows, config).tile_layout.vector:
            rows *= 2
        if len(parts) > 1:
            assert outer == 1 and sum(parts) == inner
            return cls(1, tuple(parts), format, rows, config)
        if inner % (rows * format.block):
            return cls(1, (outer * inner,), format, rows, config)
        return cls(outer, (inner,), format, rows, config)

    @property
    def tile(self) -> int:
        """Numbers per tile."""
        return self.rows * self.format.block

    @property
    def run(self) -> int:
        """Tiles per run."""
        return sum(self._tiles_of_parts())

    def _tiles_of_parts(self) -> list[int]:
        return [max(1, math.ceil(part / self.tile)) for part in self.parts]

    def sent_bytes(self) -> tuple[int, ...]:
        """Return, by part, the bytes that a device stores into a peer's inbox, with padding."""
        tile = self.outer * self.format.num_bytes(self.tile)
        return tuple(num * tile for num in self._tiles_of_parts())

    def first_indices(self) -> np.ndarray:
        """Return, for each tile of a run, the index of its first number in its part, as uint32.

        Stochastic rounding needs these indices if there are several parts.
        """
        firsts = [np.arange(num) * self.tile for num in self._tiles_of_parts()]
        return np.concatenate(firsts).astype(np.uint32)

    @property
    def tiles(self) -> int:
        return self.outer * self.run

    @property
    def blocks(self) -> int:
        """Thread blocks per device."""
        return min(self.config.blocks, self.tiles)

    @property
    def most_tiles(self) -> int:
        """Largest number of tiles of any thread block."""
        return math.ceil(self.tiles / self.blocks)

    @property
    def slots(self) -> int:
        return min(self.config.slots, self.most_tiles)

    @property
    def tile_layout(self) -> TileLayout:
        """Layout of a tile in registers: as two arrays if two codes share a byte, else as one."""
        block, halves = self.format.block, self.format.codes_per_byte
        vector = tile.fitting_vector(block // halves, self.rows, self.config.vector)
        return TileLayout(self.rows, block, halves, rotated=False, vector=vector)

    def seeds(self, seed: Array) -> list[Array]:
        """Return a kernel's inputs for stochastic rounding: seed, and `first_indices` if needed."""
        if self.format.rounding != "stochastic":
            return []
        firsts = [jnp.asarray(self.first_indices())] if len(self.parts) > 1 else []
        return [seed.reshape(1), *firsts]

    def inbox(self, devices: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Return the shapes of a device's inboxes for codes and for scales.

        Their dims are sender, thread block, slot and row; codes have a last dim of bytes.
        """
        places = (devices, self.blocks, self.slots, self.rows)
        codes = (*places, self.format.code_bytes(self.format.block))
        return (
            jax.ShapeDtypeStruct(codes, jnp.uint8),
            jax.ShapeDtypeStruct(places, self.format.scale_dtype),
        )

    def cut(self, x_oni: Array) -> Array:
        """Divide pieces into tiles: return [runs, pieces, tiles per run, rows, numbers]."""
        outer, pieces, _ = x_oni.shape
        if outer != self.outer:
            x_oni = reference.to_rows(x_oni)[None]
        padded = []
        for x_onp, num in zip(self._split(x_oni, self.parts), self._tiles_of_parts(), strict=True):
            missing = num * self.tile - x_onp.shape[2]
            padded.append(jnp.pad(x_onp, ((0, 0), (0, 0), (0, missing))) if missing else x_onp)
        x_oni = padded[0] if len(padded) == 1 else jnp.concatenate(padded, axis=2)
        return x_oni.reshape(self.outer, pieces, self.run, self.rows, self.format.block)

    @staticmethod
    def _split(x_oni: Array, sizes: Sequence[int]) -> list[Array]:
        ends = itertools.accumulate(sizes)
        pairs = zip(sizes, ends, strict=True)
        return [lax.slice_in_dim(x_oni, end - size, end, axis=2) for size, end in pairs]

    def join(self, tiles: Array, outer: int) -> Array:
        """Reassemble pieces of `outer` runs from their tiles; the reverse of `cut`."""
        pieces = tiles.shape[1]
        whole = tiles.reshape(self.outer, pieces, self.run * self.tile)
        padded = self._split(whole, [num * self.tile for num in self._tiles_of_parts()])
        parts = [x[..., :size] for x, size in zip(padded, self.parts, strict=True)]
        x_oni = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2)
        if outer != self.outer:
            x_oni = jnp.moveaxis(x_oni[0].reshape(pieces, outer, -1), 0, 1)
        return x_oni


class Block(Party):
    """The operations of one thread block of a device, which is one warpgroup.

    Attributes:
        name: name of the kernel.
        source: this device's numbers, cut by `Tiling.cut`: one piece, or one for each peer.
        result: output for the numbers that arrive.
        codes: inbox of codes, indexed by sender, block and slot.
        scales: inbox of scales, indexed in the same way.
    """

    name: ClassVar[str]

    def __init__(self, axis: str, tiling: Tiling, refs: Sequence[Any], semaphores: Sequence[Any]):
        self.axis, self.tiling = axis, tiling
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
        """Number of tiles of this thread block."""
        last = jnp.int32(self.tiling.tiles + self.tiling.blocks - 1)
        return lax.div(last - self.block, jnp.int32(self.tiling.blocks))

    def _number(self, tile: Any) -> Any:
        """Return the index, among all tiles of a piece, of tile number `tile` of this block."""
        return tile * self.tiling.blocks + self.block

    def of_piece(self, ref: Any, piece: Any, tile: Any) -> Any:
        """Return a reference to this block's tile number `tile` in one piece of an array.

        `ref` refers to an array that `Tiling.cut` has cut, and `piece` is the index of the piece.
        """
        number, run = self._number(tile), jnp.int32(self.tiling.run)
        return ref.at[lax.div(number, run), piece, lax.rem(number, run)]

    def to_peers(self, body: Callable[[Any], None]) -> None:
        """Call `body(peer)` for every peer, beginning with the device after this one.

        So each device begins with a different peer, which spreads the writes over the links.
        """
        num = jnp.int32(self.num_devices)
        self.repeat(self.num_devices, lambda j: body(lax.rem(self.device + j + 1, num)))

    def encoded(self, ref: Any, tile_number: Any) -> tuple[Array, Array]:
        """Quantize the tile that `ref` refers to, this block's number `tile_number`.

        Return its codes, and a scale for each row.
        """
        format, tile_layout = self.tiling.format, self.tiling.tile_layout
        parts_w = [
            load_tile(x, tile_layout.shape.layout).astype(jnp.float32) for x in self._parts(ref)
        ]
        scale_r = tile.scales(parts_w, format)
        seed = indices = None
        if self.seeds:  # the random numbers depend on an element's index within the piece
            seed = self.seeds[0][0]
            number = self._number(tile_number)
            if len(self.seeds) > 1:  # several arrays, each with indices of its own
                first = self.seeds[1][number]
            else:
                first = (number * self.tiling.tile).astype(jnp.uint32)
            indices = [index_w + first for index_w in tile_layout.indices()]
        (codes_b,) = tile.encode(parts_w, scale_r, tile_layout.shape, format, indices, seed)
        return codes_b, scale_r.astype(format.scale_dtype)  # exact

    def _parts(self, ref: Any) -> list[Any]:
        """Return a reference to each part of a tile in memory; registers hold a part as one array.

        `ref` refers to the tile, whose rows are quantization blocks. It is one part; or two, the
        first and the second half of all rows, if two codes share a byte.
        """
        tile_layout = self.tiling.tile_layout
        width = tile_layout.shape.width
        return [ref.at[:, pl.ds(h * width, width)] for h in range(tile_layout.halves)]

    def put(self, peer: Any, slot: Any, codes_b: Array, scale_r: Array) -> None:
        """Write codes and scales into this device's slot in the inbox of a peer."""
        there: Any = {self.axis: peer}
        codes, scales = (
            plgpu.remote_ref(ref, there).at[self.device, self.block, slot]
            for ref in (self.codes, self.scales)
        )
        store_tile(codes, codes_b)
        store_tile(scales, scale_r)

    def take(self, peer: int, slot: Any) -> list[Array]:
        """Return the parts of the tile that a peer has put into `slot` of the inbox, decoded."""
        shape = self.tiling.tile_layout.shape
        codes_b = load_tile(self.codes.at[peer, self.block, slot], shape.layout)
        scale_r = load_tile(self.scales.at[peer, self.block, slot], shape.row_layout)
        scale_w = tile.along(scale_r.astype(jnp.float32), shape)
        return [x_w * scale_w for x_w in tile.decode([codes_b], self.tiling.format)]

    def keep(self, ref: Any, parts_w: Sequence[Array]) -> None:
        """Store the parts of a decoded tile (`_parts`) into `ref`, a tile of the result."""
        for part, x_w in zip(self._parts(ref), parts_w, strict=True):
            store_tile(part, x_w.astype(part.dtype))


def run(
    block: type[Block],
    source: Array,
    seed: Array,
    result: jax.ShapeDtypeStruct,
    axis: str,
    tiling: Tiling,
) -> Array:
    """Run the kernel of a collective on every device of an axis, inside `shard_map`.

    Args:
        block: `AllGather` or `ReduceScatter`: the class of the kernel's thread blocks.
        source: this device's numbers, cut by `tiling`.
        seed: seed of stochastic rounding (uint32).
        result: shape and dtype of the result, cut by `tiling` too.
        axis: mesh axis of the devices that take part.
        tiling: how arrays are cut into tiles.

    Returns:
        This device's result, in tiles.
    """
    devices = lax.axis_size(axis)
    seeds = tiling.seeds(seed)

    def kernel(*refs: Any) -> None:
        party = block(axis, tiling, refs[:-3], refs[-3:])
        exchange(party, num_tiles=party.num_tiles, most_tiles=tiling.most_tiles, slots=tiling.slots)

    kernel.__name__ = block.name
    exchanged = plgpu.kernel(
        kernel,
        out_type=(result, *tiling.inbox(devices)),
        grid=(tiling.blocks,),
        grid_names=("block",),
        scratch_types=semaphores(devices),
        **memory.interpret_options(),  # `skip_device_barrier` stays False: see `_protocol`
    )
    # XLA starts a call on another stream early, and waits for it where its result is needed.
    beside_compute = _compute_on(
        lambda *args: exchanged(*args)[0],
        compute_type=f"gpu_stream:{_STREAM}",
        out_memory_spaces=jax.memory.Space.Device,
    )
    # Constants must stay outside: inside, XLA gives them names that are no PTX.
    return beside_compute(source, *lax.optimization_barrier(seeds))


def semaphores(devices: int) -> list[Any]:
    """Return the types of the semaphores `entered`, `arrived` and `free` of each thread block."""
    regular = plgpu.SemaphoreType.REGULAR
    return [regular, regular((devices,)), regular]


def load_tile(ref: Any, layout: Any) -> Array:
    """Load a tile into registers."""
    return _plgpu.load(ref, layout=layout, optimized=False)
