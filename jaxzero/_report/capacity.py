"""Compute how many layers of a report's model fit in memory; see `Report.largest_model`.

Layers are found in two ways. A leaf that a loop of the step scans has one layer for each iteration.
Leaves of one shape whose paths differ in one number only are the layers of one kind. If not all
leaves have the same number of layers, the model is a repetition of a unit, and the greatest common
divisor of these numbers says how often it is repeated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .._plan import Plan
from .data import ReportData, Row
from .timeline import spans


@dataclasses.dataclass(frozen=True)
class LargestModel:
    """The largest model that fits in memory: its layers, parameters and bytes.

    Attributes:
        num_layers: number of layers; 0 if not even one fits. In a model whose loops differ in
            length, the number of times that the repeated unit fits.
        num_parameters: elements of the model's parameters, without padding.
        limit: the memory that one more layer does not fit into, "device" or "host".
        device_bytes: bytes of the model in the memory of one device.
        host_bytes: bytes of the model in host memory, for one device.
    """

    num_layers: int
    num_parameters: int
    limit: str
    device_bytes: int
    host_bytes: int


@dataclasses.dataclass(frozen=True)
class _Size:
    """A number of bytes or elements that grows with the layers: `rest + n * layer`."""

    rest: int
    layer: int

    def __add__(self, other: _Size) -> _Size:
        return _Size(self.rest + other.rest, self.layer + other.layer)

    def of(self, num_layers: int) -> int:
        return self.rest + num_layers * self.layer

    def most(self, limit: int) -> float:
        """Return how many layers fit within `limit`; negative if `rest` alone does not fit."""
        if self.rest > limit:
            return -1.0
        return float((limit - self.rest) // self.layer) if self.layer else math.inf


def largest_model(
    report: ReportData,
    device_bytes: int,
    host_bytes: int,
    activation_bytes: int,
    layer_activation_bytes: int,
) -> LargestModel:
    """Return the largest model that memory holds; see `Report.largest_model`.

    Raises:
        ValueError: an argument is not a number of bytes; the report has no plan or no optimizer
            state; or the model has no layers.
    """
    check_bytes(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        activation_bytes=activation_bytes,
        layer_activation_bytes=layer_activation_bytes,
    )
    if report.plan is None or not report.has_state:
        raise ValueError(
            "The largest model depends on the optimizer state and on the plan of a step, and this "
            "report lacks one of them. Make it with `zero.report(params, opt_state, "
            "plan=zero.plan(loss_fn, params, batch))`."
        )
    layers = _Layers(report)
    on_device, on_host = layers.of_rows("device_bytes"), layers.of_rows("host_bytes")
    on_device += layers.copied_whole() + layers.slices(report.plan)
    on_device += _Size(_step_bytes(report.plan) + activation_bytes, layer_activation_bytes)
    sizes = {"device": (on_device, device_bytes), "host": (on_host, host_bytes)}
    most = {name: size.most(limit) for name, (size, limit) in sizes.items()}
    limit = min(most, key=lambda name: most[name])
    if most[limit] < 1:
        return LargestModel(0, 0, limit, 0, 0)
    num = int(most[limit])
    parameters = layers.size(_elements, (x for x in report.rows if x.kind == "parameters"))
    return LargestModel(num, parameters.of(num), limit, on_device.of(num), on_host.of(num))


def check_bytes(**given: Any) -> None:
    """Raise `ValueError` unless all arguments are numbers of bytes, 0 or more."""
    for name, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise ValueError(
                f"`{name}` must be a number of bytes, 0 or more, such as `80 * 10**9`; "
                f"got {value!r}."
            )


def _elements(row: Row) -> int:
    return math.prod(row.shape)


class _Layers:
    """Finds the leaves of a report that belong to layers, and sums bytes per layer and outside.

    Sums are `_Size`s: `layer` is the sum of one layer, `rest` that of all leaves outside of layers.
    """

    def __init__(self, report: ReportData):
        self.report = report
        counts = {**_numbered(report.rows), **_scanned(report.plan)}
        self.num = math.gcd(*counts.values())
        self.paths = frozenset(counts)
        if not counts:
            raise ValueError(
                "No layers are found in this model, so it cannot be made larger. Scan over stacked "
                "layers, or number them in the tree: `layers.0.kernel`, `layers.1.kernel`."
            )

    def size(self, amount: Callable[[Row], int], rows: Iterable[Row]) -> _Size:
        """Sum `amount(row)` over rows, separately for layers and for the rest."""
        return self._split((row.path, amount(row)) for row in rows)

    def of_rows(self, memory: str) -> _Size:
        """Sum the field `memory` over all rows: "device_bytes" or "host_bytes"."""
        return self.size(lambda row: getattr(row, memory), self.report.rows)

    def copied_whole(self) -> _Size:
        """Sum the bytes in device memory of those offloaded leaves that a step copies in full."""
        traffic = self.report.host_traffic
        whole = traffic.whole if traffic else ()
        largest = {(x.purpose, x.name): x.num_bytes for x in whole}
        return self._split((name, size) for (_, name), size in largest.items())

    def slices(self, plan: Plan) -> _Size:
        """Sum the bytes of node slices (hpZ), which are attributed to parameters by their size."""
        split = [x for x in self.report.rows if x.kind == "parameters" and x.dim is not None]
        total = sum(row.total_bytes for row in split)
        if not plan.slice_bytes or not total:
            return _Size(0, 0)
        return self.size(lambda row: math.ceil(plan.slice_bytes * row.total_bytes / total), split)

    def _split(self, named: Iterable[tuple[str, int]]) -> _Size:
        rest = layers = 0
        for path, amount in named:
            if self._is_layer(path):
                layers += amount
            else:
                rest += amount
        return _Size(rest, math.ceil(layers / self.num))

    def _is_layer(self, path: str) -> bool:
        """Return True if a leaf belongs to the layers.

        The path of a leaf of the optimizer state ends with the path of its parameter.
        """
        parts = path.split(".")
        return any(".".join(parts[i:]) in self.paths for i in range(len(parts)))


def _scanned(plan: Plan | None) -> dict[str, int]:
    """Return, for each leaf that a loop of the step scans, the loop's number of iterations."""
    if plan is None:
        return {}
    return {
        stack.view.weight.name: length
        for index, loop in plan.top.uses.loops.items()
        for stack in loop.stacks
        if (length := getattr(plan.top.block.operations[index], "length", 1)) > 1
    }


def _numbered(rows: Iterable[Row]) -> dict[str, int]:
    """Return, for each parameter that is in a numbered layer, how many such layers there are.

    Parameters such as `layers.0.kernel` and `layers.1.kernel` are in numbered layers: they have one
    shape and dtype, and their paths differ in their first number only.
    """
    kinds: dict[tuple, list[str]] = {}
    for row in rows:
        parts = row.path.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if row.kind == "parameters" and place is not None:
            key = (*parts[:place], "", *parts[place + 1 :], row.shape, row.dtype)
            kinds.setdefault(key, []).append(row.path)
    return {path: len(paths) for paths in kinds.values() if len(paths) > 1 for path in paths}


def _step_bytes(plan: Plan) -> int:
    """Return the peak bytes of arrays that exist only within a step.

    These are full weights, unreduced gradients, and shards fetched from host memory.
    """
    held = [span for span in spans(plan) if span.windowed]
    live = np.zeros(1 + max((span.stop for span in held), default=0), np.int64)
    for span in held:
        live[span.start : span.stop + 1] += span.num_bytes * span.held
    return int(live.max())
