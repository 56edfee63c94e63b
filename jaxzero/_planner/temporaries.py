"""Predict the temporaries of each plan's program, in bytes, from the programs compiled so far.

A program with `k` micro-batches holds the activations of one of them, gathered weights, and sums of
gradients. Let `s` be the bytes of the activations of all rows of a device, and `u` the bytes of all
gradients, divided by the number of devices among which the preset splits their sums. Then

    temporaries = a s / k + b u.

Where devices share rows, `s` counts a device's part of them. With `S` pipeline stages, each has an
`S`-th of the layers, and keeps activations of at most `2 S - 1` micro-batches, whose rows are
divided among an `S`-th of the devices: `k` is then `m / min(m, 2 S - 1)` for `m` micro-batches.

`s` is unknown at first. The factor `a` is near 1, and depends on preset and loss. `b` depends on
the preset, on whether gradients of several micro-batches are summed up, and on which arrays lie in
host memory. `u` is known by arithmetic, and the expected `b` was set on Llamas of 1.1B and 7B
parameters (`benchmarks/compiled/plan_regret.py`). So the first compiled program tells `s`, for all
plans, and further ones correct `a` and `b`.

Under a budget of activations, `a s / k` is replaced by the bytes that the budget keeps and the
bytes that backward of one layer reads. Both are known by arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .bounds import Bounds
from .candidates import Candidate
from .cluster import Cluster
from .regression import Features, Regression, matrix_of, names_of
from .rounds import RoundBounds

_NOISE = 0.001  # standard deviation of temporaries around the formula, in units of `s`

# The expected weight of each feature, by the first part of its name: mean and standard deviation.
# Features in units of the activations of one micro-batch ...
_OF_ACTIVATIONS = {
    "loss": (0.0, 0.5),
    "of all rows": (0.0, 0.07),  # whatever the number of micro-batches
    "preset": (0.0, 0.02),
    "one node": (0.0, 0.1),
    "tokens": (0.0, 0.2),  # keys and values of other devices
    "stages": (0.0, 0.3),  # the head is not divided, and a layer holds more than it saves
    "program": (0.0, 0.015),
    "full": (0.0, 0.003),
    "full, many": (0.05, 0.1),  # micro-batches
    "full, many, prefetch": (-0.04, 0.06),
    "full, many of": (0.0, 0.03),
    "full program": (0.0, 0.015),
}
# ... and in units of the gradients that the preset splits.
_OF_GRADIENTS = {
    "held": (0.5, 0.2),
    "held by": (0.0, 0.15),
    "sums": (0.7, 0.2),
    "sums of": (0.0, 0.15),
    "sums of quantized": (0.7, 0.2),
    "sums in the state": (-0.65, 0.1),
    "no prefetch": (-0.15, 0.1),
    "host": (0.0, 0.15),
    "no prefetch, host": (0.0, 0.15),
    "no prefetch, host, no sums": (0.5, 0.3),
    "sums in host": (0.75, 0.15),
    "sums in host, quantized": (-0.4, 0.15),
    "program, gradients": (0.0, 0.03),
}
# ... and in bytes that a budget gives.
_OF_BUDGETS = {"kept": (0.97, 0.05), "working": (1.0, 0.5), "program, budget": (0.0, 0.02)}


def _features(plan: Candidate, bounds: Bounds | RoundBounds) -> tuple[Features, Features, Features]:
    """Return the features from which the temporaries of a plan's proxy program are predicted.

    They are in three groups, one for each unit of their weights: the activations of a micro-batch,
    `s / k`; the split gradients, `u`; and bytes.
    """
    program, of_one_node = plan.program
    several, in_host = plan.microbatches > 1, plan.has_host_arrays
    waits = 1 - plan.config.schedule.prefetch
    name = program.name, str(of_one_node)
    activations = {
        ("activations",): 1.0,
        ("loss", plan.loss): 1.0,
        ("of all rows",): _parts(plan),
        ("preset", plan.preset): 1.0,
        ("one node",): of_one_node,
        ("tokens",): plan.tokens > 1,
        ("stages",): plan.stages > 1,
        ("program", *name): 1.0,
    }
    budget = {}
    if bounds.activations is not None:
        kept, _, working = bounds.activations
        activations = {}
        budget = {
            ("kept",): kept,
            ("working",): working,
            ("program, budget", *name): kept + working,
        }
    gradients = {
        ("held",): 1.0,
        ("held by", plan.preset): 1.0,
        ("sums",): several,
        ("sums of", plan.preset): several,
        ("sums of quantized",): several and plan.preset.startswith("zeropp"),
        ("sums in the state",): several and plan.preset == "stage 2",
        ("no prefetch",): waits,
        ("host",): in_host,
        ("no prefetch, host",): waits and in_host,
        ("no prefetch, host, no sums",): waits and in_host and not several,
        ("sums in host",): several and in_host,
        ("sums in host, quantized",): several and in_host and plan.preset.startswith("zeropp"),
        ("program, gradients", *name): 1.0,
    }
    return activations, gradients, budget


def _of_full(plan: Candidate) -> Features:
    """Return the features that predict how many more bytes a full program takes than its proxy.

    Their weights are in units of the activations of a micro-batch, `s / k`.
    """
    program, of_one_node = plan.program
    if plan.activation_budget is not None:  # proxies and full compiles hold the same, within 1%
        return {}
    many = plan.microbatches > 2
    return {
        ("full",): 1.0,
        ("full, many",): many,
        ("full, many, prefetch",): many and plan.config.schedule.prefetch,
        ("full, many of", plan.preset): many,
        ("full program", program.name, str(of_one_node)): 1.0,
    }


def _split(plan: Candidate, cluster: Cluster) -> int:
    """Return among how many devices a plan splits the sums of gradients over micro-batches."""
    if plan.config.stage < 3:
        return 1
    is_over_all = plan.preset.split()[0] == "zero3" and plan.local_steps is None
    return cluster.local * (cluster.nodes if is_over_all else plan.stages)


def _parts(plan: Candidate) -> float:
    """Return `k`: a device holds a `k`-th of the activations of all its rows at a time."""
    return max(1.0, plan.microbatches / (2 * plan.stages - 1))


class Temporaries:
    """A model of each plan's temporaries, which learns from compiled programs.

    Args:
        bounds: the bounds of all plans. A plan's number is its index in this mapping.
        cluster: the devices.
        limit: bytes of a device that a plan may take; activations are expected to be of that order.
    """

    def __init__(
        self, bounds: Mapping[Candidate, Bounds | RoundBounds], cluster: Cluster, limit: float
    ):
        parts = [_features(plan, x) for plan, x in bounds.items()]
        full = [_of_full(plan) for plan in bounds]
        self._names = names_of(*zip(*parts, strict=True), full)
        activations, gradients, self._budgets, compiled = (
            matrix_of(self._names, x) for x in (*zip(*parts, strict=True), full)
        )
        k = np.array([[_parts(plan)] for plan in bounds])
        u = np.array([[x.full_gradients / _split(plan, cluster)] for plan, x in bounds.items()])
        self._activations = activations / k
        self._gradients = gradients * u
        self._full = compiled / k
        self._limit = limit
        self._seen: list[tuple[int, bool, int]] = []
        self._fit()

    @property
    def num_features(self) -> int:
        return len(self._names)

    def observe(self, number: int, num_bytes: int, *, is_full: bool) -> None:
        """Learn that the program of plan `number` has temporaries of `num_bytes`.

        `is_full` is true for a full compile, false for a proxy.
        """
        self._seen.append((number, is_full, num_bytes))
        self._fit()

    def _fit(self) -> None:
        scale = self._limit / 10  # first guess of the bytes of all activations
        # Twice: the standard deviations of other features are in units of the scale.
        for _ in range(2):
            self._scale = scale
            expected = {
                **_OF_ACTIVATIONS,
                **_OF_GRADIENTS,
                **_OF_BUDGETS,
                "activations": (self._limit / 10 / scale, self._limit / scale),
            }
            mean, sd = np.array([expected[name[0]] for name in self._names]).T
            self._regression = Regression(mean, sd, _NOISE)
            for number, is_full, num_bytes in self._seen:
                self._regression.observe(self._x(number, is_full), num_bytes / scale)
            activations = self._regression.mean[self._names.index(("activations",))]
            scale *= max(activations, 0.01)

    def _x(self, numbers: int | Sequence[int], is_full: bool) -> np.ndarray:
        """Return the features of one plan, `[features]`, or of several, `[plans, features]`.

        Their weighted sum is the temporaries in units of `self._scale` bytes.
        """
        in_bytes = self._gradients[numbers] + self._budgets[numbers]
        x = self._activations[numbers] + in_bytes / self._scale
        return x + self._full[numbers] if is_full else x

    def draws(self, numbers: Sequence[int], normal: np.ndarray) -> np.ndarray:
        """Draw samples of the bytes of temporaries of plans' full programs, `[draws, plans]`.

        Args:
            numbers: the numbers of the plans.
            normal: standard normal numbers, `[draws, features]`, from which draws are made.
        """
        drawn = self._regression.weights(normal) @ self._x(numbers, True).T
        return self._scale * np.maximum(0.0, drawn)
