"""Reduce-scatter of quantized numbers as one kernel: compiles, never executed.

A device reads each tile once, quantizes it, and stores its codes into the inbox of the device that
owns that shard of the sum. Once a tile has arrived from all devices, the owner decodes and sums it
in float32, in the order of the devices, while later tiles are in flight. `_protocol` describes the
synchronization and why it is correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, UInt32

from ._format import Format
from ._remote import Block, RemoteConfig, Tiling, run
from ._tile import clipped


class ReduceScatter(Block):
    """The operations of a thread block of the reduce-scatter kernel."""

    name: ClassVar[str] = "quantized_reduce_scatter"

    def write(self, tile: Any, slot: Any) -> None:
        def send(peer: Any) -> None:
            self.put(peer, slot, *self.encoded(self.of_piece(self.source, peer, tile), tile))

        self.to_peers(send)

    def read(self, peer: int, tile: Any, slot: Any, so_far: Any) -> list[Array]:
        parts_w = [clipped(x_w, jnp.float32) for x_w in self.take(peer, slot)]
        if so_far is None:
            return parts_w
        return [total_w + x_w for total_w, x_w in zip(so_far, parts_w, strict=True)]

    def store(self, tile: Any, total: list[Array]) -> None:
        self.keep(self.of_piece(self.result, 0, tile), total)


def reduce_scatter(
    x_oni: Float[Array, "o n i"],
    axis: str,
    format: Format,
    seed: UInt32[Array, ""],
    config: RemoteConfig,
    parts: Sequence[int] = (),
) -> Float32[Array, "o i"]:
    """Reduce-scatter `x_oni` by one kernel, which compiles, never executed.

    The result is that of `_collectives.scatter_reference`.
    """
    outer, _, inner = x_oni.shape
    tiling = Tiling.of(outer, inner, format, config, parts)
    source = tiling.cut(x_oni)
    runs, _, *tiles = source.shape
    result = jax.ShapeDtypeStruct((runs, 1, *tiles), jnp.float32)
    return tiling.join(run(ReduceScatter, source, seed, result, axis, tiling), outer)[:, 0]
