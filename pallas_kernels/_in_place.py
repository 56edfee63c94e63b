"""Describe messages that are columns of a larger array, as in a bucket of a collective.

A kernel reads messages from that array, or writes them into it, without a copy of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped, UInt8


@dataclasses.dataclass(frozen=True)
class InPlace:
    """Messages to read: `count` of them side by side in each row of an array.

    Attributes:
        array: the array that contains the messages.
        start: column where the first message of a row begins.
        size: columns per message.
        count: messages per row. They are numbered row by row.
    """

    array: Shaped[Array, "rows columns"]
    start: int
    size: int
    count: int = 1

    @classmethod
    def whole(cls, messages: Shaped[Array, "n m"] | InPlace) -> InPlace:
        """Return an `InPlace` for an array whose rows are messages; an `InPlace` is unchanged."""
        return messages if isinstance(messages, InPlace) else cls(messages, 0, messages.shape[1])

    def __len__(self) -> int:
        return len(self.array) * self.count

    def rows(self, number: int) -> InPlace:
        """Return the messages in the first `number` rows of the array."""
        return dataclasses.replace(self, array=lax.slice_in_dim(self.array, 0, number))

    @property
    def offsets(self) -> list[int]:
        """Start and strides of messages, in elements of the flattened array.

        Each message begins at a sum of multiples of these numbers, so a lane can load `v` elements
        of it at once only if `v` divides all of them.
        """
        pitch = [self.array.shape[1]] if len(self.array) > 1 else []
        return [self.start, *pitch, *([self.size] if self.count > 1 else [])]

    def begin(self, number: Any) -> Any:
        """Return the index of the first element of message `number` in the flattened array."""
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
        """Return the messages as an array of their own, [messages, size], for XLA to read."""
        stop = self.start + self.count * self.size
        columns = self.array
        if stop - self.start < columns.shape[1]:
            columns = lax.slice_in_dim(columns, self.start, stop, axis=1)
        return columns if self.count == 1 else columns.reshape(len(self), self.size)


@dataclasses.dataclass(frozen=True)
class Place:
    """Columns of an array that receive messages, one message per row.

    Attributes:
        shape: shape of the array.
        start: first of the columns.
        array: array to update; its other columns are kept. None for a new array, whose
            other columns are undefined.
    """

    shape: tuple[int, int]
    start: int
    array: UInt8[Array, "n _"] | None = None

    @property
    def offsets(self) -> list[int]:
        """Start and stride of messages in the flattened array, as in `InPlace.offsets`."""
        return [self.start, *(self.shape[1:] if self.shape[0] > 1 else ())]

    def put(self, message: UInt8[Array, "n m"], first: int = 0) -> UInt8[Array, "n _"]:
        """Return the larger array with `message` in its columns from `start + first` on."""
        array = jnp.zeros(self.shape, message.dtype) if self.array is None else self.array
        return lax.dynamic_update_slice(array, message, (0, self.start + first))


def cut_out(messages: Shaped[Array, "n m"] | InPlace) -> Shaped[Array, "n m"]:
    """Return messages as an array of their own, [messages, size]."""
    return messages.cut_out() if isinstance(messages, InPlace) else messages
