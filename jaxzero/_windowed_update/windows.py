"""Cut one device's shard of a leaf into windows, and copy them between host and device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Shaped

from .._mesh import in_host, to_device, to_host
from .._sharding import DimSharding

Index = int | Array


@dataclasses.dataclass(frozen=True)
class Windows:
    """Equal windows of an array, contiguous in memory and in order.

    If the cut dim is no multiple of the window, the last window along it begins earlier, so that it
    overlaps with the one before.

    Attributes:
        shape: of the array.
        dim: the cut dim; windows have size 1 in all dims before it.
        size: of a window in the cut dim.
    """

    shape: tuple[int, ...]
    dim: int
    size: int

    @classmethod
    def of(cls, arrays: Sequence[Array], window_bytes: int) -> Windows:
        """Windows of arrays of equal shapes, of at most `window_bytes` in total if possible.

        Arrays of which none is in host memory have one window.
        """
        shape = tuple(arrays[0].shape)
        if not shape or not any(in_host(x) for x in arrays):
            return cls(shape, 0, shape[0] if shape else 1)
        row_bytes = math.prod(shape) * sum(x.dtype.itemsize for x in arrays)
        for dim, length in enumerate(shape):
            row_bytes //= max(length, 1)
            if row_bytes <= window_bytes:
                return cls(shape, dim, _even_size(length, window_bytes // max(row_bytes, 1)))
        return cls(shape, len(shape) - 1, 1)

    @property
    def window_shape(self) -> tuple[int, ...]:
        if not self.shape:
            return ()
        return (*(1,) * self.dim, self.size, *self.shape[self.dim + 1 :])

    @property
    def _per_row(self) -> int:
        """The number of windows along the cut dim."""
        return math.ceil(self.shape[self.dim] / self.size) if self.shape else 1

    def __len__(self) -> int:
        return math.prod(self.shape[: self.dim]) * self._per_row

    @property
    def is_all(self) -> bool:
        """Whether there is one window, the full array."""
        return self.window_shape == self.shape

    def starts(self, index: Index) -> list[Array]:
        """Where a window starts, in each dim."""
        starts: list[Index] = [0] * len(self.shape)
        row = index
        if self.shape:
            starts[self.dim], row = self._start(index), row // self._per_row
        for dim in reversed(range(self.dim)):
            starts[dim], row = row % self.shape[dim], row // self.shape[dim]
        return [jnp.asarray(start, jnp.int32) for start in starts]

    @property
    def are_evenly_spaced(self) -> bool:
        """Whether each window starts as many elements after the one before."""
        return not self.shape or (self.dim == 0 and self.shape[0] % self.size == 0)

    def _start(self, index: Index) -> Index:
        if self.are_evenly_spaced:
            return index * self.size
        start, last = index % self._per_row * self.size, self.shape[self.dim] - self.size
        return min(start, last) if isinstance(start, int) else jnp.minimum(start, last)

    def read(self, x: Shaped[Array, ...], index: Index) -> Shaped[Array, ...]:
        """Copy a window to device memory."""
        if self.is_all:
            return to_device(x)
        return to_device(lax.dynamic_slice(x, self.starts(index), self.window_shape))

    def write(
        self, x: Shaped[Array, ...], window: Shaped[Array, ...], index: Index
    ) -> Shaped[Array, ...]:
        """Replace a window of `x`, in the memory of `x`."""
        window = to_host(window) if in_host(x) else window
        return window if self.is_all else lax.dynamic_update_slice(x, window, self.starts(index))

    def is_new(self, index: Index) -> Bool[Array, ...] | None:
        """Which elements of a window are in none before it; None: all of them."""
        if not self.shape or self.shape[self.dim] % self.size == 0:
            return None
        overlap = index % self._per_row * self.size - self._start(index)
        return lax.broadcasted_iota(jnp.int32, self.window_shape, self.dim) >= overlap

    def is_inside(
        self, index: Index, layout: DimSharding | None, axes: tuple[str, ...]
    ) -> Bool[Array, ...] | None:
        """Which elements of a window are not padding; None: all of them."""
        if layout is None or not layout.is_padded:
            return None
        device = lax.axis_index(axes).astype(jnp.int32)
        first = device * self.shape[layout.dim] + self.starts(index)[layout.dim]
        positions = lax.broadcasted_iota(jnp.int32, self.window_shape, layout.dim)
        return first + positions < layout.size


def _even_size(length: int, limit: int) -> int:
    """The largest divisor of `length` up to `limit`, or a size near `limit` if that is small."""
    num = max(1, math.ceil(length / max(1, limit)))
    for even in range(num, 2 * num):
        if length % even == 0:
            return length // even
    return math.ceil(length / num)


def where_valid(
    masks: Sequence[Bool[Array, ...] | None], x: Shaped[Array, ...], other: jax.Array
) -> Shaped[Array, ...]:
    """`x` where all masks hold, and the scalar `other` elsewhere."""
    for mask in masks:
        if mask is not None:
            x = jnp.where(mask, x, other)
    return x
