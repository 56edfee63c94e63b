"""Find operations that read one row of a stack, or place one row in a stack of zeros.

The operations are those of a loop's body. The index of the row is known while tracing, for each
iteration (`uniform.known_in_body`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from .ir import Atom, Constant, Operation, Value
from .operation_kinds import shape_of
from .uniform import Known, small_integers

READS = {"dynamic_slice", "gather"}


class Rows(NamedTuple):
    """The rows of a stack that a loop uses, one in each iteration: `start`, `start + step`, ..."""

    start: int
    step: int  # 1 or -1
    num: int

    def of(self, stack: Any) -> Any:
        """Take these rows from a stack, in the order of iterations."""
        low = self.start if self.step > 0 else self.start - self.num + 1
        rows = lax.slice_in_dim(stack, low, low + self.num)
        return rows if self.step > 0 else lax.rev(rows, (0,))

    def place(self, rows: Any, num_all: int) -> Any:
        """Make a stack of `num_all` rows that has `rows` at these places and zeros elsewhere."""
        low = self.start if self.step > 0 else self.start - self.num + 1
        rows = rows if self.step > 0 else lax.rev(rows, (0,))
        config = [(low, num_all - low - self.num, 0), *[(0, 0, 0)] * (rows.ndim - 1)]
        return lax.pad(rows, np.zeros((), rows.dtype), config)


class RowRead(NamedTuple):
    """An operation that reads one row: `operation(stack)` equals `apply(stack[row])`.

    `row` runs through `rows`, one in each iteration.
    """

    rows: Rows
    apply: Callable[[Any], Any]


class RowPlaced(NamedTuple):
    """An operation that makes a stack of zeros with `apply(update)` as one of its rows.

    This row runs through `rows`, one in each iteration. `update` is an input of the operation.
    """

    rows: Rows
    update: Atom
    apply: Callable[[Any], Any]


def row_read(operation: Operation, shape: Sequence[int], known: Known, num: int) -> RowRead | None:
    """Find which row an operation of a loop's body reads in each iteration; None if it reads none.

    Args:
        operation: a `dynamic_slice` or `gather`, whose first input is the stack.
        shape: the shape of the stack.
        known: known integers of the body, in all iterations.
        num: the number of iterations.
    """
    stack_dims, out = len(shape), operation.outputs[0]
    if operation.name == "dynamic_slice":
        return _sliced(operation, shape, known, num)
    numbers, sizes = operation.equation.params["dimension_numbers"], (1, *shape[1:])
    is_row = (
        _is_first(numbers.collapsed_slice_dims)
        and _is_first(numbers.start_index_map)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == tuple(range(stack_dims - 1))
        and tuple(operation.equation.params["slice_sizes"]) == sizes
        and out.shape == tuple(shape[1:])
    )
    rows = _rows(_index(operation.inputs[1], known, num), shape[0]) if is_row else None
    return None if rows is None else RowRead(rows, lambda layer: layer)


def row_placed(operation: Operation, known: Known, num: int) -> RowPlaced | None:
    """Find where an operation of a loop's body writes a row in each iteration; None if it does not.

    The caller has to check that it writes into zeros: that its first input is zero.

    Args:
        operation: a `dynamic_update_slice` or `scatter-add`, or any other.
        known: known integers of the body, in all iterations.
        num: the number of iterations.
    """
    if operation.name == "dynamic_update_slice":
        return _updated(operation, known, num)
    if operation.name != "scatter-add":
        return None
    target, indices, update = operation.inputs
    shape, numbers = shape_of(target), operation.equation.params["dimension_numbers"]
    is_row = (
        _is_first(numbers.inserted_window_dims)
        and _is_first(numbers.scatter_dims_to_operand_dims)
        and not numbers.operand_batching_dims
        and tuple(numbers.update_window_dims) == tuple(range(len(shape) - 1))
        and shape_of(update) == shape[1:]
    )
    rows = _rows(_index(indices, known, num), shape[0]) if is_row else None
    return None if rows is None else RowPlaced(rows, update, lambda row: row)


def _sliced(operation: Operation, shape: Sequence[int], known: Known, num: int) -> RowRead | None:
    sizes = operation.outputs[0].shape
    found = _starts(operation.inputs[1:], sizes, shape, known, num)
    if found is None:
        return None
    rows, low = found
    high = [start + size for start, size in zip(low, sizes[1:], strict=True)]
    return RowRead(rows, lambda layer: lax.expand_dims(lax.slice(layer, low, high), (0,)))


def _updated(operation: Operation, known: Known, num: int) -> RowPlaced | None:
    target, update, *starts = operation.inputs
    shape, sizes = shape_of(target), shape_of(update)
    found = _starts(starts, sizes, shape, known, num)
    if found is None:
        return None
    rows, low = found
    sides = zip(low, sizes[1:], shape[1:], strict=True)
    config = [(start, size - start - part, 0) for start, part, size in sides]

    def apply(update: Any) -> Any:
        row = lax.squeeze(update, (0,))
        return lax.pad(row, np.zeros((), row.dtype), config) if any(map(any, config)) else row

    return RowPlaced(rows, update, apply)


def _starts(
    starts: Sequence[Atom], sizes: Sequence[int], shape: Sequence[int], known: Known, num: int
) -> tuple[Rows, list[int]] | None:
    """Return the rows that a slice takes, one in each iteration, and its starts along other dims.

    Return None if it takes more than one row, if a start is not known, or if a start along another
    dim changes between iterations.
    """
    if sizes[0] != 1:
        return None
    # JAX moves a slice that would reach past the end of an array.
    clipped = [
        np.zeros(num, int) if array is None or size == part else np.clip(array, 0, size - part)
        for array, part, size in zip(
            (_index(x, known, num) for x in starts), sizes, shape, strict=True
        )
        if array is not None or size == part
    ]
    if len(clipped) < len(starts) or any((array != array[0]).any() for array in clipped[1:]):
        return None
    rows = _rows(clipped[0], shape[0])
    return None if rows is None else (rows, [int(array[0]) for array in clipped[1:]])


def _index(atom: Atom, known: Known, num: int) -> np.ndarray | None:
    """Return the value of an index in each iteration, `[num]`; None if unknown or not scalar."""
    array = known.get(atom) if isinstance(atom, Value) else None
    if isinstance(atom, Constant) and (constant := small_integers(atom)) is not None:
        array = np.broadcast_to(constant, (num, *constant.shape))
    return array.reshape(num) if array is not None and array.size == num else None


def _rows(index: np.ndarray | None, num_all: int) -> Rows | None:
    """Return the rows at `index`, one in each iteration; None unless it steps by 1 or by -1."""
    if index is None or index.min() < 0 or index.max() >= num_all:
        return None
    start, steps = int(index[0]), np.diff(index.astype(np.int64))
    for step in (1, -1):
        if (steps == step).all():
            return Rows(start, step, len(index))
    return None


def _is_first(dims: Sequence[int]) -> bool:
    return tuple(dims) == (0,)
