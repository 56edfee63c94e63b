"""What is expected of plans that were not compiled, or not in full, by those that were.

The logarithms of temporaries, and of the gradients' time over its lower bound, are sums of what
each choice of a plan adds. What choices are expected to add was set on Llamas of 1.1B and 7B
parameters (`benchmarks/compiled/plan_regret.py`); each program that is compiled corrects it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .bounds import Bounds
from .candidates import Candidate
from .regression import Regression
from .rounds import RoundBounds

_DRAWS = 512
_NOISE = 0.01

# What a choice adds to a logarithm, by the first word of its name: mean and standard deviation.
_Expected = Mapping[str, tuple[float, float]]
_TEMPORARIES: _Expected = {
    "any plan": (0.0, 2.0),  # over `Estimates.scale`
    "loss": (0.0, 0.7),
    "preset": (0.0, 0.18),
    "one node": (0.0, 0.2),
    "doublings": (-0.35, 0.15),  # of micro-batches
    "doublings of": (0.0, 0.09),
    "several": (0.12, 0.15),  # micro-batches, whose gradients are added up
    "several of": (0.0, 0.13),
    "no prefetch": (-0.03, 0.03),
    "host": (0.05, 0.1),
    "several in host": (0.1, 0.1),
    "program": (0.0, 0.07),
    "full": (0.0, 0.003),
    "full, many": (0.02, 0.05),  # micro-batches
    "full program": (0.0, 0.01),
}
_SECONDS: _Expected = {
    "any plan": (0.3, 1.0),
    "loss": (0.0, 0.1),
    "preset": (0.0, 0.15),
    "one node": (0.0, 0.1),
    "doublings": (0.05, 0.03),
    "doublings of": (0.0, 0.03),
    "several": (0.05, 0.03),
    "several of": (0.0, 0.03),
    "no prefetch": (0.2, 0.1),
    "host": (0.03, 0.03),
    "several in host": (0.0, 0.02),
    "program": (0.0, 0.03),
    "full": (-0.08, 0.03),
    "full, many": (0.02, 0.02),
    "full program": (0.0, 0.01),
}


def _choices(candidate: Candidate) -> dict[tuple[str, ...], float]:
    """What a program depends on: the choices of a plan, and pairs of them."""
    program, of_one_node = candidate.program
    several, in_host = candidate.microbatches > 1, candidate.has_host_arrays
    doublings, preset = math.log2(candidate.microbatches), candidate.preset
    return {
        ("any plan",): 1.0,
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
    }


def _of_full(candidate: Candidate) -> dict[tuple[str, ...], float]:
    """What a full compile adds to a proxy."""
    program, of_one_node = candidate.program
    return {
        ("full",): 1.0,
        ("full, many",): max(0.0, math.log2(candidate.microbatches) - 1),
        ("full program", program.name, str(of_one_node)): 1.0,
    }


class Estimates:
    """Values of plans, expected from the programs compiled so far.

    Args:
        bounds: of all plans.
        scale: bytes of temporaries expected before anything was compiled, within a factor of 7.
    """

    def __init__(self, bounds: Mapping[Candidate, Bounds | RoundBounds], scale: float):
        self._bounds, self._scale = dict(bounds), math.log(scale)
        self._number = {each: number for number, each in enumerate(self._bounds)}
        proxies = [_choices(each) for each in self._bounds]
        added = [_of_full(each) for each in self._bounds]
        names = list(dict.fromkeys(name for each in (*proxies, *added) for name in each))
        self._proxies = np.array([[each.get(name, 0.0) for name in names] for each in proxies])
        self._full = self._proxies + [[each.get(name, 0.0) for name in names] for each in added]
        self._temporaries = _regression(names, _TEMPORARIES)
        self._seconds = _regression(names, _SECONDS)
        draws = np.random.default_rng(0).standard_normal((2, _DRAWS // 2, len(names)))
        self._draws = np.concatenate([draws, -draws], axis=1)

    def observe(
        self, candidate: Candidate, temporary: int, gradients: float, *, is_proxy: bool
    ) -> None:
        """Learn from a program.

        Args:
            candidate: a plan with the program.
            temporary: bytes of its temporaries.
            gradients: its seconds.
            is_proxy: or in full.
        """
        x = (self._proxies if is_proxy else self._full)[self._number[candidate]]
        least = self._bounds[candidate].gradients
        self._temporaries.observe(x, math.log(max(temporary, 1)) - self._scale)
        self._seconds.observe(x, math.log(max(gradients, least) / least))

    def draws(self, candidates: Sequence[Candidate]) -> tuple[np.ndarray, np.ndarray]:
        """Draws of bytes of a device and seconds of a step, by full compiles, `[draws, plans]`."""
        x = self._full[[self._number[each] for each in candidates]]
        temporaries = np.exp(self._scale + self._temporaries.weights(self._draws[0]) @ x.T)
        over = np.exp(np.maximum(0.0, self._seconds.weights(self._draws[1]) @ x.T))
        memory, seconds = np.empty_like(temporaries), np.empty_like(over)
        for number, candidate in enumerate(candidates):
            bounds = self._bounds[candidate]
            memory[:, number] = bounds.with_temporaries(temporaries[:, number])
            seconds[:, number], _ = bounds.predicted(bounds.gradients * over[:, number], 0.0)
        return memory, seconds


def _regression(names: Sequence[tuple[str, ...]], expected: _Expected) -> Regression:
    mean, sd = np.array([expected[name[0]] for name in names]).T
    return Regression(mean, sd, _NOISE)
