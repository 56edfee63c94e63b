"""Move an array from one split over devices to another, by a sequence of collectives (`Move`).

Each dim of the array is a product of factors and a rest (see `steps`). A device's shard is a grid
of pieces, with a dim for each factor. A piece is a row of numbers or, with a codec, a message, and
collectives move whole pieces. So a piece is encoded once, by the device that has it before the
move, and decoded once, on each device that keeps it.

[Note: windows] Some old and new splits do not fit each other: if the array is padded on a dim that
the new split divides; if the devices of the new mesh are in an order that is no reshaped form of
the old order; or if 3 devices split a dim and 2 are to split it. Then all devices gather a window
of rows, in full, and each keeps the rows that are in its part of the result. A row enters a node
once, and is then sent to each of the node's devices. A device holds its part of the result and one
window.

Legend: f, g dims of the grid before and after a step, one for each factor, of size 1 if the factor
is split; m, n numbers of a piece, or bytes of its message; K devices of a collective; k shards, h
rows of each shard in a window.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from .steps import MoveStep, Route


@dataclasses.dataclass(frozen=True)
class Windows:
    """How an array is cut into windows of rows, which devices gather; see [Note: windows].

    Rows are the entries along one dim.

    Attributes:
        dim: the dim of rows: the dim that is split before the move; if none is, any dim.
        rows: the rows of a shard.
        height: the rows of each shard in a window; the last window overlaps with the one before.
        starts: for each device, the first index in each dim of its part of the result.
    """

    dim: int
    rows: int
    height: int
    starts: tuple[tuple[int, ...], ...]

    @property
    def num(self) -> int:
        return math.ceil(self.rows / self.height)

    def dim_first(self, values: Any) -> list[Any]:
        """Reorder values, one for each dim of the array, so that the value of `dim` is first."""
        return [values[self.dim], *values[: self.dim], *values[self.dim + 1 :]]


@dataclasses.dataclass(frozen=True)
class Move:
    """The planned move of one array, from the shards that devices have to those of a new split.

    Attributes:
        leaf: the layout of the stored array: true shape, padding, dtype, the codec of its messages.
        block: the shape of a device's shard of the stored array.
        shape: the shape of the array that `route` moves: the padded array, or a window of it, whose
            first dim counts rows.
        route: the collectives that move the array, or each window.
        target_block: the shape of a device's shard of the result, without padding.
        dtype: the dtype of the result, in which numbers are also sent.
        codec: encodes the pieces that are sent; None: numbers of `dtype` are sent.
        windows: how the array is cut into windows; None: it is moved at once.
    """

    leaf: LeafSpec
    block: tuple[int, ...]
    shape: tuple[int, ...]
    route: Route
    target_block: tuple[int, ...]
    dtype: Any
    codec: Codec | None
    windows: Windows | None = None

    @property
    def num_windows(self) -> int:
        return self.windows.num if self.windows else 1

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape of a piece: its length in each dim of `shape`."""
        pairs = zip(self.shape, self.route.factors, strict=True)
        return tuple(size // math.prod(factors) for size, factors in pairs)

    @property
    def message(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of a piece as it is sent."""
        num = math.prod(self.inner)
        if self.codec is not None:
            return self.codec.message(num, self.dtype)
        return jax.ShapeDtypeStruct((num,), bits_dtype(self.dtype))

    def grid(self, split: tuple[bool, ...]) -> tuple[int, ...]:
        """Return the shape of a device's grid of pieces.

        `split` tells of each factor whether devices split it. The grid has size 1 along a split
        factor, and the full size of the factor otherwise.
        """
        pairs = zip(self.route.sizes, split, strict=True)
        return tuple(1 if is_split else size for size, is_split in pairs)

    def run(self, x: Shaped[Array, ...], mesh: Mesh) -> Shaped[Array, ...]:
        """Turn a device's shard of the stored array into its shard of the result, by collectives.

        It runs on each device, inside a `shard_map` over all axes of `mesh`.

        Args:
            x: the device's shard of the stored array, of the shape `block`.
            mesh: the devices, with an axis for each digit of their coordinates (`Digits.mesh`).
        """
        x = x if self.leaf.codec is None else from_stored(x, self.leaf).join()
        x = x.astype(self.dtype)
        if self.windows is not None:
            return self._moved_by_windows(x, mesh, self.windows)
        mine = tuple(slice(size) for size in self.target_block)
        return self._moved(x, mesh)[mine] if self.route.steps else jnp.copy(x[mine])

    def _moved(self, x: Shaped[Array, ...], mesh: Mesh) -> Shaped[Array, ...]:
        """Return a device's new shard, padding included, from its old shard."""
        # The barriers keep XLA from moving a cast across the collectives.
        pieces = lax.optimization_barrier(self._pieces_of(x))
        for step in self.route.steps:
            pieces = _RUN[step.kind](pieces, step, mesh)
        return self._joined(lax.optimization_barrier(pieces))

    def _moved_by_windows(
        self, x: Shaped[Array, ...], mesh: Mesh, windows: Windows
    ) -> Shaped[Array, ...]:
        x = jnp.moveaxis(x, windows.dim, 0)
        place = lax.axis_index(mesh.axis_names)
        start, *starts = windows.dim_first(list(jnp.asarray(windows.starts, jnp.int32)[place]))
        num, *sizes = windows.dim_first(self.target_block)
        wanted = start + jnp.arange(num, dtype=jnp.int32)
        shards, rows = wanted // windows.rows, wanted % windows.rows

        def add_window(total: Array, window: Array) -> tuple[Array, None]:
            first = jnp.minimum(window * windows.height, windows.rows - windows.height)
            piece = lax.dynamic_slice_in_dim(x, first, windows.height)
            pieces: Shaped[Array, "k h ..."] = self._moved(piece, mesh)
            pieces = pieces.reshape(-1, windows.height, *pieces.shape[1:])
            zero = jnp.zeros((), jnp.int32)
            pieces = lax.dynamic_slice(pieces, (zero, zero, *starts), (*pieces.shape[:2], *sizes))
            inside = (rows >= first) & (rows < first + windows.height)
            taken = pieces[shards, jnp.clip(rows - first, 0, windows.height - 1)]
            inside = inside.reshape(-1, *[1] * len(sizes))
            return jnp.where(inside, taken, total), None

        numbers = jnp.arange(windows.num, dtype=jnp.int32)
        total, _ = lax.scan(add_window, jnp.zeros((num, *sizes), self.dtype), numbers)
        return jnp.moveaxis(total, 0, windows.dim)

    def _pieces_of(self, x: Shaped[Array, ...]) -> Shaped[Array, "*f n"]:
        """Cut a device's shard into its grid of pieces, and encode each piece for sending."""
        grid = self.grid(self.route.source)
        x = x.reshape([*itertools.chain(*self._cut(grid))]).transpose(self._factors_first)
        x = x.reshape(*grid, math.prod(self.inner))
        return to_bits(x) if self.codec is None else self.codec.encode_rows(x)

    def _joined(self, pieces: Shaped[Array, "*f n"]) -> Shaped[Array, ...]:
        """Decode the pieces that a device has after the last step, and join them to its shard."""
        grid, num = self.grid(self.route.target), math.prod(self.inner)
        if self.codec is None:
            x = from_bits(pieces, self.dtype)
        else:
            x = self.codec.decode_rows(pieces, num, self.dtype)
        x = x.reshape(*grid, *self.inner).transpose(np.argsort(self._factors_first))
        return x.reshape([math.prod(sizes) for sizes in self._cut(grid)])

    def _cut(self, grid: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return, for each dim of a device's shard, the sizes of its factors, then of its rest.

        `grid` is the shape of the device's grid of pieces. The rest of a dim is the length of a
        piece along the dim.
        """
        remaining = iter(grid)
        pairs = zip(self.route.factors, self.inner, strict=True)
        return [(*itertools.islice(remaining, len(factors)), rest) for factors, rest in pairs]

    @property
    def _factors_first(self) -> list[int]:
        """The permutation of all dims of `_cut` that puts all factors before all rests."""
        num_of_dims = [len(factors) + 1 for factors in self.route.factors]
        rests = [end - 1 for end in itertools.accumulate(num_of_dims)]
        return [*(i for i in range(sum(num_of_dims)) if i not in rests), *rests]


def _slice(x: Shaped[Array, "*f m"], step: MoveStep, mesh: Mesh) -> Shaped[Array, "*g m"]:
    for digit, factor in zip(step.digits, step.after, strict=True):
        assert factor is not None
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(digit), 1, axis=factor)
    return x


def _exchange(x: Shaped[Array, "*f m"], step: MoveStep, mesh: Mesh) -> Shaped[Array, "*g m"]:
    others = [i for i in range(x.ndim) if i not in step.after]
    x = x.transpose([*step.after, *others])
    sizes = [mesh.shape[digit] for digit in step.digits]
    received = all_to_all(x.reshape(math.prod(sizes), *x.shape[len(sizes) :]), step.digits)
    # The leading dims now count the senders, so they are the factors that were split before. Among
    # the other dims these factors have size 1, in the places of the factors that are split now.
    renamed = dict(zip(step.before, step.after, strict=True))
    order = np.array([*step.before, *(renamed.get(i, i) for i in others)], int)
    return received.reshape(*sizes, *received.shape[1:]).transpose(np.argsort(order))


def _gather(x: Shaped[Array, "*f m"], step: MoveStep, mesh: Mesh) -> Shaped[Array, "*g m"]:
    # Without the dims of the split factors, which have size 1.
    row = x.reshape([size for i, size in enumerate(x.shape) if i not in step.before])
    full = all_gather(row[None], step.digits, 0)
    sizes = [mesh.shape[digit] for digit in step.digits]
    order = np.array([*step.before, *(i for i in range(x.ndim) if i not in step.before)], int)
    return full.reshape(*sizes, *full.shape[1:]).transpose(np.argsort(order))


def _permute(x: Shaped[Array, "*f m"], step: MoveStep, mesh: Mesh) -> Shaped[Array, "*f m"]:
    return permute(x, step.digits, pairs(step, mesh))


def pairs(step: MoveStep, mesh: Mesh) -> tuple[tuple[int, int], ...]:
    """Return the `(sender, receiver)` pairs of a step of kind "permute".

    Devices are numbered by their coordinates along the digits of the step.
    """
    sizes = [mesh.shape[digit] for digit in step.digits]
    source_of = [step.after.index(factor) for factor in step.before]
    messages = []
    for target, coordinates in enumerate(np.ndindex(*sizes)):
        source = [coordinates[i] for i in source_of]
        messages.append((int(np.ravel_multi_index(source, sizes)), target))
    return tuple(messages)


_RUN = {"slice": _slice, "exchange": _exchange, "gather": _gather, "permute": _permute}
