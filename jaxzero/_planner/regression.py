"""Predict plans by Bayesian linear regression, from the few programs that a search compiles.

The model is `y = w . x + noise`: `x` are the features of a plan, and `y` is its time or memory. The
weights `w` are independent and normal before anything is observed. Features have names; the row of
a plan maps the names of its features to numbers (`Features`).

With few observations, predictions stay close to those of the expected weights. An observation
changes the predictions for plans that have features in common with the observed plan.

References:
    Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Name = tuple[str, ...]  # of a feature: what it is, and of which preset, program or loss
Features = Mapping[Name, float | int]  # values by name; a feature that is absent is 0


def names_of(*features: Sequence[Features]) -> list[Name]:
    """Return the names of all features that occur in several lists of rows, each name once."""
    return list(dict.fromkeys(name for rows in features for row in rows for name in row))


def matrix_of(names: Sequence[Name], features: Sequence[Features]) -> np.ndarray:
    """Return rows as a matrix, float64 `[rows, names]`; a feature that a row lacks is 0."""
    return np.array([[float(row.get(name, 0.0)) for name in names] for row in features])


class Regression:
    """A normal distribution of the weights of features, which each observation narrows.

    Args:
        mean: the weights that are expected before any observation, float64 `[features]`.
        sd: standard deviations of the weights around `mean`, above 0.
        noise: standard deviation of an observation around `w . x`.
    """

    def __init__(self, mean: np.ndarray, sd: np.ndarray, noise: float):
        self._precision = np.diag(sd**-2.0)
        self._shift = self._precision @ mean
        self._noise = noise

    def observe(self, x: np.ndarray, y: float) -> float:
        """Learn from an observation `y` of features `x`, `[features]`.

        Returns:
            The logarithm of the density of `y`, as predicted before this observation.
        """
        variance = x @ np.linalg.solve(self._precision, x) + self._noise**2
        error = y - x @ self.mean
        self._precision = self._precision + np.outer(x, x) / self._noise**2
        self._shift = self._shift + x * y / self._noise**2
        return float(-(error**2 / variance + np.log(2 * np.pi * variance)) / 2)

    @property
    def mean(self) -> np.ndarray:
        """The expected weights after all observations so far, `[features]`."""
        return np.linalg.solve(self._precision, self._shift)

    def weights(self, normal: np.ndarray) -> np.ndarray:
        """Draw weights, `[draws, features]`, from standard normal numbers of the same shape."""
        lower = np.linalg.cholesky(self._precision)
        return self.mean + np.linalg.solve(lower.T, normal.T).T
