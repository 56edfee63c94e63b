"""Predict how long the gradients of each plan take, from the programs compiled so far.

Let `c` be the least seconds that a plan's matrix products take, `n` those that its bytes take to
enter a node, and `l` those to enter a device. The program of the gradients is expected to take

    t = m + e (b c + n + l - m),  where m = max(b c, n, l).

`b` is the factor by which a device computes longer than its matrix products take at the least. It
is almost the same for all plans of a model. `e` is the part of the two shorter times that does not
overlap with the longest. Without prefetch it is 1; with prefetch it depends on the preset. The
expected `e` was set on Llamas of 1.1B and 7B parameters (`benchmarks/compiled/plan_regret.py`).

`b` is one of a grid of values. For a given `b`, `t / m` is linear in the other unknowns. So there
is a linear regression for each value of `b`, and observed times say how likely each value is.

Under a budget of activations, `t` also has the seconds in which dropped operations are repeated.
Dropped activations are not written and read: how much time that saves is learned for each loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .bounds import Bounds
from .candidates import Candidate
from .regression import Features, Regression, matrix_of, names_of
from .rounds import RoundBounds

_NOISE = 0.003  # standard deviation of `t / m` around the formula
_SLOWER = np.geomspace(1.0, 6.0, 16)  # the grid of `b`
_EXPECTED = np.log(2.0), 0.5  # mean and standard deviation of `log b` before any observation

# The expected weight of each feature, by the first part of its name: mean and standard deviation.
# Features that add to `e` ...
_EXPOSED = {
    "no overlap": (1.0, 0.05),
    "overlap": (0.2, 0.1),
    "overlap by": (0.0, 0.1),
    "overlap, quantized": (0.25, 0.15),
    "overlap, several": (0.0, 0.1),
    "overlap, several, in nodes": (0.5, 0.15),
    "overlap, several by": (0.0, 0.15),
    "host, exposed": (0.1, 0.1),
    "stages, exposed": (0.1, 0.2),  # messages of ticks without a backward part wait
    "program, exposed": (0.0, 0.05),
}
# ... that add to `t`, in units of `m` ...
_TOTAL = {
    "all": (0.0, 0.1),
    "all of": (0.0, 0.05),
    "all, no prefetch": (0.0, 0.1),
    "all, doublings": (0.0, 0.03),
    "all, program": (0.0, 0.02),
}
# ... and in units of `b c`.
_COMPUTE = {
    "loss": (0.0, 0.3),
    "one node": (0.0, 0.1),
    "stages": (0.0, 0.15),
    "tokens": (0.05, 0.15),  # no bound counts the exchange of keys and values
    "preset": (0.0, 0.03),
    "doublings": (0.04, 0.02),  # of micro-batches
    "doublings of": (0.0, 0.02),
    "no prefetch": (0.0, 0.02),
    "host": (0.03, 0.04),
    "host, no prefetch": (0.05, 0.05),
    "host, doublings": (0.01, 0.03),
    "program": (0.0, 0.01),
    "full": (-0.08, 0.05),
    "full of": (0.0, 0.05),  # a form of the loss: without remat softmax takes a smaller part
    "full, doublings": (0.01, 0.02),
    "full program": (0.0, 0.01),
    "budget": (-0.2, 0.15),
}
_SECONDS = {"repeated": (1.0, 0.4)}  # ... and in seconds
_ALL = _EXPOSED | _TOTAL | _COMPUTE | _SECONDS


def _features(plan: Candidate, bounds: Bounds | RoundBounds) -> tuple[Features, ...]:
    """Return the features from which the time of a plan's proxy program is predicted.

    A plan's features are in four groups, one for each unit of their weights: the two shorter times
    (these features make up `e`); `m`; `b c`; and seconds.
    """
    program, of_one_node = plan.program
    in_host, doublings = plan.has_host_arrays, np.log2(plan.microbatches)
    name = program.name, str(of_one_node)
    overlaps = bool(plan.config.schedule.prefetch) and plan.config.stage > 1
    several = overlaps and plan.microbatches > 1
    sums_in_nodes = plan.preset not in ("zero3", "stage 2")
    exposed = {
        ("no overlap",): not overlaps,
        ("overlap",): overlaps,
        ("overlap by", plan.preset): overlaps,
        ("overlap, quantized",): overlaps and plan.preset.startswith("zeropp"),
        ("overlap, several",): several,
        ("overlap, several, in nodes",): several and sums_in_nodes,
        ("overlap, several by", plan.preset): several,
        ("host, exposed",): in_host,
        ("stages, exposed",): plan.stages > 1,
        ("program, exposed", *name): 1.0,
    }
    total = {
        ("all",): 1.0,
        ("all of", plan.preset): 1.0,
        ("all, no prefetch",): 1 - plan.config.schedule.prefetch,
        ("all, doublings",): doublings,
        ("all, program", *name): 1.0,
    }
    compute = {
        ("loss", plan.loss): 1.0,
        ("one node",): of_one_node,
        ("stages",): plan.stages > 1,
        ("tokens",): plan.tokens > 1,
        ("preset", plan.preset): 1.0,
        ("doublings",): doublings,
        ("doublings of", plan.preset): doublings,
        ("no prefetch",): 1 - plan.config.schedule.prefetch,
        ("host",): in_host,
        ("host, no prefetch",): in_host and not plan.config.schedule.prefetch,
        ("host, doublings",): in_host * doublings,
        ("program", *name): 1.0,
    }
    if bounds.activations is None:
        return exposed, total, compute, {}
    compute |= {("budget", plan.loss): 1.0}
    return exposed, total, compute, {("repeated",): bounds.activations.seconds}


def _of_full(plan: Candidate) -> Features:
    """Return the features that predict how much longer a full program takes than its proxy.

    Their weights are in units of `b c`.
    """
    program, of_one_node = plan.program
    of_loss = {("full of", plan.loss): 1.0} if plan.loss else {}
    return {
        **of_loss,
        ("full",): 1.0,
        ("full, doublings",): np.log2(plan.microbatches),
        ("full program", program.name, str(of_one_node)): 1.0,
    }


class Durations:
    """A model of the seconds that each plan's gradients take, which learns from compiled programs.

    Args:
        bounds: for each plan, lower bounds of the time and memory of its step. The number of a plan
            in the methods is its place in this order, from 0.
    """

    def __init__(self, bounds: Mapping[Candidate, Bounds | RoundBounds]):
        parts = [_features(plan, x) for plan, x in bounds.items()]
        full = [_of_full(plan) for plan in bounds]
        self._names = names_of(*zip(*parts, strict=True), full)
        self._exposed, self._total, self._compute, self._seconds, self._full = (
            matrix_of(self._names, x) for x in (*zip(*parts, strict=True), full)
        )
        steps = [x.step if isinstance(x, RoundBounds) else x for x in bounds.values()]
        self._bounds = np.array([[x.compute, x.node, x.local] for x in steps])
        mean, sd = np.array([_ALL[name[0]] for name in self._names]).T
        self._regressions = [Regression(mean, sd, _NOISE) for _ in _SLOWER]
        middle, spread = _EXPECTED
        self._likely = -(((np.log(_SLOWER) - middle) / spread) ** 2) / 2

    @property
    def num_features(self) -> int:
        return len(self._names)

    def _x(self, slower: float, numbers: Sequence[int], is_full: bool) -> tuple[np.ndarray, ...]:
        """Return `x`, `[plans, features]`, and `m`, `[plans]`, to predict the times of plans.

        A program's seconds are predicted as `m * (1 + x @ weights)`, with the weights that a
        `Regression` has learned. `m` is the longest of the plan's least times (see the module).

        Args:
            slower: `b`, the factor by which a device computes longer than its matrix products take
                at the least.
            numbers: the numbers of the plans.
            is_full: True for programs that are compiled in full, False for proxies.
        """
        times = self._bounds[numbers] * [slower, 1.0, 1.0]
        longest = np.max(times, axis=1)
        exposed = (np.sum(times, axis=1) / longest - 1)[:, None] * self._exposed[numbers]
        compute = self._compute[numbers] + (self._full[numbers] if is_full else 0.0)
        in_compute = (times[:, 0] / longest)[:, None] * compute
        in_seconds = self._seconds[numbers] / longest[:, None]
        return self._total[numbers] + exposed + in_compute + in_seconds, longest

    def observe(self, number: int, seconds: float, *, is_full: bool) -> None:
        """Learn that the program of plan `number` takes `seconds`.

        Seconds below the plan's lower bounds are ignored.
        """
        if seconds < np.max(self._bounds[number]):
            return
        for i, (slower, regression) in enumerate(zip(_SLOWER, self._regressions, strict=True)):
            (x,), (longest,) = self._x(slower, [number], is_full)
            # The density of seconds is that of `t / m` divided by `m`, which depends on `b`.
            self._likely[i] += regression.observe(x, seconds / longest - 1) - np.log(longest)

    def draws(self, numbers: Sequence[int], normal: np.ndarray) -> np.ndarray:
        """Draw samples of the seconds that plans' full programs may take, `[draws, plans]`.

        Args:
            numbers: the numbers of the plans.
            normal: standard normal numbers, `[draws, features]`, from which draws are made.
        """
        # Each `b` gets draws in proportion to its probability, at random places.
        weights = np.exp(self._likely - np.max(self._likely))
        last = np.rint(np.cumsum(weights) / np.sum(weights) * len(normal)).astype(int)
        result = np.empty((len(normal), len(numbers)))
        order = np.random.default_rng(1).permutation(len(normal))
        for begin, end, slower, regression in zip(
            (0, *last[:-1]), last, _SLOWER, self._regressions, strict=True
        ):
            if begin < end:
                chosen = order[begin:end]
                x, longest = self._x(slower, numbers, True)
                result[chosen] = longest * (1 + regression.weights(normal[chosen]) @ x.T)
        return result
