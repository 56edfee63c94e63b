"""Tile sizes of the kernels, and the default implementation.

No benchmark has run on a GPU yet. The sizes were chosen from the compiled kernels (no spilled
registers, accesses of 16 bytes), and `xla` is the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax

Implementation = Literal["xla", "mosaic_gpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Size of the tile that one warpgroup (four warps) handles at a time.

    Kernels are not pipelined: a tile is loaded into registers at once, and memory latency is
    hidden by the other warpgroups of the multiprocessor.

    Args:
        elements: numbers in a tile, a power of two. Tiles have more if one quantization block is
            larger, or if fewer would leave lanes without numbers.
        vector: consecutive elements that a lane loads at once, a power of two.

    Raises:
        ValueError: a size is not a power of two.
    """

    elements: int = 4096
    vector: int = 8

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1 or value & (value - 1):
                raise ValueError(f"`{name}` must be a power of two; got {value!r}.")


# Keys are prefixes of device kinds, such as "NVIDIA H200"; "" matches every device. The sizes
# were chosen from compiled kernels, not measured.
TILES: Mapping[str, TileConfig] = {"": TileConfig()}

# XLA, until rows of `benchmarks/measured/kernels.py` show that GPU kernels are faster. In programs
# for TPUs, `_column_choice` uses TPU kernels unless an implementation is named.
DEFAULT: Implementation = "xla"


def tile_config(device_kind: str | None = None) -> TileConfig:
    """Return tile sizes for a device kind such as "NVIDIA H200"; by default the first device's."""
    device_kind = jax.local_devices()[0].device_kind if device_kind is None else device_kind
    return TILES[max((name for name in TILES if device_kind.startswith(name)), key=len)]
