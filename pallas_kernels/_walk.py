"""Divide an array into tiles, and decide if a kernel can access messages in place.

A lane loads a vector of several elements at once only if tiles, rows and messages all begin at
multiples of that vector's length.
"""

from __future__ import annotations

import dataclasses
import math

from jaxtyping import Array, UInt8

from . import _tile as tile
from ._config import TileConfig, tile_config
from ._format import Format
from ._in_place import InPlace, Place
from ._tile_layout import TileLayout


@dataclasses.dataclass(frozen=True)
class Walk:
    """The division of an array into tiles, each within a run of `i` contiguous elements.

    Attributes:
        shape: shape (o, n, i) of the array: n pieces of o runs each; see `_reference`.
        tile_layout: how a tile is divided into parts.
    """

    shape: tuple[int, int, int]
    tile_layout: TileLayout

    @property
    def num(self) -> int:
        """Elements of a piece, and so of its message."""
        return self.shape[0] * self.shape[2]

    @property
    def tiles(self) -> int:
        """Tiles in a run of `i` contiguous elements."""
        return self.shape[2] // (self.tile_layout.block * self.tile_layout.rows)

    @property
    def done(self) -> int:
        """Number of the `i` contiguous elements of a run that tiles cover; XLA handles the rest."""
        return self.tiles * self.tile_layout.rows * self.tile_layout.block

    @property
    def grid(self) -> int:
        return math.prod(self.shape[:2]) * self.tiles


def plan(
    shape: tuple[int, ...], formats: list[Format], config: TileConfig | None, offsets: list[int]
) -> Walk | None:
    """Choose the tiles into which an array is divided, or return None if no tile fits.

    Args:
        shape: shape (o, n, i) of the array.
        formats: formats of the messages that the kernel reads and writes, of one block size.
        config: tile sizes; None for those of `tile_config`.
        offsets: strides and starts, in elements. Each load and store begins at a sum of multiples
            of these, so a vector's length must divide all of them.
    """
    outer, pieces, inner = shape
    block = formats[0].block
    config = config or tile_config()
    blocks = inner // block
    if blocks == 0 or (outer > 1 and inner % block):
        return None
    # Prefer tiles that divide a run exactly. If there is a single run, larger tiles that leave a
    # remainder for XLA are allowed too, and win if they permit longer vectors.
    numbers = [blocks & -blocks]
    if outer == 1 and len(formats) == 1:
        numbers.append(_below(blocks))
    tiles = [
        _choose_tile(rows, formats, config, _common(config.vector, offsets)) for rows in numbers
    ]
    best = max(tiles, key=lambda tile_layout: tile_layout.vector if tile_layout.is_possible else 0)
    return Walk((outer, pieces, inner), best) if best.is_possible else None


def _choose_tile(most: int, formats: list[Format], config: TileConfig, vector: int) -> TileLayout:
    """Choose the layout of a tile of at most `most` blocks, with vectors of at most `vector`."""
    block = formats[0].block
    halves = max(format.codes_per_byte for format in formats)
    rotated = formats[0].hadamard is not None
    rows = max(1, config.elements // block)
    if rotated:
        rows = max(rows, TileLayout(1, block, halves, True, vector).shape.multiple)
    rows = min(rows, most)
    if not rotated:
        vector = tile.fitting_vector(block // halves, rows, vector)
    return TileLayout(rows, block, halves, rotated, vector)


def _common(vector: int, offsets: list[int]) -> int:
    """Return the length of the longest vector, at most `vector`, that divides all offsets."""
    return math.gcd(vector, *offsets)


def readable(message: UInt8[Array, "n m"] | InPlace, config: TileConfig | None) -> InPlace:
    """Return messages for a kernel to read: unchanged, or copied if that permits longer vectors."""
    there, vector = InPlace.whole(message), (config or tile_config()).vector
    alone = [there.size] if len(there) > 1 else []
    if there.array.size < 2**31 and _common(vector, there.offsets) >= _common(vector, alone):
        return there
    return InPlace.whole(there.cut_out())


def writable(place: Place | None, rows: int, size: int, config: TileConfig | None) -> Place | None:
    """Return where a kernel writes `rows` messages of `size` bytes: `place`, or a new array.

    It is a new array if `place` is None. The result is None if writing into `place` needs shorter
    vectors than writing into a new array: the caller should write a new array and copy it.
    """
    alone, vector = Place((rows, size), 0), (config or tile_config()).vector
    if place is None:
        return alone
    fits = math.prod(place.shape) < 2**31
    fits = fits and _common(vector, place.offsets) >= _common(vector, alone.offsets)
    return place if fits else None


def _below(num: int) -> int:
    """Return the largest power of two that is not above `num`."""
    return 1 << (num.bit_length() - 1)
