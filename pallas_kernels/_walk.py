"""How a kernel walks an array in tiles, and where it can find and leave messages.

A lane moves several neighbours at once, if tiles, rows and messages all begin at multiples of as
many.
"""

from __future__ import annotations

import dataclasses
import math

from jaxtyping import Array, UInt8

from . import _tile as tile
from ._config import TileConfig, tile_config
from ._format import Format
from ._held import Held
from ._in_place import InPlace, Place


@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of an array of `shape` = o, n, i (see `_reference`): each lies in one run.

    Attributes:
        shape: of the array.
        held: a tile.
    """

    shape: tuple[int, int, int]
    held: Held

    @property
    def num(self) -> int:
        """Elements of a piece."""
        return self.shape[0] * self.shape[2]

    @property
    def tiles(self) -> int:
        """Of a run."""
        return self.shape[2] // (self.held.block * self.held.rows)

    @property
    def done(self) -> int:
        """Elements of a run that lie in tiles."""
        return self.tiles * self.held.rows * self.held.block

    @property
    def grid(self) -> int:
        return math.prod(self.shape[:2]) * self.tiles


def plan(
    shape: tuple[int, ...], formats: list[Format], config: TileConfig | None, offsets: list[int]
) -> Walk | None:
    """How to walk an array, whose rows start at multiples of `offsets`; None: it cannot be."""
    outer, pieces, inner = shape
    block = formats[0].block
    config = config or tile_config()
    blocks = inner // block
    if blocks == 0 or (outer > 1 and inner % block):
        return None
    # Tiles share out a run without rest; or, if lanes then move more at once and nothing comes
    # behind the run, what is left at its end is for XLA.
    numbers = [blocks & -blocks]
    if outer == 1 and len(formats) == 1:
        numbers.append(_below(blocks))
    tiles = [_held(rows, formats, config, _common(config.vector, offsets)) for rows in numbers]
    best = max(tiles, key=lambda held: held.vector if held.is_possible else 0)
    return Walk((outer, pieces, inner), best) if best.is_possible else None


def _held(most: int, formats: list[Format], config: TileConfig, vector: int) -> Held:
    """A tile of `most` blocks at most."""
    block = formats[0].block
    halves = max(format.codes_per_byte for format in formats)
    rotated = formats[0].hadamard is not None
    rows = max(1, config.elements // block)
    if rotated:
        rows = max(rows, Held(1, block, halves, True, vector).shape.multiple)
    rows = min(rows, most)
    if not rotated:
        vector = tile.fitting_vector(block // halves, rows, vector)
    return Held(rows, block, halves, rotated, vector)


def _common(vector: int, offsets: list[int]) -> int:
    """The longest vector, at most `vector`, that divides all offsets."""
    return math.gcd(vector, *offsets)


def readable(message: UInt8[Array, "n m"] | InPlace, config: TileConfig | None) -> InPlace:
    """Messages as a kernel reads them: in place, unless it would read less at once there."""
    there, vector = InPlace.whole(message), (config or tile_config()).vector
    alone = [there.size] if len(there) > 1 else []
    if there.array.size < 2**31 and _common(vector, there.offsets) >= _common(vector, alone):
        return there
    return InPlace.whole(there.cut_out())


def writable(place: Place | None, rows: int, size: int, config: TileConfig | None) -> Place | None:
    """Where a kernel writes messages of `size` bytes; None: it would write less at once there."""
    alone, vector = Place((rows, size), 0), (config or tile_config()).vector
    if place is None:
        return alone
    fits = math.prod(place.shape) < 2**31
    fits = fits and _common(vector, place.offsets) >= _common(vector, alone.offsets)
    return place if fits else None


def _below(num: int) -> int:
    """The largest power of two that is not above `num`."""
    return 1 << (num.bit_length() - 1)
