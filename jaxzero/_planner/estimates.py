"""Predict the memory and step time of all plans from the programs compiled so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .bounds import Bounds
from .candidates import Candidate
from .cluster import Cluster
from .durations import Durations
from .rounds import RoundBounds
from .temporaries import Temporaries

_DRAWS = 512  # samples; a probability that is estimated from them is off by about 2%


class Estimates:
    """A model of each plan's memory and step time, which learns from compiled programs.

    Args:
        bounds: the bounds of all plans.
        cluster: the devices.
        limit: bytes of a device that a plan may take.
    """

    def __init__(
        self, bounds: Mapping[Candidate, Bounds | RoundBounds], cluster: Cluster, limit: float
    ):
        self._bounds = dict(bounds)
        self._number = {plan: number for number, plan in enumerate(self._bounds)}
        self._temporaries = Temporaries(self._bounds, cluster, limit)
        self._durations = Durations(self._bounds)
        generator = np.random.default_rng(0)
        self._normal = []
        for model in (self._temporaries, self._durations):
            # Antithetic draws: the mean of the weights drawn is exactly their expected value.
            half = generator.standard_normal((_DRAWS // 2, model.num_features))
            self._normal.append(np.concatenate([half, -half]))

    def observe(
        self, candidate: Candidate, temporary: int, gradients: float, *, is_proxy: bool
    ) -> None:
        """Learn from the memory and time of a compiled program, which computes gradients.

        Args:
            candidate: a plan that runs the program.
            temporary: bytes of the program's temporaries.
            gradients: seconds of the program.
            is_proxy: whether the program was compiled as a proxy; otherwise in full.
        """
        number = self._number[candidate]
        self._temporaries.observe(number, temporary, is_full=not is_proxy)
        self._durations.observe(number, gradients, is_full=not is_proxy)

    def draws(self, candidates: Sequence[Candidate]) -> tuple[np.ndarray, np.ndarray]:
        """Draw samples of what full compiles may find of plans.

        Returns:
            The bytes that a device takes, and the seconds of a step; both `[draws, plans]`.
        """
        numbers = [self._number[plan] for plan in candidates]
        temporaries = self._temporaries.draws(numbers, self._normal[0])
        gradients = self._durations.draws(numbers, self._normal[1])
        memory, seconds = np.empty_like(temporaries), np.empty_like(gradients)
        for number, candidate in enumerate(candidates):
            bounds = self._bounds[candidate]
            memory[:, number] = bounds.with_temporaries(temporaries[:, number])
            least = np.maximum(bounds.gradients, gradients[:, number])
            seconds[:, number], _ = bounds.predicted(least, 0.0)
        return memory, seconds
