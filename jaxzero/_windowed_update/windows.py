"""Cut one device's shards of leaves into windows, and pass over them.

A window is fetched while the one before it is computed. The windows of a leaf are the iterations
(turns) of a `lax.scan`. Its carry holds the leaf's arrays, and, in device memory, the window that
the turn before has fetched. An `optimization_barrier` makes the write of an array wait until the
array's next window has been fetched. Otherwise XLA would copy the full array in host memory, to
keep the values that are still to be fetched. There is one barrier for each array, so that copies to
the host overlap with copies to the device. The last window is computed after the loop, while the
first window of the next leaf is fetched. So about two windows are in device memory.

[Note: late writes] An array's write can start when its next window has been read, so while the
array that is read last is written, nothing is read. If all arrays in host memory are both read and
written, one of them is written a window late instead: its new window is kept in device memory, and
written in the next turn, before its next read. Then copies run in both directions at all times:
with n arrays a turn takes the time of n copies rather than n + 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Shaped

from .._mesh import in_host, to_device, to_host
from .._sharding import DimSharding
from .._xla_of_jax import COUNTERS_INDEX_HOST

Index = int | Array

# Called with the result so far, the current window of the arrays that are read, and its index;
# returns the new result, and the new windows by the number of the array.
Visit = Callable[[Any, list[Array], Index], tuple[Any, dict[int, Array]]]


@dataclasses.dataclass(frozen=True)
class Windows:
    """How an array is cut into equal windows, each contiguous in memory.

    If the size of the cut dim is not a multiple of the window's, the last window along it begins
    earlier, so that it overlaps with the one before.

    Attributes:
        shape: the shape of the array.
        dim: the cut dim; windows have size 1 in all dims before it.
        size: the size of a window in the cut dim.
    """

    shape: tuple[int, ...]
    dim: int
    size: int

    @classmethod
    def of(cls, arrays: Sequence[Array], window_bytes: int) -> Windows:
        """Cut arrays of equal shapes, so that one window of each takes about `window_bytes` in sum.

        If no array is in host memory, there is one window.
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
        """Return the first index of a window in each dim."""
        starts: list[Index] = [0] * len(self.shape)
        row = index
        if self.shape:
            starts[self.dim], row = self._start(index), row // self._per_row
        for dim in reversed(range(self.dim)):
            starts[dim], row = row % self.shape[dim], row // self.shape[dim]
        return [jnp.asarray(start, jnp.int32) for start in starts]

    def _start(self, index: Index) -> Index:
        if not self.shape or (self.dim == 0 and self.shape[0] % self.size == 0):
            return index * self.size  # evenly spaced
        start, last = index % self._per_row * self.size, self.shape[self.dim] - self.size
        return min(start, last) if isinstance(start, int) else jnp.minimum(start, last)

    def read(self, x: Shaped[Array, ...], index: Index) -> Shaped[Array, ...]:
        """Copy a window of `x` to device memory."""
        if self.is_all:
            return to_device(x)
        return to_device(lax.dynamic_slice(x, self.starts(index), self.window_shape))

    def write(
        self, x: Shaped[Array, ...], window: Shaped[Array, ...], index: Index
    ) -> Shaped[Array, ...]:
        """Return `x` with a window replaced, in the memory of `x`."""
        window = to_host(window) if in_host(x) else window
        return window if self.is_all else lax.dynamic_update_slice(x, window, self.starts(index))

    def is_new(self, index: Index) -> Bool[Array, ...] | None:
        """Return which elements of a window are in no window before it; None: all of them."""
        if not self.shape or self.shape[self.dim] % self.size == 0:
            return None
        overlap = index % self._per_row * self.size - self._start(index)
        return lax.broadcasted_iota(jnp.int32, self.window_shape, self.dim) >= overlap

    def is_inside(
        self, index: Index, layout: DimSharding | None, axes: tuple[str, ...]
    ) -> Bool[Array, ...] | None:
        """Return which elements of a window are not padding; None: all of them.

        Args:
            index: the number of the window.
            layout: how the array is split over devices; None: it is not.
            axes: the mesh axes of these devices.
        """
        if layout is None or not layout.is_padded:
            return None
        device = lax.axis_index(axes).astype(jnp.int32)
        first = device * self.shape[layout.dim] + self.starts(index)[layout.dim]
        positions = lax.broadcasted_iota(jnp.int32, self.window_shape, layout.dim)
        return first + positions < layout.size


def _even_size(length: int, limit: int) -> int:
    """Return a window size up to `limit`: a divisor of `length`, if one is over half of `limit`."""
    num = max(1, math.ceil(length / max(1, limit)))
    for even in range(num, 2 * num):
        if length % even == 0:
            return length // even
    return math.ceil(length / num)


