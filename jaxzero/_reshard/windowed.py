"""`WindowedMove`: the general path, for arrays whose old and new cuts do not fit each other.

Such are arrays that are padded on a dim that the destination splits, meshes whose devices are in an
order that is no reshaped form of the old one, and dims that 3 devices split and 2 are to split. All
devices gather the rows of a window, first between nodes and then inside, and each keeps those that
it is to have. A row crosses into a node once, but into every device of it. At any time a device has
its part of the result and one window.

Legend: k shards, h rows of each in a window.
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

from .._codecs import Codec, bits_dtype
from .._collectives import all_gather
from .._sharding import LeafSpec
from .move import decoded, encoded, shard_of


@dataclasses.dataclass(frozen=True)
class WindowedMove:
    """One array, gathered by windows of rows along the dim that is split.

    Attributes:
        leaf: how it is stored: true shape, padding, dtype, the codec of its messages.
        block: shape of a device's shard of the stored array.
        dim: the dim that is split; any if none is.
        axes: the digits that split it, major first.
        hops: the same digits in groups, in the order in which they are gathered.
        starts: for each device, the first index of its part of the result in each dim.
        target_block: shape of that part.
        height: rows of each shard in a window.
        dtype: the type that numbers are sent in, and arrive in.
        codec: encodes what is sent; None sends numbers of `dtype`.
    """

    leaf: LeafSpec
    block: tuple[int, ...]
    dim: int
    axes: tuple[str, ...]
    hops: tuple[tuple[str, ...], ...]
    starts: tuple[tuple[int, ...], ...]
    target_block: tuple[int, ...]
    height: int
    dtype: Any
    codec: Codec | None

    @property
    def rows(self) -> int:
        """Rows of a shard."""
        layout = self.leaf.layout
        size = self.leaf.padded_shape[self.dim]
        return size if layout is None or not self.axes else size // layout.num_shards

    @property
    def num_windows(self) -> int:
        return math.ceil(self.rows / self.height)

    @property
    def row_size(self) -> int:
        """Numbers in a row."""
        shape = self.leaf.padded_shape
        return math.prod(shape[: self.dim]) * math.prod(shape[self.dim + 1 :])

    @property
    def message(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a device's rows of a window, as they are sent."""
        num = self.height * self.row_size
        if self.codec is not None:
            return self.codec.message(num, self.dtype)
        return jax.ShapeDtypeStruct((num,), bits_dtype(self.dtype))

    def run(self, x: Shaped[Array, ...], mesh: Mesh) -> Shaped[Array, ...]:
        """Move a device's shard; inside a `shard_map` over all axes of `mesh`."""
        x = jnp.moveaxis(shard_of(x, self.leaf).astype(self.dtype), self.dim, 0)
        place = lax.axis_index(mesh.axis_names)
        start, *starts = self._dim_first(list(jnp.asarray(self.starts, jnp.int32)[place]))
        num, *sizes = self._dim_first(self.target_block)
        wanted = start + jnp.arange(num, dtype=jnp.int32)
        shards, rows = wanted // self.rows, wanted % self.rows

        def add_window(total: Array, window: Array) -> tuple[Array, None]:
            first = jnp.minimum(window * self.height, self.rows - self.height)
            piece = lax.dynamic_slice_in_dim(x, first, self.height)
            pieces = self._gathered(piece, mesh)
            zero = jnp.zeros((), jnp.int32)
            pieces = lax.dynamic_slice(pieces, (zero, zero, *starts), (*pieces.shape[:2], *sizes))
            inside = (rows >= first) & (rows < first + self.height)
            taken = pieces[shards, jnp.clip(rows - first, 0, self.height - 1)]
            inside = inside.reshape(-1, *[1] * len(sizes))
            return jnp.where(inside, taken, total), None

        windows = jnp.arange(self.num_windows, dtype=jnp.int32)
        total, _ = lax.scan(add_window, jnp.zeros((num, *sizes), self.dtype), windows)
        return jnp.moveaxis(total, 0, self.dim)

    def _gathered(self, piece: Shaped[Array, "h ..."], mesh: Mesh) -> Shaped[Array, "k h ..."]:
        message = lax.optimization_barrier(encoded(piece.reshape(1, -1), self.codec))
        # Innermost first, so that the first digit of `axes` counts in the major dim.
        for hop in self.hops:
            message = all_gather(message[None], hop, 0)
        names = [name for hop in reversed(self.hops) for name in hop]
        message = message.reshape(*(mesh.shape[name] for name in names), message.shape[-1])
        order = [names.index(name) for name in self.axes]
        message = message.transpose(*order, len(names)).reshape(-1, message.shape[-1])
        num = self.height * self.row_size
        message = lax.optimization_barrier(message)
        return decoded(message, self.codec, num, self.dtype).reshape(-1, *piece.shape)

    def _dim_first(self, values: Any) -> list[Any]:
        return [values[self.dim], *values[: self.dim], *values[self.dim + 1 :]]


def starts_of(indices: list[tuple[slice, ...]]) -> tuple[tuple[int, ...], ...]:
    """The first index in each dim of the parts that devices have."""
    return tuple(tuple(int(s.start or 0) for s in index) for index in indices)


def height_of(rows: int, row_bytes: int, num_shards: int, window_bytes: int) -> int:
    """How many rows of each shard a window of at most `window_bytes` holds; at least one."""
    height = max(1, window_bytes // max(1, row_bytes * num_shards))
    return int(np.ceil(rows / np.ceil(rows / min(height, rows))))
