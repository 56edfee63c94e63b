"""Compare the configured step with plain JAX on one device, under derived bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._collectives import CommSpec
from .._mesh import AnyMesh
from .._sharding import LeafSpec, ZeroConfig
from .codec_bounds import bounds_of, gradient_bound, has_codecs, row_bound, weight_bound
from .each_device import EachDevice
from .locate import first_difference, shared_draw
from .one_device import OneDevice, free_bytes, least_bytes, own_device
from .problem import HalfBatches, Problem
from .report import Check, Rounding, Variation, VerifyReport
from .samples import Samples, checked, measured
from .update import Update, check_update


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """Functions that run the configured step, and its settings.

    Attributes:
        step: takes the full arrays of the arguments, the number of micro-batches, and whether
            codecs are used; returns the loss, `aux` and gradients in one list, on the host, and a
            value to give to `extras`.
        extras: takes the value that `step` returned; returns the update, or None without an
            optimizer, and the inner products of the gradients of the half-batches, or None without
            `halves`.
        tables: returns a dict with the path of each table whose rows the step sends to devices that
            look them up; the value is whether the step also gathers the whole table.
        mesh: the devices of the step.
        config: the config of `Zero`.
        comm: the codecs of the step, and the sizes of the mesh axes.
        microbatches: the configured number of micro-batches of a device.
    """

    step: Callable[[Sequence[Any], int, bool], tuple[list[Any], Any]]
    extras: Callable[[Any], tuple[Update | None, list[Any] | None]]
    tables: Callable[[], dict[str, bool]]
    mesh: AnyMesh
    config: ZeroConfig
    comm: CommSpec
    microbatches: int


class Verification:
    """Compares the configured step of `runs` with plain JAX on `problem`; see `Zero.verify`."""

    def __init__(
        self,
        problem: Problem,
        runs: Runs,
        reference: Any,
        codecs: bool,
        say: Callable[[str], None],
    ):
        self.problem, self.runs = problem, runs
        self.encoded = codecs and has_codecs(runs.config)
        self.comm, counted = runs.comm, problem.of_counted
        self.tables = runs.tables() if self.encoded else {}
        spread = self._spread() if self.encoded else None
        self.one = OneDevice.chosen(counted, problem, runs.mesh, reference, spread, say)
        self.memory = self.one.described()
        self.want = self.one.run()
        self.samples = self.one.samples(self.want, False, False)
        self.is_random = self.one.is_random
        # How far a right result may be off, since random numbers may fall on other rows.
        self.allowed = self.one.samples(self.want, True, False) if self.is_random else self.samples
        self._each: EachDevice | None = None

    def _spread(self) -> list[Any]:
        trained = zip(self.problem.of_counted.arrays, self.problem.leaves, strict=True)
        return [
            np.zeros(np.shape(x), np.float32)
            if leaf is None
            else self._bound_of_weight(leaf, np.asarray(x))
            for x, leaf in trained
        ]

    def _bound_of_weight(self, leaf: LeafSpec, x: Any) -> Any:
        if leaf.path not in self.tables:
            return weight_bound(leaf, x, self.comm)
        bound = row_bound(leaf, x, self.comm)
        is_gathered = self.tables[leaf.path]
        return np.maximum(bound, weight_bound(leaf, x, self.comm)) if is_gathered else bound

    def report(self, variations: bool, float64: bool) -> VerifyReport:
        """Run the step and plain JAX, and compare the results.

        Args:
            variations: whether to run the step also with changes that should not matter.
            float64: whether to compare the results of both with plain JAX in float64 too.
        """
        got, made = self.runs.step(self.problem.arrays, self.runs.microbatches, False)
        update, halves = self.runs.extras(made)
        checks: dict[Any, Check] = dict(self._compare(got, self.want, self.allowed))
        wrong = [i for i, check in checks.items() if not check.ok]
        cause, first = "", ""
        if self.is_random:
            first = shared_draw(self.problem, self.runs.mesh)
            cause = "keys" if first else ""
        if not cause and (wrong or self.is_random) and not self._has_room():
            cause = "room" if wrong else ""
        elif not cause and (wrong or self.is_random):
            of_each = self.each.combined(self.each.parts)
            with_each = self._compare(got, of_each, self.each.samples(of_each))
            if not all(check.ok for check in with_each.values()):
                cause, checks = "step", dict(with_each)
            elif wrong:
                cause, first = "rows", self._first(wrong)
            else:  # on each device, plain JAX draws the same random numbers as the step
                checks |= {
                    (i, "drawn"): dataclasses.replace(check, kind=f"{check.kind}, same numbers")
                    for i, check in with_each.items()
                }
        all_checks = list(checks.values())
        for name, others in (
            ("halves", self._check_halves(halves)),
            ("update", self._check_update(update)),
            ("codecs", self._check_codecs()),
        ):
            all_checks += others
            cause = cause or ("" if all(check.ok for check in others) else name)
        return VerifyReport(
            checks=tuple(sorted(all_checks, key=lambda check: -check.ratio)),
            variations=tuple(self._variations(got)) if variations else (),
            roundings=tuple(self._roundings(got)) if float64 else (),
            cause=cause,
            first=first,
            notes=tuple(self._notes()),
            memory=self.memory,
        )

    def _first(self, wrong: list[int]) -> str:
        return first_difference(self.problem, self.runs.mesh, self.runs.microbatches, wrong)

    def _compare(
        self, got: Sequence[Any], want: Sequence[Any], samples: Samples
    ) -> dict[int, Check]:
        """Compare the loss, `aux` and gradients of the step with those of plain JAX.

        Arrays of `aux` that one device with all rows cannot compute are left out. The result has a
        check for each index in `Problem.names`.

        Args:
            got: the step's results.
            want: plain JAX's results.
            samples: how far roundings move plain JAX's results.
        """
        return {
            i: self._check(name, kind, x, y, samples.bounds(i))
            for i, (name, kind, x, y) in enumerate(self._pairs(got, want))
            if kind != "aux" or self._is_comparable(i)
        }

    def _check(self, name: str, kind: str, got: Any, want: Any, bounds: Any) -> Check:
        num = self.comm.num_devices * self.runs.microbatches
        return checked(name, kind, got, want, bounds, num)

    def _pairs(self, got: Sequence[Any], want: Sequence[Any]) -> list[tuple[str, str, Any, Any]]:
        num = len(self.problem.aux_how)
        kinds = ["loss", *["aux"] * num, *["gradient"] * len(self.problem.grad_names)]
        return list(zip(self.problem.names, kinds, got, want, strict=True))

    def _is_comparable(self, i: int) -> bool:
        return self.problem.aux_how[i - 1] not in ("first", "stack")

    def _notes(self) -> list[str]:
        return [
            f"aux {name} is that of {'one device' if how == 'first' else 'each device'} "
            f"({how!r}), which one device with all rows does not compute: not compared."
            for name, how in zip(self.problem.aux_names, self.problem.aux_how, strict=True)
            if how in ("first", "stack")
        ]

    def _has_room(self) -> bool:
        """Return True if a device of the mesh has room for all arguments and gradients in full."""
        return least_bytes(self.problem) <= free_bytes(own_device(self.runs.mesh))

    @property
    def each(self) -> EachDevice:
        """Plain JAX on the rows of each device; it is made at the first use."""
        if self._each is None:
            self._each = EachDevice(self.problem, self.runs.mesh, self.runs.microbatches)
        return self._each

    def _check_halves(self, got: list[Any] | None) -> list[Check]:
        """Compare the inner products of half-batch gradients with those of plain JAX.

        `got` has the step's inner products. If it is None, the step has none, and the result is [].
        """
        if got is None:
            return []
        problem = HalfBatches.of(self.problem, self.comm)
        one = OneDevice(problem, self.one.device, self.one.platform)
        want = one.run()
        samples = one.samples(want, self.is_random, False)
        return [
            self._check(name, "half-batches", x, y, samples.bounds(i))
            for i, (name, x, y) in enumerate(zip(problem.names, got, want, strict=True))
        ]

    def _check_update(self, update: Update | None) -> list[Check]:
        if update is None:
            return []
        first = len(self.problem.names) - len(self.problem.grad_names)
        sizes = [self.samples.bounds(i)[0] for i in range(first, len(self.problem.names))]
        return check_update(
            update, self.one.device, dict(zip(self.problem.grad_names, sizes, strict=True))
        )

    def _check_codecs(self) -> list[Check]:
        """Compare the step with codecs to plain JAX, in bounds that include codecs' errors."""
        if not self.encoded:
            return []
        if not self._has_room():
            raise ValueError(
                "The bound of codecs needs the gradients of each device, and "
                f"{own_device(self.runs.mesh)} has not the room. Give `codecs=False`."
            )
        got, _ = self.runs.step(self.problem.arrays, self.runs.microbatches, True)
        samples = self.one.samples(self.want, self.is_random, True)
        parts, is_counted = self.each.parts, self.each.is_counted
        base = self.each.combined(parts)
        first = len(parts) - len(self.problem.grad_names)
        scale = is_counted.size / np.sum(is_counted)
        if first > 1 + len(self.problem.aux_how):  # sums, to be divided by the weight
            scale = is_counted.size / np.sum(np.asarray(parts[1], np.float64)[is_counted])
        checks = []
        for i, (name, kind, x, y) in enumerate(self._pairs(got, self.want)):
            if kind == "aux" and not self._is_comparable(i):
                continue
            bounds = samples.bounds(i)
            if kind == "gradient":
                place = i - len(self.problem.aux_how) - 1
                leaf = self.problem.leaves[self.problem.differentiated[place]]
                assert leaf is not None
                parts_of_leaf = np.asarray(parts[first + place], np.float64) * scale
                parts_of_leaf[~is_counted] = 0
                error = gradient_bound(leaf, parts_of_leaf, self.comm, self.runs.config)
                if leaf.path not in self.tables:
                    bounds = bounds + bounds_of(error, base[i])
                elif np.any(error):  # cotangents of rows are encoded, and only their sums are known
                    bounds = bounds + np.inf
            checks.append(self._check(name, f"{kind}, encoded", x, y, bounds))
        return checks

    def _variations(self, got: Sequence[Any]) -> list[Variation]:
        variations = []
        num = self.runs.microbatches
        rows = self.problem.rows_per_device(self.runs.mesh)
        other = 1 if num > 1 else next((k for k in (2, 3, 5) if rows % k == 0 and rows), None)
        if self.problem.counted is not None:
            other = None  # the number of micro-batches says which rows are computed
        if other is not None:
            changed, _ = self.runs.step(self.problem.arrays, other, False)
            variations.append(
                self._variation(
                    f"{other} micro-batch{'es' if other > 1 else ''} instead of {num}", changed, got
                )
            )
        if rows > 1:
            arrays = self.problem.permuted(self.runs.mesh)
            changed, _ = self.runs.step(arrays, num, False)
            variations.append(self._variation("rows on other devices", changed, got))
        if self.is_random:
            i = int(np.argmax(self.allowed.values[:, 0, 0]))
            size = max(measured(np.asarray(self.want[0]), np.zeros(()))[0], 1e-300)
            change = float(self.allowed.values[i, 0, 0]) / size
            ratio = float(self.allowed.values[i, 0, 0] / max(self.samples.bounds(0)[0], 1e-300))
            variations.append(
                Variation(name="other keys", result="loss", change=change, ratio=ratio)
            )
        return variations

    def _variation(self, name: str, changed: Sequence[Any], got: Sequence[Any]) -> Variation:
        hows = ["mean", *self.problem.aux_how]
        checks = [
            self._check(leaf, kind, x, y, self.allowed.bounds(i))
            for i, (leaf, kind, x, y) in enumerate(self._pairs(changed, got))
            if i >= len(hows) or hows[i] in ("mean", "sum", "max")
        ]
        most = max(checks, key=lambda check: check.ratio)
        change = most.difference / most.size if most.size else most.difference
        return Variation(name=name, result=most.name, change=change, ratio=most.ratio)

    def _roundings(self, got: Sequence[Any]) -> list[Rounding]:
        exact = self.one.in_float64()
        return [
            Rounding(
                name=name,
                of_step=float(measured(np.asarray(x), z)[0]),
                of_reference=float(measured(np.asarray(y), z)[0]),
            )
            for (name, _, x, y), z in zip(self._pairs(got, self.want), exact, strict=True)
        ]