def where_valid(
    masks: Sequence[Bool[Array, ...] | None], x: Shaped[Array, ...], other: jax.Array
) -> Shaped[Array, ...]:
    """Return `x` where all masks are true, and the scalar `other` elsewhere."""
    for mask in masks:
        if mask is not None:
            x = jnp.where(mask, x, other)
    return x


@dataclasses.dataclass(frozen=True)
class LeafSweep:
    """A pass over the windows of one leaf.

    Attributes:
        arrays: this device's shards of the leaf's arrays, in host or device memory.
        num_read: how many of `arrays`, the first ones, are fetched; the rest is only written.
        windows: how the arrays are cut.
        start: the result before the first window, a tree of arrays.
        visit: takes the result so far, the window of each fetched array, and the window's number;
            returns the new result, and the new windows by number of the array.
        late: the number of the array that is written a window late; None: none is.
    """

    arrays: list[Shaped[Array, ...]]
    num_read: int
    windows: Windows
    start: Any
    visit: Visit
    late: int | None = None

    def fetch(self, arrays: Sequence[Array], index: Index) -> list[Array]:
        return [self.windows.read(x, index) for x in arrays[: self.num_read]]

    def turn(self, turn: Turn, index: Index, *, is_last: bool = False) -> Turn:
        """Visit and write window number `index`, and fetch the next one; return the next state."""
        arrays = list(turn.arrays)
        if turn.late is not None:
            assert self.late is not None
            arrays[self.late] = self.windows.write(arrays[self.late], turn.late, index - 1)
        upcoming = [] if is_last else self.fetch(arrays, index + 1)
        result, new = self.visit(turn.result, turn.window, index)
        if jax.tree.leaves(result) and not is_last:
            result, upcoming = lax.optimization_barrier((result, upcoming))
        late = None
        for i, x in new.items():
            if i < len(upcoming):
                x, upcoming[i] = lax.optimization_barrier((x, upcoming[i]))
            if i == self.late and not is_last:
                late = x
            else:
                arrays[i] = self.windows.write(arrays[i], x, index)
        return Turn(arrays, result, upcoming, late)

    def all_but_last(self, turn: Turn) -> Turn:
        """Visit and write all windows but the last; return the state before the last one."""
        num, first = len(self.windows) - 1, 0
        if self.late is not None and num:  # nothing is late yet
            turn, first = self.turn(turn, 0), 1
        if num <= first:
            return turn

        def body(carry: tuple[Turn, Array], read: Array | None) -> tuple[Any, None]:
            turn, counter = carry
            return (self.turn(turn, counter if read is None else read), counter + 1), None

        # XLA computes addresses ahead from a loop's counter, so that copy engines can do the
        # copies. Versions of XLA that compute wrong addresses get an array of indices instead.
        indices = None if COUNTERS_INDEX_HOST else jnp.arange(first, num, dtype=jnp.int32)
        start = turn, jnp.asarray(first, jnp.int32)
        (turn, _), _ = lax.scan(body, start, indices, length=num - first)
        return turn

    def last(self, turn: Turn) -> tuple[list[Array], Any]:
        """Visit and write the last window; return the arrays and the result."""
        turn = self.turn(turn, len(self.windows) - 1, is_last=True)
        return turn.arrays, turn.result


class Turn(NamedTuple):
    """The state of a pass before a window is visited.

    Attributes:
        arrays: the leaf's arrays, with the windows that have been written so far.
        result: the result of the windows visited so far.
        window: the window to visit of each fetched array, in device memory.
        late: the new window that the array `LeafSweep.late` still waits for; None: no window.
    """

    arrays: list[Array]
    result: Any
    window: list[Array]
    late: Array | None = None


def sweep(leaves: Sequence[LeafSweep]) -> list[tuple[list[Array], Any]]:
    """Visit all windows of all leaves; return each leaf's new arrays and `Turn.result`."""
    done: list[tuple[list[Array], Any]] = []
    before: tuple[LeafSweep, Turn] | None = None  # a leaf whose last window is left
    for leaf in leaves:
        arrays = leaf.arrays
        if before is not None:  # fetch nothing before the last window of that leaf has arrived
            arrays, window = lax.optimization_barrier((arrays, before[1].window))
            before = (before[0], before[1]._replace(window=window))
        first = leaf.fetch(arrays, 0)
        if before is not None:  # go on when the leaf before is written
            finished = before[0].last(before[1])
            first, finished = lax.optimization_barrier((first, finished))
            done.append(finished)
        before = leaf, leaf.all_but_last(Turn(arrays, leaf.start, first))
    return done if before is None else [*done, before[0].last(before[1])]
