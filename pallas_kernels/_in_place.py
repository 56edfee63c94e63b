"""Messages inside a larger array, such as those that share a collective with others.

A kernel reads them where they lie, and writes them where they are to be, and needs no copy of
them before it starts or after it ends.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped, UInt8


@dataclasses.dataclass(frozen=True)
class InPlace:
    """Columns of an array, which hold messages: `count` of them side by side in each row.

    Attributes:
        array: that they lie in.
        start: the column where the first one begins.
        size: of each, in columns.
        count: of them in a row. They are numbered row by row.
    """

    array: Shaped[Array, "rows columns"]
    start: int
    size: int
    count: int = 1

    @classmethod
    def whole(cls, messages: Shaped[Array, "n m"] | InPlace) -> InPlace:
        """An array of messages as it is, if they are not in place already."""
        return messages if isinstance(messages, InPlace) else cls(messages, 0, messages.shape[1])

    def __len__(self) -> int:
        return len(self.array) * self.count

    def rows(self, number: int) -> InPlace:
        """The messages in the first `number` rows."""
        return dataclasses.replace(self, array=lax.slice_in_dim(self.array, 0, number))

    @property
    def offsets(self) -> list[int]:
        """The numbers of which multiples, added up, are where messages begin."""
        pitch = [self.array.shape[1]] if len(self.array) > 1 else []
        return [self.start, *pitch, *([self.size] if self.count > 1 else [])]

    def begin(self, number: Any) -> Any:
        """Where message `number` begins in the flat array."""
        pitch = self.array.shape[1]
        if self.count == 1:
            return self.start + number * pitch
        if isinstance(number, int):
            row, place = divmod(number, self.count)
        else:
            count = lax.full_like(number, self.count)
            row, place = lax.div(number, count), lax.rem(number, count)
        return self.start + row * pitch + place * self.size

    def cut_out(self) -> Shaped[Array, "n m"]:
        """The messages as an array of their own, as what is not a kernel reads them."""
        stop = self.start + self.count * self.size
        columns = lax.slice_in_dim(self.array, self.start, stop, axis=1)
        return columns if self.count == 1 else columns.reshape(len(self), self.size)


@dataclasses.dataclass(frozen=True)
class Place:
    """Columns of an array, into which messages are to be written: one into each row.

    Attributes:
        shape: of the array.
        start: the first of the columns.
        array: whose other columns stay as they are. None: a new one, whose others are not
            defined.
    """

    shape: tuple[int, int]
    start: int
    array: UInt8[Array, "n _"] | None = None

    @property
    def offsets(self) -> list[int]:
        """As of `InPlace`."""
        return [self.start, *(self.shape[1:] if self.shape[0] > 1 else ())]

    def put(self, message: UInt8[Array, "n m"], first: int = 0) -> UInt8[Array, "n _"]:
        """The array with messages, or what belongs to them from column `first` on, in it."""
        array = jnp.zeros(self.shape, message.dtype) if self.array is None else self.array
        return lax.dynamic_update_slice(array, message, (0, self.start + first))


def cut_out(messages: Shaped[Array, "n m"] | InPlace) -> Shaped[Array, "n m"]:
    """Messages as an array of their own."""
    return messages.cut_out() if isinstance(messages, InPlace) else messages
