"""Compute the rows of a global batch that one process reads.

A process reads the rows that the sharding of the batch assigns to its devices, each row once and
in ascending order. The B rows of batch b are elements b * B to (b + 1) * B - 1 of the dataset, for
any number of processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from jax.sharding import Sharding
from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class HostRows:
    """The rows that one process reads of every batch.

    Attributes:
        batch_size: rows of a global batch.
        numbers: indices of the rows, ascending and unique.
    """

    batch_size: int
    numbers: Int[np.ndarray, " rows"]

    @classmethod
    def of_sharding(cls, sharding: Sharding, batch_size: int) -> HostRows:
        """The rows of this process, for global batches whose dim 0 has this sharding."""
        held = sharding.addressable_devices_indices_map((batch_size,))
        return cls.of_pieces([index[0] for index in held.values() if index], batch_size)

    @classmethod
    def of_pieces(cls, pieces: Iterable[slice], batch_size: int) -> HostRows:
        """The rows that a process reads if its devices hold these slices, which may overlap."""
        ranges = [np.arange(batch_size)[piece] for piece in pieces]
        return cls(batch_size, np.unique(np.concatenate([np.arange(0), *ranges])))

    def __len__(self) -> int:
        return len(self.numbers)

    def element(self, turn: int) -> int:
        """Index in the dataset of the element number `turn`, from 0, that this process reads."""
        batch, place = divmod(turn, len(self.numbers))
        return batch * self.batch_size + int(self.numbers[place])

    def place(self, piece: slice) -> slice:
        """Convert a slice of a batch's rows to a slice of the rows that this process reads."""
        start, stop, _ = piece.indices(self.batch_size)
        first = int(np.searchsorted(self.numbers, start))
        return slice(first, first + stop - start)
