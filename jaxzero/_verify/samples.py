"""Bound how far two right results may differ, from samples of the effect of roundings.

A sample is the results of a program that is run with the result of each operation moved by its
rounding error (`moved`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .report import Check

NUM_SAMPLES = 8
# Student's t with `NUM_SAMPLES` degrees of freedom: a result with the spread of the samples is
# further off with a probability of 1e-6, if the spread is known from this many samples only.
QUANTILE = 13.3


@dataclasses.dataclass(frozen=True)
class Samples:
    """How far samples of the results of a program are from the results themselves.

    Attributes:
        values: for each sample and result, the three numbers that `measured` returns, `[samples,
            results, 3]`.
    """

    values: Any

    @classmethod
    def of(cls, run: Callable[[Any], Sequence[Any]], results: Sequence[Any]) -> Samples:
        """Measure how far `run(seed)` is from `results`, for each of `NUM_SAMPLES` seeds."""
        with jax.numpy_dtype_promotion("standard"):
            drawn = [
                [measured(x, y) for x, y in zip(run(jnp.uint32(seed)), results, strict=True)]
                for seed in range(1, NUM_SAMPLES + 1)
            ]
        return cls(np.array(drawn, np.float64).reshape(NUM_SAMPLES, len(results), 3))

    def bounds(self, i: int) -> Any:
        """Return bounds, `[3]`, of the three numbers of `measured` for a right result `i`."""
        return QUANTILE * np.sqrt(np.mean(self.values[:, i] ** 2, axis=0))


def measured(x: Any, y: Any) -> Any:
    """Return the norm of `x - y`, its largest magnitude, and its part along `y`, as `[3]`.

    The part along `y` is the magnitude of the scalar product of `x - y` and `y`. Elements that are
    the same infinity, or both NaN, do not differ.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x, y = (np.stack([z.real, z.imag]) for z in (x, y))
    x, y = np.asarray(x, np.float64).ravel(), np.asarray(y, np.float64).ravel()
    if not x.size:
        return np.zeros(3)
    with np.errstate(invalid="ignore"):
        d = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, x - y)
        d = np.where(np.isfinite(d), d, np.inf)
        along = abs(np.dot(d, np.where(np.isfinite(y), y, 0.0)))
    return np.array([np.linalg.norm(d), np.max(np.abs(d)), along])


def checked(name: str, kind: str, got: Any, want: Any, bounds: Any, num_summands: int = 1) -> Check:
    """Compare one result of a step with that of plain JAX.

    Args:
        name: the name of the result.
        kind: the kind of the result.
        got: the step's result.
        want: plain JAX's result.
        bounds: bounds of the three numbers of `measured`, `[3]`.
        num_summands: the number of values, of devices and micro-batches, whose mean the result is.

    Raises:
        ValueError: the two results have different shapes or dtypes.
    """
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        raise ValueError(
            f"The step returns {got.dtype}{list(got.shape)} for `{name}`, and plain JAX "
            f"{want.dtype}{list(want.shape)}. Give the options with which you call it."
        )
    size = float(measured(want, np.zeros_like(want))[0])
    if jnp.issubdtype(want.dtype, jnp.inexact):
        # The mean over devices rounds, also where nothing before it does: `4 sqrt(n) eps / 2`.
        eps = 2 * num_summands**0.5 * float(jnp.finfo(want.dtype).eps)
        largest = float(np.max(np.abs(want), initial=0)) if want.size else 0.0
        bounds = np.maximum(bounds, eps * np.array([size, largest, size**2]))
    sizes = measured(got, want)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(sizes == 0, 0.0, sizes / bounds)
    ratio = float(np.max(np.where(np.isnan(ratios), np.inf, ratios)))
    return Check(
        name=name,
        kind=kind,
        size=size,
        difference=float(sizes[0]),
        bound=float(bounds[0]),
        ratio=ratio,
    )
