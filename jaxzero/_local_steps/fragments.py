"""Fragments of parameters: equal parts of each device's shards, and the message of a fragment.

A device's shard of a leaf is cut into parts, one for each fragment. A message holds the
pseudo-gradients of one fragment, of all leaves, and is a single array: only then does XLA:GPU keep
its collective under way across a loop. With codes and scales in separate arrays, XLA:GPU would wait
for the collectives before the loop.

A message with codes is an array of bytes: each node gathers the messages of all nodes, decodes
them, and adds them up in the order of nodes. A message without codes is an array of floats if there
are more than two nodes, and an all-reduce sums it over nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from .._codecs import Codec, as_bytes, from_bytes
from .._mesh import AXES, NODE, device_index
from ..pallas_kernels import add_up


@dataclasses.dataclass(frozen=True)
class Cut:
    """The division of a shard into equal parts along one dim.

    If the number of parts does not divide the cut dim, the last parts begin earlier and overlap
    with those before them; `is_new` tells which elements belong to a part. A scalar is one
    part, and belongs to the first fragment.

    Attributes:
        shape: the shape of the shard.
        dim: the cut dim.
        num: the number of parts.
    """

    shape: tuple[int, ...]
    dim: int
    num: int

    @classmethod
    def of(cls, shape: tuple[int, ...], num: int) -> Cut:
        """Cut a shard of `shape` into `num` parts, along the first dim that divides evenly.

        If no dim does, the largest dim is cut. The first dim of a stack counts layers, so a part of
        a stack has whole layers if `num` divides their number.
        """
        even = [dim for dim, size in enumerate(shape) if size and size % num == 0]
        largest = max(range(len(shape)), key=lambda dim: shape[dim], default=0)
        return cls(shape, even[0] if even else largest, num)

    @property
    def size(self) -> int:
        """The size of a part along the cut dim."""
        return math.ceil(self.shape[self.dim] / self.num) if self.shape else 1

    @property
    def part_shape(self) -> tuple[int, ...]:
        if not self.shape:
            return ()
        return (*self.shape[: self.dim], self.size, *self.shape[self.dim + 1 :])

    @property
    def _is_all(self) -> bool:
        return self.part_shape == self.shape

    def _start(self, number: Array) -> Array:
        return jnp.minimum(number * self.size, self.shape[self.dim] - self.size)

    def read(self, x: Shaped[Array, ...], number: Array) -> Shaped[Array, ...]:
        """Return part `number` of the shard `x`."""
        if self._is_all:
            return x
        return lax.dynamic_slice_in_dim(x, self._start(number), self.size, self.dim)

    def write(
        self, x: Shaped[Array, ...], part: Shaped[Array, ...], number: Array
    ) -> Shaped[Array, ...]:
        """Return the shard `x` with part `number` replaced by `part`, where `is_new`."""
        new = self.is_new(number)
        if new is not None:
            part = jnp.where(new, part, self.read(x, number))
        if self._is_all:
            return part
        return lax.dynamic_update_slice_in_dim(x, part, self._start(number), self.dim)

    def is_new(self, number: Array) -> Bool[Array, ...] | None:
        """Return a mask of the elements of part `number` that no earlier part holds; None: all."""
        if not self.shape:
            return number == 0 if self.num > 1 else None
        if self.shape[self.dim] % self.num == 0:
            return None
        position = lax.broadcasted_iota(jnp.int32, self.part_shape, self.dim)
        return self._start(number) + position >= number * self.size


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a message that holds one leaf: its shape, dtype and encoding.

    Attributes:
        shape: the shape of the part of this device's shard.
        dtype: the dtype of the pseudo-gradient: float32, or float64 for parameters of float64.
        codec: encodes the pseudo-gradient; None: it is sent as floats.
        is_split: whether the devices of a node have different shards. Otherwise they encode the
            same numbers, and must round them alike.
        in_floats: the dtype of a message of floats, which JAX can differentiate; None: the message
            is an array of bytes.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    codec: Codec | None
    is_split: bool
    in_floats: jnp.dtype | None = None

    @property
    def num(self) -> int:
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """The number of elements of the message that this leaf takes: bytes, or floats."""
        return self.num_bytes if self.in_floats is None else self.num

    @property
    def num_bytes(self) -> int:
        if self.in_floats is not None:
            return self.num * self.in_floats.itemsize
        if self.codec is None:
            return self.num * self.dtype.itemsize
        return self.codec.num_bytes(self.num, self.dtype)

    def encode(self, x: Float[Array, ...]) -> Shaped[Array, "1 _"]:
        row = x.reshape(1, self.num)
        if self.in_floats is not None:
            return row.astype(self.in_floats)
        if self.codec is None:
            return as_bytes(row)
        seed = device_index(AXES if self.is_split else (NODE,))
        return as_bytes(self.codec.encode_rows(row, seed=seed))

    def decode(self, rows: Shaped[Array, "n _"]) -> Float[Array, ...]:
        """Decode this leaf's columns of n messages to its arrays, `[n, *shape]`."""
        if self.in_floats is not None:
            decoded = rows.astype(self.dtype)
        elif self.codec is None:
            decoded = from_bytes(rows, self.dtype)
        else:
            message = from_bytes(rows, self.codec.message(self.num, self.dtype).dtype)
            decoded = self.codec.decode_rows(message, self.num, self.dtype)
        return decoded.reshape(len(rows), *self.shape)


def encode(parts: Sequence[Part], arrays: Sequence[Float[Array, ...]]) -> Shaped[Array, "1 m"]:
    """Encode arrays, one for each of `parts`, and join them to one message."""
    rows = [part.encode(x) for part, x in zip(parts, arrays, strict=True)]
    # Keeps XLA from moving the encoding across the collective.
    return lax.optimization_barrier(jnp.concatenate(rows, axis=1))


def decode(parts: Sequence[Part], message: Shaped[Array, "n m"]) -> list[Float[Array, ...]]:
    """Decode n messages; return, for each of `parts`, an array `[n, *shape]`."""
    arrays, start = [], 0
    for part in parts:
        stop = start + part.columns
        arrays.append(part.decode(lax.slice_in_dim(message, start, stop, axis=1)))
        start = stop
    return arrays


def mean_of_nodes(
    parts: Sequence[Part], messages: Shaped[Array, "rows m"], num_nodes: int
) -> list[Float[Array, ...]]:
    """Decode messages; return, for each of `parts`, the mean over nodes.

    `messages` has a row for each node, or one row that is their sum. Rows are added in the order of
    nodes, so that all nodes get the same bits.
    """
    return [add_up(x) / jnp.asarray(num_nodes, x.dtype) for x in decode(parts, messages)]
