"""Bayesian linear regression on named features, for the few programs that a search compiles.

An observation is `y = sum_f w_f x_f + noise`, with independent weights `w_f ~ N(mean_f, sd_f^2)`.
With few observations a prediction is close to what the means say; each observation moves the
predictions of all that share its features.

References:
    Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), section 2.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

Features = Mapping[tuple[str, ...], float]  # values by name


@dataclasses.dataclass(frozen=True)
class Weight:
    """What is expected of a feature's weight.

    Attributes:
        mean: in units of `y`.
        sd: the standard deviation around it.
    """

    mean: float
    sd: float


@dataclasses.dataclass
class Regression:
    """Predicts `y` of features, with what is known of others.

    Attributes:
        weight: what is expected of the weight of a feature, by its name.
        noise: standard deviation of what features do not say.
    """

    weight: Callable[[tuple[str, ...]], Weight]
    noise: float
    _known: list[tuple[Features, float]] = dataclasses.field(default_factory=list)

    def observe(self, features: Features, y: float) -> None:
        self._known.append((features, y))

    def predict(self, features: Features) -> tuple[float, float]:
        """Mean and standard deviation of `y`, its own noise included."""
        mean, variance = self._mean(features), self._covariance(features, features)
        if self._known:
            seen = [x for x, _ in self._known]
            covariance = np.array([[self._covariance(a, b) for b in seen] for a in seen])
            covariance += self.noise**2 * np.eye(len(seen))
            shared = np.array([self._covariance(features, x) for x in seen])
            rest = np.array([y - self._mean(x) for x, y in self._known])
            weights = np.linalg.solve(covariance, np.stack([rest, shared], axis=1))
            mean += float(shared @ weights[:, 0])
            variance -= float(shared @ weights[:, 1])
        return mean, float(np.sqrt(max(variance, 0.0) + self.noise**2))

    def _mean(self, features: Features) -> float:
        return sum(x * self.weight(name).mean for name, x in features.items())

    def _covariance(self, one: Features, other: Features) -> float:
        common = one.keys() & other.keys()
        return sum(one[name] * other[name] * self.weight(name).sd ** 2 for name in common)
