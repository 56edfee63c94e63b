"""Sizes of tiles, and which implementation is the default.

No row of a benchmark on a GPU exists yet: the sizes were chosen by reading what the compiler
makes of the kernels (no spilled registers, accesses of 16 bytes), and `xla` is the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax

Implementation = Literal["xla", "mosaic_gpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
    """What one warpgroup, four warps, handles at once.

    There are no stages: a tile is loaded into registers at once, and as many warpgroups as
    fit on a multiprocessor hide each other's waiting.

    Args:
        elements: numbers in a tile, a power of two. More, if a block or the lanes need it.
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


# By the start of a device's name, such as "NVIDIA H200"; "" is every other. Chosen from what the
# compiler makes of them, not measured.
TILES: Mapping[str, TileConfig] = {"": TileConfig()}

# On every platform, until rows of `benchmarks/measured/kernels.py` show that kernels are faster.
DEFAULT: Implementation = "xla"


def tile_config(device_kind: str | None = None) -> TileConfig:
    """What is known to suit a device best; by default this process's first one."""
    device_kind = jax.local_devices()[0].device_kind if device_kind is None else device_kind
    return TILES[max((name for name in TILES if device_kind.startswith(name)), key=len)]
