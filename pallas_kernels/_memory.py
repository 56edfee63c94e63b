"""Load and store rows of a flat array from a kernel, on a GPU and in interpret mode.

Arrays are passed to kernels flat, so that a row may start anywhere. GPU lowering can reshape a
slice of a flat reference, but not an array in registers; interpret mode can only reshape the
array. The functions here hide this difference from the kernels.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_gpu: Any = plgpu  # types are checked with JAX 0.10.2, whose signatures differ
_LANE = _gpu.LoweringSemantics.Lane
_interpret = contextvars.ContextVar[Any]("interpret", default=None)


@contextlib.contextmanager
def interpreted(**options: Any) -> Iterator[None]:
    """Make a context in which kernels are traced for JAX's interpreter, on a CPU; for tests.

    Args:
        **options: fields of `plgpu.InterpretGPUParams`, such as `detect_races`.
    """
    token = _interpret.set(_gpu.InterpretGPUParams(**options))
    try:
        yield
    finally:
        _interpret.reset(token)


def is_interpreted() -> bool:
    """Return whether kernels are traced for the interpreter."""
    return _interpret.get() is not None


def interpret_options() -> dict[str, Any]:
    """Return arguments of `plgpu.kernel` that select the interpreter, or the lowering for GPUs."""
    if _interpret.get() is not None:
        return {"interpret": _interpret.get()}
    # The kernels set all layouts. Inferring them ("Warpgroup") fails on columns of shared memory.
    return {"compiler_params": plgpu.CompilerParams(lowering_semantics=_LANE)}


@dataclasses.dataclass(frozen=True)
class Window:
    """Some columns of consecutive rows in a flat array, which a kernel loads or stores.

    Attributes:
        start: index of the first row's first element.
        rows: number of rows.
        stride: elements from one row to the next.
        first: first column.
        width: number of columns; None for a single column, loaded as an array with one dimension.
    """

    start: Any
    rows: int
    stride: int
    first: int = 0
    width: int | None = None


def load(ref: Any, window: Window, layout: Any) -> Array:
    """Load a window into registers: [rows, width], [rows], or a scalar if it has one element."""
    if window.rows == 1 and window.width is None:
        return ref[window.start + window.first]
    flat = ref.at[pl.ds(window.start, window.rows * window.stride)]
    if _interpret.get() is None:
        return _gpu.load(_columns(flat, window), layout=layout, optimized=False)
    rows = flat[...].reshape(window.rows, window.stride)
    if window.width is None:
        return rows[:, window.first]
    return rows[:, window.first : window.first + window.width]


def store(ref: Any, window: Window, value: Array) -> None:
    """Store `value` into a window; the reverse of `load`."""
    if window.rows == 1 and window.width is None:
        ref[window.start + window.first] = value
        return
    flat = ref.at[pl.ds(window.start, window.rows * window.stride)]
    if _interpret.get() is None:
        store_tile(_columns(flat, window), value)
        return
    # The interpreter cannot store some columns only, so whole rows are read, changed and written.
    # This is safe because no other warpgroup accesses these rows.
    rows = flat[...].reshape(window.rows, window.stride)
    last = window.first + (window.width or 1)
    parts = [
        rows[:, : window.first],
        value.reshape(window.rows, last - window.first),
        rows[:, last:],
    ]
    flat[...] = jnp.concatenate(parts, axis=1).reshape(-1)


def load_columns(
    ref: Any, shape: tuple[int, int, int], first: int, width: int, num: int, layout: Any
) -> list[Array]:
    """Load `num` columns from a flat array: for an array `x` of `shape`, the slices `x[:, :, j]`.

    The result has a slice for each `j` from 0 to `num - 1`. A slice is cut to the indices `first`
    to `first + width - 1` of dim 1, so it is [shape[0], width], or [shape[0]] if `width` is 1.
    """
    if _interpret.get() is None:
        view = ref.reshape(*shape)
        groups = pl.ds(first, width) if width > 1 else first
        slices = [view.at[:, groups, j] for j in range(num)]
        return [_gpu.load(x, layout=layout, optimized=False) for x in slices]
    whole = ref[...].reshape(shape)[:, first : first + width]
    return [whole[:, :, j] if width > 1 else whole[:, 0, j] for j in range(num)]


def store_columns(
    ref: Any, shape: tuple[int, int, int], columns: Sequence[Sequence[Array]]
) -> None:
    """Store columns into a flat array of `shape`: the reverse of `load_columns`.

    `columns` has a list for each part of dim 1, which together cover dim 1. A list has an array
    for each of the first indices of dim 2, as `load_columns` returns them.
    """
    width = shape[1] // len(columns)
    if _interpret.get() is None:
        view = ref.reshape(*shape)
        for i, group in enumerate(columns):
            for j, column in enumerate(group):
                groups = pl.ds(i * width, width) if width > 1 else i
                store_tile(view.at[:, groups, j], column)
        return
    stacked = [jnp.stack(list(group), axis=-1) for group in columns]
    whole = jnp.concatenate([x.reshape(shape[0], width, -1) for x in stacked], axis=1)
    filling = jnp.zeros((*shape[:2], shape[2] - whole.shape[2]), whole.dtype)
    ref[...] = jnp.concatenate((whole, filling), axis=2).reshape(-1)


def _columns(flat: Any, window: Window) -> Any:
    rows = flat.reshape(window.rows, window.stride)
    if window.width is None:
        return rows.at[:, window.first]
    return rows.at[:, pl.ds(window.first, window.width)]


def store_tile(ref: Any, value: Array) -> None:
    """Store an array in registers into all of `ref`."""
    if hasattr(_gpu, "store"):  # JAX 0.12 rejects narrow stores unless `optimized=False`
        _gpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
