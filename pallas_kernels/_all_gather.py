"""All-gather of quantized numbers as one kernel: compiles, never executed.

Each tile of this device is read and quantized once, and its codes are stored into the inboxes
of all devices; each tile that arrives is decoded to its place in the gathered array, while
later ones are on their way. What may happen when is said, and why, in `_protocol`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from jax import Array, lax
from jaxtyping import Float, UInt32

from ._format import Format
from ._remote import Block, Plan, RemoteConfig, clipped, run


class AllGather(Block):
    """A block of the kernel."""

    name: ClassVar[str] = "quantized_all_gather"

    def write(self, tile: Any, slot: Any) -> None:
        codes_b, scale_r = self.encoded(self.of_piece(self.source, 0, tile), tile)
        self.to_peers(lambda peer: self.put(peer, slot, codes_b, scale_r))

    def read(self, peer: int, tile: Any, slot: Any, so_far: None) -> None:
        parts_w = [clipped(x_w, self.result.dtype) for x_w in self.take(peer, slot)]
        self.keep(self.of_piece(self.result, peer, tile), parts_w)

    def store(self, tile: Any, total: None) -> None:
        """All is done: every tile was kept when it was read."""


def all_gather(
    x_oi: Float[Array, "o i"],
    axis: str,
    format: Format,
    seed: UInt32[Array, ""],
    config: RemoteConfig,
) -> Float[Array, "o n i"]:
    """As the reference in `_collectives`; compiles, never executed."""
    outer, inner = x_oi.shape
    plan = Plan.of(outer, inner, format, config)
    source = plan.cut(x_oi[:, None])
    runs, _, *tiles = source.shape
    result = jax.ShapeDtypeStruct((runs, lax.axis_size(axis), *tiles), x_oi.dtype)
    return plan.join(run(AllGather, source, seed, result, axis, plan), outer)
