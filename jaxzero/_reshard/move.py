"""`Move`: all that one device has to know to move its shard of an array to a new split.

A shard is seen as a grid of pieces, one for each combination of the factors that it has
(see `steps`), each piece a row of numbers or, with a codec, a message. Collectives move rows of
this grid, so that what is sent is encoded once by its owner, and decoded once, where it stays.

Legend: f, g factors before and after, each of its size or of 1 where it is split; m, n numbers of a
piece, or bytes of its message; K devices of a collective.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from .._codecs import Codec, bits_dtype, from_bits, to_bits
from .._collectives import all_gather, all_to_all, from_stored, permute
from .._sharding import LeafSpec
from .steps import Route, Step


@dataclasses.dataclass(frozen=True)
class Move:
    """One array: from the shards that devices have to those that they are to have.

    Attributes:
        leaf: how it is stored: true shape, padding, dtype, the codec of its messages.
        block: shape of a device's shard of the stored array.
        route: the collectives.
        dtype: the type that numbers are sent in, and arrive in.
        codec: encodes what is sent; None sends numbers of `dtype`.
    """

    leaf: LeafSpec
    block: tuple[int, ...]
    route: Route
    dtype: Any
    codec: Codec | None

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.route.steps

    @property
    def inner(self) -> tuple[int, ...]:
        """For each dim of the padded array, how long a piece is."""
        pairs = zip(self.leaf.padded_shape, self.route.factors, strict=True)
        return tuple(size // math.prod(factors) for size, factors in pairs)

    @property
    def message(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a piece as it is sent."""
        num = math.prod(self.inner)
        if self.codec is not None:
            return self.codec.message(num, self.dtype)
        return jax.ShapeDtypeStruct((num,), bits_dtype(self.dtype))

    def grid(self, split: tuple[bool, ...]) -> tuple[int, ...]:
        """How many pieces a device has along each factor, where these are split."""
        pairs = zip(self.route.sizes, split, strict=True)
        return tuple(1 if is_split else size for size, is_split in pairs)

    @property
    def target_block(self) -> tuple[int, ...]:
        """Shape of what a device has in the end."""
        shape = self._by_dim(self.grid(self.route.target))
        pairs = zip(shape, self.leaf.shape, strict=True)
        return tuple(min(size, true) for size, true in pairs)  # without padding

    def run(self, x: Shaped[Array, ...], mesh: Mesh) -> Shaped[Array, ...]:
        """Move a device's shard; inside a `shard_map` over all axes of `mesh`.

        Args:
            x: shard of the stored array, of the shape `block`.
            mesh: the digits of the devices.
        """
        if not self.steps:
            x = shard_of(x, self.leaf).astype(self.dtype)
            return jnp.copy(x[tuple(slice(size) for size in self.target_block)])
        pieces = lax.optimization_barrier(self.pieces_of(x))
        for step in self.steps:
            pieces = _RUN[step.kind](pieces, step, mesh)
        return self.joined(lax.optimization_barrier(pieces))

    def pieces_of(self, x: Shaped[Array, ...]) -> Shaped[Array, "*f n"]:
        """A device's shard of the stored array as the grid of pieces that are sent."""
        x = shard_of(x, self.leaf).astype(self.dtype)
        grid = self.grid(self.route.source)
        shape, order = self._interleaved(grid)
        x = x.reshape(shape).transpose(order).reshape(*grid, math.prod(self.inner))
        return encoded(x, self.codec)

    def joined(self, pieces: Shaped[Array, "*f n"]) -> Shaped[Array, ...]:
        """What a device has in the end, from the grid of pieces that it has got."""
        x = decoded(pieces, self.codec, math.prod(self.inner), self.dtype)
        grid = self.grid(self.route.target)
        _, order = self._interleaved(grid)
        x = x.reshape(*grid, *self.inner).transpose(np.argsort(order))
        return x.reshape(self._by_dim(grid))[tuple(slice(size) for size in self.target_block)]

    def _by_dim(self, grid: tuple[int, ...]) -> list[int]:
        shape, first = [], 0
        for factors, inner in zip(self.route.factors, self.inner, strict=True):
            shape.append(math.prod(grid[first : first + len(factors)]) * inner)
            first += len(factors)
        return shape

    def _interleaved(self, grid: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """The shape with each dim's factors before its rest, and the dims in the order f, rests."""
        shape, of_factors, of_rests, first = [], [], [], 0
        for factors, inner in zip(self.route.factors, self.inner, strict=True):
            of_factors += range(len(shape), len(shape) + len(factors))
            shape += [*grid[first : first + len(factors)], inner]
            of_rests.append(len(shape) - 1)
            first += len(factors)
        return shape, of_factors + of_rests


def shard_of(x: Shaped[Array, ...], leaf: LeafSpec) -> Shaped[Array, ...]:
    """The numbers of a device's shard, decoded if it is stored encoded."""
    return x if leaf.codec is None else from_stored(x, leaf).join()


def encoded(x: Shaped[Array, "*f m"], codec: Codec | None) -> Shaped[Array, "*f n"]:
    """Rows as they are sent.

    Callers put an optimization barrier between this and the collective, or XLA would move a cast
    to after it. Another one belongs between the collective and `decoded`.
    """
    return to_bits(x) if codec is None else codec.encode_rows(x)


def decoded(x: Shaped[Array, "*f n"], codec: Codec | None, num: int, dtype: Any) -> Array:
    """`num` numbers in each row that arrived; the reverse of `encoded`."""
    return from_bits(x, dtype) if codec is None else codec.decode_rows(x, num, dtype)


def _slice(x: Shaped[Array, "*f m"], step: Step, mesh: Mesh) -> Shaped[Array, "*g m"]:
    for digit, factor in zip(step.digits, step.after, strict=True):
        assert factor is not None
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(digit), 1, axis=factor)
    return x


