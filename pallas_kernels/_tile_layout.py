"""Load a tile from memory into registers as parts (see `_tile`), and store it.

A tile that is not rotated is loaded and stored directly. A tile that is rotated is transposed
through shared memory: `_tile.rotate` needs 32 consecutive numbers in 32 different arrays, so
numbers are written as rows and read as columns. Four bytes of padding behind each row avoid bank
conflicts when lanes read a column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import DTypeLike

from . import _memory as memory
from . import _tile as tile
from ._blockwise import GROUP
from ._memory import Window


@dataclasses.dataclass(frozen=True)
class TileLayout:
    """The division of the blocks of a tile into parts (see `_tile`).

    Attributes:
        rows: number of blocks in the tile.
        block: numbers per block.
        halves: 2 if the codes of two halves of a block are packed into bytes, else 1.
        rotated: True if each part holds every 32nd number of a block, as a rotation needs.
        vector: largest number of elements that a lane may load at once.
    """

    rows: int
    block: int
    halves: int
    rotated: bool
    vector: int

    @property
    def shape(self) -> tile.Shape:
        """Shape of each part."""
        if self.rotated:
            return tile.Shape(self.rows, max(1, self.block // GROUP // self.halves), 1)
        return tile.Shape(self.rows, self.block // self.halves, self.vector)

    @property
    def is_possible(self) -> bool:
        """Whether the rows of every part fill all lanes, so that a kernel can use this layout."""
        if not self.vector:
            return False
        width, rows = self.shape.width, self.rows
        return tile.fitting_vector(width, rows, self.shape.vector) == self.shape.vector

    def indices(self) -> list[Array]:
        """Return the index of each number within the tile (uint32), one array per part."""
        strides = (self.block, GROUP if self.rotated else 1)
        shape, layout = self.shape.array, self.shape.layout
        place = jnp.uint32(0)
        for dim, stride in enumerate(strides[: len(shape)]):
            iota = plgpu.broadcasted_iota(jnp.uint32, shape, dim, layout=layout)
            place = place + iota * jnp.uint32(stride)
        return [place + jnp.uint32(offset) for offset in self._offsets()]

    def _offsets(self) -> list[int]:
        half = self.block // self.halves
        if not self.rotated:
            return [h * half for h in range(self.halves)]
        if self.block == GROUP:
            return list(range(GROUP))
        return [h * half + j for h in range(self.halves) for j in range(GROUP)]

    def scratch(self, size: int, dtype: DTypeLike) -> Any:
        """Return the shared memory for a tile whose blocks have `size` elements of `dtype`."""
        rows, groups, pitch = self._pitched(size, dtype)
        return plgpu.SMEM((rows * groups * pitch,), dtype)

    def read(self, ref: Any, start: Any, size: int, scratch: Any = None) -> list[Array]:
        """Load the parts of the tile that begins at element `start` of `ref`.

        A block has `size` elements in `ref`. `scratch` is the shared memory of a rotated tile.
        """
        if not self.rotated:
            width, layout = self.shape.width, self.shape.layout
            windows = [
                Window(start, self.rows, size, first, width) for first in range(0, size, width)
            ]
            return [memory.load(ref, window, layout) for window in windows]
        whole, pitched, shape = self._passage(ref.dtype, start, size)
        memory.store(scratch, pitched, memory.load(ref, whole, shape.layout))
        length = min(GROUP, size)
        width, view = self.shape.width, self._pitched(size, ref.dtype)
        return [
            column
            for first in range(0, view[1], width)
            for column in memory.load_columns(
                scratch, view, first, width, length, self.shape.layout
            )
        ]

    def write(
        self, ref: Any, start: Any, size: int, parts: Sequence[Array], scratch: Any = None
    ) -> None:
        """Store the parts of a tile from element `start` of `ref` on; the reverse of `read`."""
        if not self.rotated:
            width = self.shape.width
            for first, part in zip(range(0, size, width), parts, strict=True):
                memory.store(ref, Window(start, self.rows, size, first, width), part)
            return
        length, view = min(GROUP, size), self._pitched(size, ref.dtype)
        columns = [list(parts[i : i + length]) for i in range(0, len(parts), length)]
        memory.store_columns(scratch, view, columns)
        whole, pitched, shape = self._passage(ref.dtype, start, size)
        memory.store(ref, whole, memory.load(scratch, pitched, shape.layout))

    def _pitched(self, size: int, dtype: DTypeLike) -> tuple[int, int, int]:
        """Return the shape of a tile in shared memory: rows, groups of a row, elements of a group.

        A group has 32 elements, or `size` if that is less, and four bytes of padding.
        """
        length = min(GROUP, size)
        return self.rows, size // length, length + max(1, 4 // jnp.dtype(dtype).itemsize)

    def _passage(
        self, dtype: DTypeLike, start: Any, size: int
    ) -> tuple[Window, Window, tile.Shape]:
        """Plan the copy of a tile between memory, from element `start` on, and shared memory.

        Returns:
            The tile's window in memory, its window in shared memory, and its shape in registers.
        """
        rows, groups, pitch = self._pitched(size, dtype)
        length, count = min(GROUP, size), rows * groups
        vector = min(self.vector, max(1, 4 // jnp.dtype(dtype).itemsize))
        vector = tile.fitting_vector(length, count, vector)
        assert vector
        shape = tile.Shape(count, length, vector)
        whole = Window(start, count, length, 0, length)
        return whole, Window(0, count, pitch, 0, length), shape
