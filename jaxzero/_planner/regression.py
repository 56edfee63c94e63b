"""Bayesian linear regression, for the few programs that a search compiles.

`y = w . x + noise`, where weights are independent and normal before anything is observed. With few
observations, predictions stay close to what was expected. An observation changes the predictions
that share features with it.

References:
    Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Name = tuple[str, ...]  # of a feature: what it is, and of which preset, program or loss
Features = Mapping[Name, float | int]  # those that are absent are 0


def names_of(*features: Sequence[Features]) -> list[Name]:
    """The names of all features, each once."""
    return list(dict.fromkeys(name for rows in features for row in rows for name in row))


def matrix_of(names: Sequence[Name], features: Sequence[Features]) -> np.ndarray:
    """The features of each row by name, float64 `[rows, names]`."""
    return np.array([[float(row.get(name, 0.0)) for name in names] for row in features])


class Regression:
    """The weights of features, as a normal distribution that observations narrow.

    Args:
        mean: expected weights, float64 `[features]`.
        sd: standard deviations around them, above 0.
        noise: standard deviation of an observation around `w . x`.
    """

    def __init__(self, mean: np.ndarray, sd: np.ndarray, noise: float):
        self._precision = np.diag(sd**-2.0)
        self._shift = self._precision @ mean
        self._noise = noise

    def observe(self, x: np.ndarray, y: float) -> float:
        """Learn from an observation `y` of features `x`, `[features]`.

        Returns:
            The logarithm of how likely it was, by what was known before.
        """
        variance = x @ np.linalg.solve(self._precision, x) + self._noise**2
        error = y - x @ self.mean
        self._precision = self._precision + np.outer(x, x) / self._noise**2
        self._shift = self._shift + x * y / self._noise**2
        return float(-(error**2 / variance + np.log(2 * np.pi * variance)) / 2)

    @property
    def mean(self) -> np.ndarray:
        """What the weights are expected to be, `[features]`."""
        return np.linalg.solve(self._precision, self._shift)

    def weights(self, normal: np.ndarray) -> np.ndarray:
        """Draws of the weights, `[draws, features]`, made of standard normal numbers."""
        lower = np.linalg.cholesky(self._precision)
        return self.mean + np.linalg.solve(lower.T, normal.T).T