def _exchange(x: Shaped[Array, "*f m"], step: Step, mesh: Mesh) -> Shaped[Array, "*g m"]:
    others = [i for i in range(x.ndim) if i not in step.after]
    x = x.transpose([*step.after, *others])
    sizes = [mesh.shape[digit] for digit in step.digits]
    received = all_to_all(x.reshape(math.prod(sizes), *x.shape[len(sizes) :]), step.digits)
    # The leading dims now count the senders: the factors that were split. These have size 1 in the
    # rest, where they stand for those that are split now.
    renamed = dict(zip(step.before, step.after, strict=True))
    order = [*step.before, *(renamed.get(i, i) for i in others)]
    return received.reshape(*sizes, *received.shape[1:]).transpose(_back(order))


def _gather(x: Shaped[Array, "*f m"], step: Step, mesh: Mesh) -> Shaped[Array, "*g m"]:
    # Without the dims of the split factors, which have size 1.
    row = x.reshape([size for i, size in enumerate(x.shape) if i not in step.before])
    full = all_gather(row[None], step.digits, 0)
    sizes = [mesh.shape[digit] for digit in step.digits]
    others = [i for i in range(x.ndim) if i not in step.before]
    return full.reshape(*sizes, *full.shape[1:]).transpose(_back([*step.before, *others]))


def _back(order: list[Any]) -> np.ndarray:
    """The permutation that puts dims named `order` in the order of their numbers."""
    return np.argsort(order)


def _permute(x: Shaped[Array, "*f m"], step: Step, mesh: Mesh) -> Shaped[Array, "*f m"]:
    return permute(x, step.digits, pairs(step, mesh))


def pairs(step: Step, mesh: Mesh) -> tuple[tuple[int, int], ...]:
    """Who sends to whom in a permutation, by their index over its digits."""
    sizes = [mesh.shape[digit] for digit in step.digits]
    source_of = [step.after.index(factor) for factor in step.before]
    found = []
    for target, coordinates in enumerate(np.ndindex(*sizes)):
        source = [coordinates[i] for i in source_of]
        found.append((int(np.ravel_multi_index(source, sizes)), target))
    return tuple(found)


_RUN = {"slice": _slice, "exchange": _exchange, "gather": _gather, "permute": _permute}
