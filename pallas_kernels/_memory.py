"""Reading and writing rows of a flat array from a kernel, on a GPU and in interpret mode.

Arrays are passed to kernels flat, so that a row may start anywhere. Real lowering can look
at a part of a flat reference as rows, but cannot reshape what is in registers; interpret mode
is the other way round. This is the only file that knows.
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

_gpu: Any = plgpu  # in JAX 0.10.2, with which types are checked, some of it differs
_LANE = _gpu.LoweringSemantics.Lane
_interpret = contextvars.ContextVar[Any]("interpret", default=None)


@contextlib.contextmanager
def interpreted(**options: Any) -> Iterator[None]:
    """Trace kernels for JAX's interpreter, which runs them on a CPU; for tests.

    Args:
        **options: of `plgpu.InterpretGPUParams`, such as `detect_races`.
    """
    token = _interpret.set(_gpu.InterpretGPUParams(**options))
    try:
        yield
    finally:
        _interpret.reset(token)


def interpret_options() -> dict[str, Any]:
    """Arguments of `plgpu.kernel`: whether it is interpreted, or how it is lowered."""
    if _interpret.get() is not None:
        return {"interpret": _interpret.get()}
    # Layouts are ours. To infer them ("Warpgroup") fails on columns of shared memory.
    return {"compiler_params": plgpu.CompilerParams(lowering_semantics=_LANE)}


@dataclasses.dataclass(frozen=True)
class Window:
    """Columns of rows that lie one behind the other in a flat array.

    Attributes:
        start: where the first row starts, in elements.
        rows: how many there are.
        stride: elements from one to the next.
        first: the first column.
        width: how many columns; None: one, and an array of one dim.
    """

    start: Any
    rows: int
    stride: int
    first: int = 0
    width: int | None = None


def load(ref: Any, window: Window, layout: Any) -> Array:
    """Into registers; one number as a scalar."""
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
    """Undo `load`."""
    if window.rows == 1 and window.width is None:
        ref[window.start + window.first] = value
        return
    flat = ref.at[pl.ds(window.start, window.rows * window.stride)]
    if _interpret.get() is None:
        _store(_columns(flat, window), value)
        return
    # All of the rows, the other columns as they were: nobody else may touch any of it.
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
    """The first `num` columns of a flat array of `shape`, of which dim 2 counts them.

    Each is [shape[0], width], the `width` elements of dim 1 from `first` on; if that is one
    element, it has one dim.
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
    """Undo `load_columns`: one list of columns for each part of dim 1."""
    width = shape[1] // len(columns)
    if _interpret.get() is None:
        view = ref.reshape(*shape)
        for i, some in enumerate(columns):
            for j, column in enumerate(some):
                groups = pl.ds(i * width, width) if width > 1 else i
                _store(view.at[:, groups, j], column)
        return
    stacked = [jnp.stack(list(some), axis=-1) for some in columns]
    whole = jnp.concatenate([x.reshape(shape[0], width, -1) for x in stacked], axis=1)
    filling = jnp.zeros((*shape[:2], shape[2] - whole.shape[2]), whole.dtype)
    ref[...] = jnp.concatenate((whole, filling), axis=2).reshape(-1)


def _columns(flat: Any, window: Window) -> Any:
    rows = flat.reshape(window.rows, window.stride)
    if window.width is None:
        return rows.at[:, window.first]
    return rows.at[:, pl.ds(window.first, window.width)]


def _store(ref: Any, value: Array) -> None:
    if hasattr(_gpu, "store"):  # JAX 0.12 must be told that some lanes write few bytes
        _gpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
