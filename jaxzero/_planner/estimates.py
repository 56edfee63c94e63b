"""What programs are expected to take that were not compiled, by those that were.

With `c`, `n` and `l` the lower bounds of a plan's matrix products, of what enters its node and of
what its device receives, its gradients are expected to take

    m + e (b c + n + l - m),  where m = max(b c, n, l).

`b` is how much longer a device computes than its matrix products take at the least, and `e` the
part of the shorter times that nothing overlaps with. A program with `k` micro-batches holds the
activations of one of them, and a multiple of the gradients that a preset splits. With `s` bytes of
activations of all rows, and `u` bytes of these gradients, its temporaries are expected to be

    s / k + h u.

`b` and `s` are almost the same for all plans with one form of the loss, and fitted to the programs
that were compiled; `e` and `h` are tables, set on Llamas of 1.1B and 7B parameters
(`benchmarks/compiled/plan_regret.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .bounds import Bounds, RoundBounds
from .candidates import Candidate
from .cluster import Cluster

_SLOWER = np.geomspace(1.0, 6.0, 60)  # `b`
_USUALLY = 2.0, 0.5  # `b`, and the standard deviation of its logarithm, before a program is known
_ERROR = 0.1  # of the time that is expected of a program with the right `b`


class Estimates:
    """Times and temporaries of programs, expected from those compiled so far.

    Args:
        bounds: of all plans; more may be added to it.
        cluster: the devices.
    """

    def __init__(self, bounds: Mapping[Candidate, Bounds | RoundBounds], cluster: Cluster):
        self._bounds = bounds
        self._cluster = cluster
        self._compiled: dict[Candidate, tuple[float, int]] = {}  # the proxy, if there is one
        self._ratios: list[float] = []

    def observe(
        self, plan: Candidate, seconds: float, temporary: int, *, is_proxy: bool = True
    ) -> None:
        """Learn the seconds of a program of the gradients, and the bytes of its temporaries."""
        if not is_proxy and plan in self._compiled:
            self._ratios.append(seconds / self._compiled[plan][0])
        else:
            self._compiled[plan] = seconds, temporary

    @property
    def full_to_proxy(self) -> float:
        """Seconds of full compiles over those of their proxies; 1 while none is known."""
        return sum(self._ratios) / len(self._ratios) if self._ratios else 1.0

    def knows(self, loss: str) -> bool:
        """Whether a program with this form of the loss was compiled."""
        return any(plan.loss == loss for plan in self._compiled)

    def seconds(self, plan: Candidate) -> float:
        """Expected of the gradients of a plan; never less than their bound."""
        known = self._like(plan)
        usual, deviation = _USUALLY
        errors = ((np.log(_SLOWER) - np.log(usual)) / deviation) ** 2
        for other, (seconds, _) in known.items():
            errors += (np.log(seconds / self._times(other, _SLOWER)) / _ERROR) ** 2
        slower = _SLOWER[np.argmin(errors)]
        return max(self._bounds[plan].gradients, float(self._times(plan, slower)))

    def temporaries(self, plan: Candidate) -> float:
        """Expected bytes of a plan's program; 0 while none with its form of the loss is known."""
        if not self.knows(plan.loss):
            return 0.0
        # Least squares of `temporaries - h u = s / k`.
        known = self._like(plan).items()
        rows = [(1 / x.microbatches, size - self._of_gradients(x)) for x, (_, size) in known]
        activations = sum(x * y for x, y in rows) / sum(x * x for x, _ in rows)
        return max(0.0, activations) / plan.microbatches + self._of_gradients(plan)

    def _like(self, plan: Candidate) -> dict[Candidate, tuple[float, int]]:
        """The compiled plans with the same form of the loss; all, if there is none."""
        same = {x: seen for x, seen in self._compiled.items() if x.loss == plan.loss}
        return same or self._compiled

    def _times(self, plan: Candidate, slower: np.ndarray) -> np.ndarray:
        bounds = self._bounds[plan]
        step = bounds.step if isinstance(bounds, RoundBounds) else bounds
        more = 1 + 0.04 * np.log2(plan.microbatches) + 0.05 * plan.has_host_arrays
        parts = np.broadcast_arrays(slower * more * step.compute, step.node, step.local)
        longest = np.max(parts, axis=0)
        return longest + _exposed(plan) * (np.sum(parts, axis=0) - longest)

    def _of_gradients(self, plan: Candidate) -> float:
        """Bytes of temporaries that do not depend on the activations, `h u`."""
        return _held(plan) * self._bounds[plan].full_gradients / _split(plan, self._cluster)


def _exposed(plan: Candidate) -> float:
    """The part `e` of the shorter times that nothing overlaps with."""
    if not plan.config.schedule.prefetch or plan.config.stage < 2:
        return 1.0
    part = 0.45 if plan.is_quantized else 0.2
    sums_in_nodes = plan.microbatches > 1 and plan.preset not in ("zero3", "stage 2")
    return min(1.0, part + 0.5 * sums_in_nodes)


def _held(plan: Candidate) -> float:
    """The multiple `h` of the gradients: those on their way, and sums over micro-batches."""
    several, in_host = plan.microbatches > 1, plan.has_host_arrays
    is_late = not plan.config.schedule.prefetch
    part = 0.5 - 0.15 * is_late
    if several:
        part += 0.05 if plan.preset == "stage 2" else 1.4 if plan.is_quantized else 0.7
        part += in_host * (0.35 if plan.is_quantized else 0.75)
    elif in_host and is_late:
        part += 0.5
    return part


def _split(plan: Candidate, cluster: Cluster) -> int:
    """The number of devices among which sums of gradients are split before all are summed."""
    if plan.config.stage < 3:
        return 1
    is_over_all = plan.preset == "zero3" and plan.local_steps is None
    return cluster.local * (cluster.nodes if is_over_all else 1)
