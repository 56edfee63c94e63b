"""All-gather of quantized numbers as one kernel: compiles, never executed.

Each device reads each of its tiles once, quantizes it, and stores the codes into the inboxes of all
devices. It decodes each tile that arrives into the gathered array while later tiles are in flight.
`_protocol` describes the synchronization and why it is correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax import Array, lax
from jaxtyping import DTypeLike, Float, UInt32

from ._format import Format
from ._remote import Block, RemoteConfig, Tiling, run
from ._tile import clipped


class AllGather(Block):
    """The operations of a thread block of the all-gather kernel."""

    name: ClassVar[str] = "quantized_all_gather"

    def write(self, tile: Any, slot: Any) -> None:
        codes_b, scale_r = self.encoded(self.of_piece(self.source, 0, tile), tile)
        self.to_peers(lambda peer: self.put(peer, slot, codes_b, scale_r))

    def read(self, peer: int, tile: Any, slot: Any, so_far: None) -> None:
        parts_w = [clipped(x_w, self.result.dtype) for x_w in self.take(peer, slot)]
        self.keep(self.of_piece(self.result, peer, tile), parts_w)

    def store(self, tile: Any, total: None) -> None:
        """Do nothing: `read` has stored every tile already."""


def all_gather(
    x_oi: Float[Array, "o i"],
    axis: str,
    format: Format,
    seed: UInt32[Array, ""],
    config: RemoteConfig,
    dtype: DTypeLike,
    parts: Sequence[int] = (),
) -> Float[Array, "o n i"]:
    """All-gather `x_oi` by one kernel, which compiles, never executed.

    The result is that of `_collectives.gather_reference`.
    """
    outer, inner = x_oi.shape
    tiling = Tiling.of(outer, inner, format, config, parts)
    source = tiling.cut(x_oi[:, None])
    runs, _, *tiles = source.shape
    result = jax.ShapeDtypeStruct((runs, lax.axis_size(axis), *tiles), dtype)
    return tiling.join(run(AllGather, source, seed, result, axis, tiling), outer)
