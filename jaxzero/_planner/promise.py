"""Choose the plan whose compile promises most, and say when no compile promises enough.

A known plan is one whose program is compiled, or being compiled. A draw is a sample of the values
that full compiles of all plans may give. The value of a plan is the logarithm of its seconds or
bytes, or infinite if the plan does not fit. The gain of a plan is its expected improvement: the
mean over draws of how much its value is below that of the best known plan (Jones, Schonlau and
Welch 1998). The plan with the largest gain is compiled next.

Different plans are best in different draws. So ending the search gives up more than the largest
gain: it gives up the gain of all plans together, which is the mean over draws of how much the best
value in the draw is below that of the best known plan. The search goes on while that gain
is large enough.
"""

from __future__ import annotations

import numpy as np

# While a known plan fits with at most this probability, every gain is worth a compile.
_FOUND = 0.05
# A plan that fits with at least this probability is sure. While a plan that is not sure is compiled
# in full, no other plan is compiled.
_SURE = 0.9


class Promise:
    """The gains of plans that may be compiled, compared with the known plans.

    Args:
        values: drawn values of the plans to choose from, `[draws, plans]`; infinite if a plan does
            not fit. A plan's number is its column here.
        known: drawn values of the known plans, `[draws, known plans]`.
        memory: drawn bytes of the plans to choose from, `[draws, plans]`, above 0. Between plans of
            equal gain, the one with the least bytes is chosen.
    """

    def __init__(self, values: np.ndarray, known: np.ndarray, memory: np.ndarray):
        # In draws in which no known plan fits, the best known value is taken to be twice the worst.
        everything = np.concatenate([values, known], axis=1)
        self._worst = np.log(2) + np.max(everything, where=np.isfinite(everything), initial=0.0)
        self._values = values.copy()
        self._best = np.minimum(self._worst, np.min(known, axis=1, initial=np.inf))
        # Decides between plans without a gain: the one with the least memory is first.
        self._small = -1e-6 * np.median(np.log(memory), axis=0)
        self._fits = np.mean(np.isfinite(values), axis=0)

    def is_sure(self, number: int) -> bool:
        """Return True if a plan almost certainly fits into memory."""
        return bool(self._fits[number] >= _SURE)

    def keep_sure(self) -> None:
        """Leave out plans that are not sure to fit; if none is sure, keep the likeliest to fit."""
        self._values[:, self._fits < min(_SURE, np.max(self._fits))] = np.inf

    def next(self, least: float) -> int | None:
        """Return the number of the plan to compile, the one with the largest gain.

        None: no plan is left, or no compile is worth it.

        Args:
            least: the gain of all plans together from which on a compile is worth it. While no
                known plan is likely to fit, a compile is always worth it.
        """
        together = np.mean(self._gains(np.min(self._values, axis=1, keepdims=True)))
        number = int(np.argmax(np.mean(self._gains(self._values), axis=0) + self._small))
        has_one = np.mean(self._best < self._worst) > _FOUND
        if np.isinf(self._small[number]) or (has_one and together < least):
            return None
        return number

    def take(self, number: int) -> None:
        """Count a plan as known, since it is being compiled, and leave it out of the choice."""
        self._best = np.minimum(self._best, self._values[:, number])
        self.drop(number)

    def drop(self, number: int) -> None:
        """Leave a plan out of the choice."""
        self._values[:, number], self._small[number] = np.inf, -np.inf

    def _gains(self, values: np.ndarray) -> np.ndarray:
        return np.maximum(0.0, self._best[:, None] - values)
