"""`RingMove`: the path between processes of CPUs, whose parts run while others are sent.

Most moves have one step between processes, an all-gather between nodes. Devices of one process
share memory, so the steps before it and after it need no collective:

    start:  each device cuts the rows that it sends from the shards of its process      by itself
    across: each device sends its row to those of its line, and receives theirs         `channels`
    finish: each device makes its part of the result of what its process has received   by itself

So the link is busy while devices cut and join arrays, and idle only between two messages.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from . import in_memory
from .digits import groups
from .in_memory import Pieces
from .move import Move, from_all, row_of
from .steps import Step


@dataclasses.dataclass(frozen=True)
class RingMove(Move):
    """A move whose only step between processes is an all-gather.

    Attributes:
        at: the index of that step.
    """

    at: int

    @classmethod
    def of(cls, move: Move, mesh: Mesh) -> RingMove | None:
        """The same move in this form.

        Returns:
            None if the move has other steps between processes, or none; or if processes have one
            device each and two of them send to each other: what `gloo_workaround` does then fills
            the link better than one message at a time.
        """
        crossing = [i for i, step in enumerate(move.steps) if _crosses(step, mesh)]
        if len(crossing) != 1 or move.steps[crossing[0]].kind != "gather":
            return None
        processes = _processes(mesh)[groups(move.steps[crossing[0]].digits, mesh)]
        are_even = processes.shape[1] % 2 == 0
        if are_even and any((processes == line).all(axis=1).sum() == 1 for line in processes):
            return None
        # Without its path: arrays of the same shape share programs.
        leaf = dataclasses.replace(move.leaf, path="")
        return cls(leaf, move.block, move.route, move.dtype, move.codec, crossing[0])

    @property
    def before(self) -> tuple[Step, ...]:
        """The steps inside processes by which rows are made."""
        return self.steps[: self.at]

    @property
    def across(self) -> Step:
        """The step between processes."""
        return self.steps[self.at]

    @property
    def after(self) -> tuple[Step, ...]:
        """The steps that follow the all-gather between processes; each stays inside a process."""
        return self.steps[self.at + 1 :]

    def rows(
        self, shards: Pieces, devices: tuple[int, ...], mesh: Mesh
    ) -> list[Shaped[Array, " row"]]:
        """What each of some devices gives to the all-gather.

        Args:
            shards: of the stored array, on all devices that decide these rows.
            devices: their numbers in `mesh`.
            mesh: the digits of the devices.
        """
        pieces = {i: self.pieces_of(x) for i, x in shards.items()}
        for step in self.before:
            pieces = in_memory.take(step, pieces, mesh)
        return [row_of(pieces[i], self.across).reshape(-1) for i in devices]

    def result(
        self,
        shards: Pieces,
        received: dict[int, list[Shaped[Array, " row"]]],
        device: int,
        mesh: Mesh,
    ) -> Shaped[Array, ...]:
        """A device's part of the result.

        Args:
            shards: of the stored array, on all devices that decide the rows of those below.
            received: for each device that decides the result, the rows that it received, by the
                distance of their senders.
            device: its number in `mesh`.
            mesh: the digits of the devices.
        """
        shape, pieces = row_shape(self, mesh).shape, {}
        for giver, own in zip(received, self.rows(shards, tuple(received), mesh), strict=True):
            _, node = np.argwhere(groups(self.across.digits, mesh) == giver)[0]
            rows = [own, *received[giver]]  # of the own node, the one before it, and so on
            full = jnp.stack(
                [rows[(node - i) % len(rows)].reshape(shape) for i in range(len(rows))]
            )
            pieces[giver] = from_all(full, self.across, mesh)
        for step in self.after:
            pieces = in_memory.take(step, pieces, mesh)
        return self.joined(pieces[device])


@functools.lru_cache(maxsize=512)
def row_shape(move: RingMove, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the row of a device in the gather between processes."""

    def row(shard: Array) -> Array:
        pieces = move.pieces_of(shard)
        found = dict.fromkeys(in_memory.needed([0], move.before, mesh), pieces)
        for step in move.before:
            found = in_memory.take(step, found, mesh)
        return row_of(found[0], move.across)

    return jax.eval_shape(row, jax.ShapeDtypeStruct(move.block, move.leaf.stored.dtype))


def process_of(device: Any) -> int:
    """The process whose memory a device has."""
    return device.process_index


def _processes(mesh: Mesh) -> np.ndarray:
    return np.array([process_of(device) for device in mesh.devices.flat])


def _crosses(step: Step, mesh: Mesh) -> bool:
    """Whether a step sends between processes."""
    found = _processes(mesh)[groups(step.digits, mesh)]
    return step.kind != "slice" and bool((found != found[:, :1]).any())
