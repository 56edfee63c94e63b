"""What is expected of plans that were not compiled, or not in full, by those that were.

The logarithm of the temporaries, and that of the step over its lower bound, are sums of what each
choice of a plan adds. The expectations below were set on Llamas of 1.1B and 7B parameters
(`benchmarks/compiled/plan_regret.py`); a search corrects them by each program that it compiles.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from .bounds import Bounds
from .candidates import Candidate
from .regression import Features, Regression, Weight
from .rounds import RoundBounds

_NOTHING = Weight(0.0, 0.0)
# Expected additions to the logarithm, by the first word of a feature's name.
_TEMPORARIES = {
    "all": Weight(0.0, 2.0),  # of any plan; the mean is that of `Estimates.scale`
    "loss": Weight(0.0, 0.7),
    "preset": Weight(0.0, 0.2),
    "one node": Weight(0.0, 0.2),
    "doublings": Weight(-0.5, 0.2),  # of micro-batches
    "doublings of": Weight(0.0, 0.1),
    "several": Weight(0.15, 0.2),  # micro-batches, whose gradients are added up
    "several of": Weight(0.0, 0.2),
    "no prefetch": Weight(-0.03, 0.03),
    "host": Weight(0.0, 0.1),
    "several in host": Weight(0.15, 0.15),
    "program": Weight(0.0, 0.05),
    "full": Weight(0.02, 0.02),
}
_SECONDS = {
    "all": Weight(0.1, 0.2),
    "loss": Weight(0.0, 0.1),
    "preset": Weight(0.0, 0.1),
    "one node": Weight(0.0, 0.1),
    "doublings": Weight(0.05, 0.05),
    "doublings of": Weight(0.0, 0.05),
    "several": Weight(0.0, 0.02),
    "several of": Weight(0.0, 0.02),
    "no prefetch": Weight(0.2, 0.15),
    "host": Weight(0.02, 0.03),
    "several in host": Weight(0.0, 0.02),
    "program": Weight(0.0, 0.05),
    "full": Weight(-0.07, 0.04),
}
_NOISE = 0.02  # of one compile, proxy or full


def _features(candidate: Candidate, *, is_proxy: bool) -> Features:
    """What temporaries and steps depend on: the choices of a plan, and pairs of them."""
    program, of_one_node = candidate.program
    preset = candidate.preset
    several, in_host = candidate.microbatches > 1, candidate.has_host_arrays
    doublings = math.log2(candidate.microbatches)
    found = {
        ("all",): 1.0,
        ("loss", candidate.loss): 1.0,
        ("preset", preset): 1.0,
        ("one node",): of_one_node,
        ("doublings",): doublings,
        ("doublings of", preset): doublings,
        ("several",): several,
        ("several of", preset): several,
        ("no prefetch",): 1 - candidate.config.schedule.prefetch,
        ("host",): in_host,
        ("several in host",): several and in_host,
        ("program", program.name, str(of_one_node)): 1.0,
        ("full",): not is_proxy,
    }
    return {name: float(x) for name, x in found.items() if x}


@dataclasses.dataclass(frozen=True)
class Normal:
    """A quantity whose logarithm is normal.

    Attributes:
        log: its mean logarithm.
        sd: the standard deviation of that.
    """

    log: float
    sd: float

    @property
    def median(self) -> float:
        return math.exp(self.log)

    def below(self, x: float) -> float:
        """The probability that it is at most `x`."""
        return _phi((math.log(x) - self.log) / self.sd) if x > 0 else 0.0

    def gain(self, x: float) -> float:
        """By how much it is expected to be below `x`, in units of it; 0 where it is above."""
        # E[max(0, x - y)] of a log-normal y, the formula of Black and Scholes for a put.
        if math.isinf(x):
            return math.inf
        d = (math.log(x) - self.log) / self.sd
        return x * _phi(d) - math.exp(self.log + self.sd**2 / 2) * _phi(d - self.sd)


def _phi(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2


class Estimates:
    """Temporaries and steps of full compiles, expected from the programs compiled so far.

    Args:
        scale: bytes of temporaries expected before anything was compiled, within a factor of 7.
    """

    def __init__(self, scale: float):
        self._mean = math.log(scale)
        self._temporaries = Regression(lambda name: _TEMPORARIES[name[0]], _NOISE)
        self._seconds = Regression(lambda name: _SECONDS[name[0]], _NOISE)

    def observe(
        self, candidate: Candidate, temporary: int, share: float, *, is_proxy: bool
    ) -> None:
        """Learn from a program.

        Args:
            candidate: a plan with the program.
            temporary: bytes of its temporaries.
            share: its step over the lower bound.
            is_proxy: or in full.
        """
        features = _features(candidate, is_proxy=is_proxy)
        self._temporaries.observe(features, math.log(max(temporary, 1)) - self._mean)
        self._seconds.observe(features, math.log(share))

    def temporaries(self, candidate: Candidate) -> Normal:
        """Bytes of temporaries of a full compile."""
        mean, sd = self._temporaries.predict(_features(candidate, is_proxy=False))
        return Normal(self._mean + mean, sd)

    def seconds(self, candidate: Candidate, bounds: Bounds | RoundBounds) -> Normal:
        """Of a step, by a full compile."""
        mean, sd = self._seconds.predict(_features(candidate, is_proxy=False))
        return Normal(math.log(bounds.seconds) + mean, sd)
