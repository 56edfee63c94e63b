"""Which rows of a global batch one process reads.

A batch of B rows is split over devices as its sharding says, and a process holds some of the
devices: the rows that it reads are those that any of them holds, each once, in order. In the
dataset the rows of batch b are elements b * B to (b + 1) * B, whatever the number of processes.
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
        numbers: of the rows, ascending; each is in it once.
    """

    batch_size: int
    numbers: Int[np.ndarray, rows]

    @classmethod
    def of_sharding(cls, sharding: Sharding, batch_size: int) -> HostRows:
        """What this process reads of batches that are laid out so: dim 0 is that of the rows."""
        held = sharding.addressable_devices_indices_map((batch_size,))
        return cls.of_pieces([index[0] for index in held.values() if index], batch_size)

    @classmethod
    def of_pieces(cls, pieces: Iterable[slice], batch_size: int) -> HostRows:
        """What is read for devices that hold these rows; two may hold the same."""
        ranges = [np.arange(batch_size)[piece] for piece in pieces]
        return cls(batch_size, np.unique(np.concatenate([np.arange(0), *ranges])))

    def __len__(self) -> int:
        return len(self.numbers)

    def element(self, turn: int) -> int:
        """Which element of the dataset is read in its turn, over all batches from the first."""
        batch, place = divmod(turn, len(self.numbers))
        return batch * self.batch_size + int(self.numbers[place])

    def place(self, piece: slice) -> slice:
        """Where a device's rows lie among those that are read of a batch."""
        start, stop, _ = piece.indices(self.batch_size)
        first = int(np.searchsorted(self.numbers, start))
        return slice(first, first + stop - start)
