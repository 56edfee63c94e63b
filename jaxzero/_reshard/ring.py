"""`RingMove`: the path between processes of CPUs, whose parts run while others are sent.

Most moves have one step between processes, an all-gather between nodes. Devices of one process
share memory, so the steps before it and after it need no collective:

    before: each device cuts its row of the gather from the shards of its process     by itself
    across: a loop of permutations fills the rows of the other nodes                  together
    after:  each device makes its part of the result of the rows of its process       by itself

XLA's CPU runtime executes programs over several devices one after another, and others beside them.
So the link is idle only between the loops of two windows, while a program with all three parts
leaves it idle in each `before` and `after`.
"""

from __future__ import annotations

import dataclasses
import functools
import math

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

    @property
    def before(self) -> tuple[Step, ...]:
        return self.steps[: self.at]

    @property
    def across(self) -> Step:
        return self.steps[self.at]

    @property
    def after(self) -> tuple[Step, ...]:
        return self.steps[self.at + 1 :]

    @classmethod
    def of(cls, move: Move, mesh: Mesh) -> RingMove | None:
        """The same move in this form; None if it has other steps between processes, or none."""
        crossing = [i for i, step in enumerate(move.steps) if _crosses(step, mesh)]
        if len(crossing) != 1 or move.steps[crossing[0]].kind != "gather":
            return None
        # Without its path: arrays of the same shape share programs.
        leaf = dataclasses.replace(move.leaf, path="")
        return cls(leaf, move.block, move.route, move.dtype, move.codec, crossing[0])

    def sources(self, device: int, mesh: Mesh) -> tuple[int, ...]:
        """The devices of whose shards a device cuts its row."""
        return tuple(sorted(in_memory.needed([device], self.before, mesh)))

    def givers(self, device: int, mesh: Mesh) -> tuple[int, ...]:
        """The devices of whose rows a device makes its part of the result."""
        return tuple(sorted(in_memory.needed([device], self.after, mesh)))

    def start(self, shards: Pieces, device: int, mesh: Mesh) -> Shaped[Array, "K ..."]:
        """Rows for all devices along the step between processes, of which the own is filled.

        Args:
            shards: of the stored array; those of `sources`.
            device: its number in `mesh`.
            mesh: the digits of the devices.
        """
        pieces = {i: self.pieces_of(x) for i, x in shards.items()}
        for step in self.before:
            pieces = in_memory.take(step, pieces, mesh)
        row = row_of(pieces[device], self.across)
        sizes = tuple(mesh.shape[digit] for digit in self.across.digits)
        place = np.unravel_index(device, tuple(mesh.shape.values()))
        own = [place[mesh.axis_names.index(digit)] for digit in self.across.digits]
        rows = jnp.zeros((math.prod(sizes), *row.shape), row.dtype)
        return rows.at[int(np.ravel_multi_index(own, sizes))].set(row)

    def finish(self, rows: Pieces, device: int, mesh: Mesh) -> Shaped[Array, "..."]:
        """A device's part of the result.

        Args:
            rows: all filled; those of `givers`.
            device: its number in `mesh`.
            mesh: the digits of the devices.
        """
        pieces = {i: from_all(x, self.across, mesh) for i, x in rows.items()}
        for step in self.after:
            pieces = in_memory.take(step, pieces, mesh)
        return self.joined(pieces[device])


@functools.lru_cache(maxsize=512)
def rows_of(move: RingMove, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the rows of a device."""
    shard = jax.ShapeDtypeStruct(move.block, move.leaf.stored.dtype)
    shards = dict.fromkeys(move.sources(0, mesh), shard)
    return jax.eval_shape(lambda shards: move.start(shards, 0, mesh), shards)


def process_of(device: jax.Device) -> int:
    """The process whose memory a device has."""
    return device.process_index


def _crosses(step: Step, mesh: Mesh) -> bool:
    """Whether a step sends between processes."""
    processes = np.array([process_of(device) for device in mesh.devices.flat])
    of_groups = processes[groups(step.digits, mesh)]
    return step.kind != "slice" and bool((of_groups != of_groups[:, :1]).any())
