"""Sizes of tiles, and which implementation is the default where.

No row of a benchmark on a GPU exists yet: the sizes were chosen by reading what the compiler
makes of the kernels (no spilled registers, accesses of 16 bytes), and `xla` is the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ._format import Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
    """What one warpgroup, four warps, handles at once.

    There are no stages: a tile is loaded into registers at once, and as many warpgroups as
    fit on a multiprocessor hide each other's waiting.

    Args:
        elements: numbers in a tile, a power of two. Rounded up to a block.
        vector: neighbours that a lane loads at once, a power of two.

    Raises:
        ValueError: one of them is not a power of two.
    """

    elements: int = 4096
    vector: int = 8

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1 or value & (value - 1):
                raise ValueError(f"`{name}` must be a power of two; got {value!r}.")


# By the start of the device's name; chosen from PTX, not measured.
TILES: Mapping[str, TileConfig] = {"": TileConfig()}
ROTATED_TILES: Mapping[str, TileConfig] = {"": TileConfig(elements=8192)}

# By platform; what is not named takes `xla`. A platform is named here once rows of
# `benchmarks/kernels.py` show that its kernels are never slower.
DEFAULTS: Mapping[str, str] = {}


def tile_config(format: Format, device_kind: str = "") -> TileConfig:
    """What is known to suit a device best."""
    table = ROTATED_TILES if format.hadamard else TILES
    names = [name for name in table if device_kind.startswith(name)]
    return table[max(names, key=len)]
