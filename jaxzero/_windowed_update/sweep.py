"""Pass over leaves window by window: fetch a window while the one before it is computed.

A leaf's windows follow one another in a `lax.scan`, whose carry holds the leaf's arrays and the
current window in device memory. An array is written after the next window of it has been fetched
(an `optimization_barrier` says so). Otherwise XLA would copy the full array in host memory, to keep
the values that are still to be fetched. One barrier for each array, rather than one for all, lets
copies to the host overlap with copies to the device. The last window is computed after the loop,
while the first window of the next leaf is fetched. So about two windows are in device memory.

[Note: late writes] An array's write can start when its read has ended, so while the array that is
read last is written, nothing is read. If all arrays in host memory are both read and written, one
of them is written a window late instead: its new window is kept in device memory, and written in
the next turn, before its next read. Then copies run in both directions at all times: with n arrays
a turn takes the time of n copies rather than n + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._xla_of_jax import COUNTERS_INDEX_HOST
from .windows import Index, Windows

# Called with the result so far, the current window of the arrays that are read, and its index;
# returns the new result, and the new windows by the number of the array.
Visit = Callable[[Any, list[Array], Index], tuple[Any, dict[int, Array]]]


@dataclasses.dataclass(frozen=True)
class LeafSweep:
    """A pass over one leaf.

    Attributes:
        arrays: this device's shards of the leaf's arrays, in host or device memory.
        num_read: only so many of them, the first, are fetched; the others are only written.
        windows: how they are cut.
        start: the result before the first window, a tree of arrays.
        visit: what to do with a window.
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

    def write_late(self, turn: _Turn, index: Index) -> list[Array]:
        """The arrays with the window before `index` written to the late one."""
        arrays = list(turn.arrays)
        if turn.late is not None:
            assert self.late is not None
            arrays[self.late] = self.windows.write(arrays[self.late], turn.late, index - 1)
        return arrays

    def turn(self, turn: _Turn, index: Index) -> _Turn:
        """Fetch the window after `index`, and visit and write the one at it."""
        arrays = self.write_late(turn, index)
        upcoming = self.fetch(arrays, index + 1)
        result, new = self.visit(turn.result, turn.window, index)
        if jax.tree.leaves(result):
            result, upcoming = lax.optimization_barrier((result, upcoming))
        late = None
        for i, x in new.items():
            if i < len(upcoming):
                x, upcoming[i] = lax.optimization_barrier((x, upcoming[i]))
            if i == self.late:
                late = x
            else:
                arrays[i] = self.windows.write(arrays[i], x, index)
        return _Turn(arrays, result, upcoming, late)

    def last_turn(self, turn: _Turn) -> tuple[list[Array], Any]:
        """Visit and write the last window; return the arrays and the result."""
        index = len(self.windows) - 1
        arrays = self.write_late(turn, index)
        result, new = self.visit(turn.result, turn.window, index)
        for i, x in new.items():
            arrays[i] = self.windows.write(arrays[i], x, index)
        return arrays, result


class _Turn(NamedTuple):
    """What is known before a window is visited.

    Attributes:
        arrays: the leaf's arrays so far.
        result: the result so far.
        window: the window to visit, of each array that is read.
        late: the new window before it of the array that is written late; None: there is none.
    """

    arrays: list[Array]
    result: Any
    window: list[Array]
    late: Array | None = None


def sweep(leaves: Sequence[LeafSweep]) -> list[tuple[list[Array], Any]]:
    """Visit all windows of all leaves; return each leaf's arrays and result."""
    done: list[tuple[list[Array], Any]] = []
    before: tuple[LeafSweep, _Turn] | None = None  # a leaf whose last window is left
    for leaf in leaves:
        arrays = leaf.arrays
        if before is not None:  # fetch nothing before the last window of that leaf has arrived
            arrays, window = lax.optimization_barrier((arrays, before[1].window))
            before = (before[0], before[1]._replace(window=window))
        first = leaf.fetch(arrays, 0)
        if before is not None:  # go on when the leaf before is written
            finished = before[0].last_turn(before[1])
            first, finished = lax.optimization_barrier((first, finished))
            done.append(finished)
        before = leaf, _all_but_last(leaf, _Turn(arrays, leaf.start, first))
    return done if before is None else [*done, before[0].last_turn(before[1])]


def _all_but_last(leaf: LeafSweep, turn: _Turn) -> _Turn:
    num, first = len(leaf.windows) - 1, 0
    if leaf.late is not None and num:  # nothing is late yet
        turn, first = leaf.turn(turn, 0), 1
    if num <= first:
        return turn

    def body(carry: tuple[_Turn, Array], read: Array | None) -> tuple[Any, None]:
        turn, counter = carry
        return (leaf.turn(turn, counter if read is None else read), counter + 1), None

    # From a loop's counter XLA computes addresses ahead, so that copy engines can do the copies.
    # Where it gets them wrong, it is given an array, whose elements it uses as they are.
    indices = None if COUNTERS_INDEX_HOST else jnp.arange(first, num, dtype=jnp.int32)
    start = turn, jnp.asarray(first, jnp.int32)
    (turn, _), _ = lax.scan(body, start, indices, length=num - first)
    return turn
