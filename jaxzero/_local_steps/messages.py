"""The message of a fragment: pseudo-gradients of all leaves, encoded, as one array of bytes.

It is one array because XLA:GPU keeps a collective under way across a loop only then: with codes and
scales in arrays of their own, or as an all-reduce, it waits for them before the loop. So a node
gathers the messages of all nodes, and adds them up itself, in the order of nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from .._codecs import Codec, as_bytes, from_bytes
from .._mesh import AXES, NODE, device_index
from ..pallas_kernels import add_up


@dataclasses.dataclass(frozen=True)
class Part:
    """One leaf's part in the message.

    Attributes:
        shape: of the part of this device's shard.
        dtype: of the pseudo-gradient: float32, or float64 for parameters of float64.
        codec: None sends it as it is.
        is_split: whether the devices of a node have different shards. Otherwise they encode the
            same numbers, and must round them alike.
        in_floats: of this dtype the message is, which then has tangents; None: it is of bytes.
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
        """The number of elements in the message."""
        return self.num_bytes if self.in_floats is None else self.num

    @property
    def num_bytes(self) -> int:
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
        """The array of each row, `[n, *shape]`."""
        if self.in_floats is not None:
            x = rows.astype(self.dtype)
        elif self.codec is None:
            x = from_bytes(rows, self.dtype)
        else:
            message = from_bytes(rows, self.codec.message(self.num, self.dtype).dtype)
            x = self.codec.decode_rows(message, self.num, self.dtype)
        return x.reshape(len(rows), *self.shape)


def encode(parts: Sequence[Part], arrays: Sequence[Float[Array, ...]]) -> Shaped[Array, "1 m"]:
    """Encode the arrays, one for each part, as one message."""
    rows = [part.encode(x) for part, x in zip(parts, arrays, strict=True)]
    # Keeps XLA from moving the encoding across the collective.
    return lax.optimization_barrier(jnp.concatenate(rows, axis=1))


def decode(parts: Sequence[Part], message: Shaped[Array, "n m"]) -> list[Float[Array, ...]]:
    """Decode messages: for each part the arrays of all rows, `[n, *shape]`."""
    arrays, start = [], 0
    for part in parts:
        stop = start + part.columns
        arrays.append(part.decode(lax.slice_in_dim(message, start, stop, axis=1)))
        start = stop
    return arrays


def mean_of_nodes(
    parts: Sequence[Part], messages: Shaped[Array, "nodes m"]
) -> list[Float[Array, ...]]:
    """The mean over nodes of each part, added up in the order of nodes, the same on every node."""
    return [add_up(x) / jnp.asarray(len(messages), x.dtype) for x in decode(parts, messages)]
