"""Pass over leaves window by window: fetch a window while the one before it is computed.

A leaf's windows follow one another in a `lax.scan`, whose carry holds the leaf's arrays and the
current window in device memory. An array is written after the next window of it has been fetched
(an `optimization_barrier` says so). Otherwise XLA would copy the full array in host memory, to keep
the values that are still to be fetched. One barrier for each array, rather than one for all, lets
copies to the host overlap with copies to the device. The last window is computed after the loop,
while the first window of the next leaf is fetched. So about two windows are in device memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .windows import Index, Windows

# Called with the leaf's arrays, the result so far, the current window, the next window (None after
# the last) and the index of the current one; returns the first two and the next window.
Visit = Callable[
    [list[Array], Any, list[Array], list[Array] | None, Index],
    tuple[list[Array], Any, list[Array] | None],
]

# From a loop's counter XLA computes addresses in host memory ahead, so that copy engines can do the
# copies. The XLA of JAX 0.10.2 takes turn `i` to be at row `i`, whatever is computed from the
# counter, and copies the wrong rows; that of 0.12.0 is right. What is read from an array is used
# as it is.
_COUNTERS_WORK = jax.__version_info__ >= (0, 12)


@dataclasses.dataclass(frozen=True)
class LeafSweep:
    """A pass over one leaf.

    Attributes:
        arrays: this device's shards of the leaf's arrays, in host or device memory.
        num_read: only so many of them, the first, are fetched; the others are only written.
        windows: how they are cut.
        start: the result before the first window, a tree of arrays.
        visit: what to do with a window.
    """

    arrays: list[Shaped[Array, ...]]
    num_read: int
    windows: Windows
    start: Any
    visit: Visit

    def fetch(self, arrays: Sequence[Array], index: Index) -> list[Array]:
        return [self.windows.read(x, index) for x in arrays[: self.num_read]]


@dataclasses.dataclass(frozen=True)
class _LastWindow:
    """A leaf of which all but the last window has been visited."""

    leaf: LeafSweep
    arrays: list[Array]
    result: Any
    window: list[Array]

    def visit(self) -> tuple[list[Array], Any]:
        index = len(self.leaf.windows) - 1
        arrays, result, _ = self.leaf.visit(self.arrays, self.result, self.window, None, index)
        return arrays, result


def sweep(leaves: Sequence[LeafSweep]) -> list[tuple[list[Array], Any]]:
    """Visit all windows of all leaves; return each leaf's arrays and result."""
    done: list[tuple[list[Array], Any]] = []
    before: _LastWindow | None = None
    for leaf in leaves:
        arrays = leaf.arrays
        if before is not None:  # fetch nothing before the last window of that leaf has arrived
            arrays, window = lax.optimization_barrier((arrays, before.window))
            before = dataclasses.replace(before, window=window)
        first = leaf.fetch(arrays, 0)
        if before is not None:  # go on when the leaf before is written
            first, finished = lax.optimization_barrier((first, before.visit()))
            done.append(finished)
        before = _all_but_last(leaf, arrays, first)
    return done if before is None else [*done, before.visit()]


def _all_but_last(leaf: LeafSweep, arrays: list[Array], first: list[Array]) -> _LastWindow:
    def body(carry: tuple[Any, ...], given: Array | None) -> tuple[tuple[Any, ...], None]:
        arrays, result, window, counter = carry
        index = counter if given is None else given
        upcoming = leaf.fetch(arrays, index + 1)
        return (*leaf.visit(arrays, result, window, upcoming, index), counter + 1), None

    num = len(leaf.windows) - 1
    carry = (arrays, leaf.start, first, jnp.zeros((), jnp.int32))
    if num:
        indices = None if _COUNTERS_WORK else jnp.arange(num, dtype=jnp.int32)
        carry, _ = lax.scan(body, carry, indices, length=num)
    arrays, result, window, _ = carry
    return _LastWindow(leaf, arrays, result, window)
