"""Define `VerifyReport`: comparisons of a step with plain JAX, their bounds, and the verdict."""

from __future__ import annotations

import dataclasses
import math
import shutil
import textwrap
from typing import Any

from .._report import TextTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """The comparison of one result of the step with that of plain JAX.

    Attributes:
        name: `loss`, or the path of an `aux` leaf or parameter.
        kind: of a step "loss", "aux", "gradient", "update", or with `halves` "half-batches"; of a
            round "loss", "parameter", "optimizer state", "outer parameter" or "outer state". In a
            comparison with codecs, ", encoded" follows. In one with plain JAX that draws the random
            numbers of the step, ", same numbers" follows.
        size: the norm of plain JAX's result.
        difference: the norm of the difference of the step's and plain JAX's result.
        bound: the largest `difference` that roundings, dtypes and codecs explain.
        ratio: the largest of three ratios of the difference to its bound: of its norm, of its
            largest element, and of its part along the result. Above 1 the result is wrong.
    """

    name: str
    kind: str
    size: float
    difference: float
    bound: float
    ratio: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within its bound."""
        return self.ratio <= 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variation:
    """The comparison of a step with the same step after a change that should not matter.

    Attributes:
        name: the change, such as "rows on other devices".
        result: the name of the result that differs most, relative to its bound.
        change: the norm of the difference, divided by the norm of the result.
        ratio: the largest ratio of the difference to the bound by roundings, as in `Check`.
    """

    name: str
    result: str
    change: float
    ratio: float

    @property
    def matters(self) -> bool:
        """Whether the change makes a result differ by more than roundings explain."""
        return self.ratio > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """How far one result is from the same result of plain JAX in float64.

    Attributes:
        name: the name of the result.
        of_step: the norm of the difference for the step's result.
        of_reference: the norm of the difference for plain JAX's result.
    """

    name: str
    of_step: float
    of_reference: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of `Zero.verify`; `print` it.

    Attributes:
        checks: one for each result, the largest ratio of difference and bound first. If `cause` is
            "step", they compare the step with plain JAX on each device's rows.
        variations: comparisons with steps of other micro-batches, of permuted rows, of other keys.
        roundings: with `float64=True`, how far each result of the step and of plain JAX is from the
            same result in float64.
        cause: why a check fails; "" if none does.
            "step": plain JAX on each device's rows gives other values than the step, so the step is
            wrong;
            "rows": it gives the values of the step, so the loss depends on which rows share a
            device;
            "room": no device has the memory to tell "step" from "rows";
            "keys": devices draw the same random numbers;
            "codecs", "update", "halves": only this part of the step is wrong.
            Of a round, "node": the steps that a node takes by itself are wrong; "exchange": only
            the exchange between nodes is wrong.
        first: a sentence about the first operation whose value on a device's rows differs, or the
            line where devices draw the same numbers; for a round, about the nodes where a result
            differs.
        notes: sentences that say which results were not compared, and why.
        memory: a sentence that says how much memory plain JAX needed, and on which device.
        is_round: whether a round of local steps was verified.
    """

    checks: tuple[Check, ...]
    variations: tuple[Variation, ...] = ()
    roundings: tuple[Rounding, ...] = ()
    cause: str = ""
    first: str = ""
    notes: tuple[str, ...] = ()
    memory: str = ""
    is_round: bool = False

    @property
    def ok(self) -> bool:
        """Whether every result is within its bound, and devices draw different random numbers."""
        return not self.cause and all(check.ok for check in self.checks)

    @property
    def wrong(self) -> tuple[Check, ...]:
        """The checks that fail."""
        return tuple(check for check in self.checks if not check.ok)

    def raise_if_wrong(self) -> None:
        """Raise `AssertionError`, with the report as its text, unless `ok`."""
        if not self.ok:
            raise AssertionError(str(self))

    @property
    def line(self) -> str:
        """The verdict in one line."""
        if self.ok:
            worst = max((check.ratio for check in self.checks), default=0.0)
            return (
                f"The {'round' if self.is_round else 'step'} computes what one device would: "
                f"{len(self.checks)} results within "
                f"their bounds, the nearest at {worst:.0%} of its bound."
            )
        wrong = ", ".join(
            f"{x.kind} {x.name}" if x.name != x.kind else x.name for x in self.wrong[:3]
        )
        more = f" and {len(self.wrong) - 3} more" if len(self.wrong) > 3 else ""
        what = f"{wrong}{more}: beyond their bounds. " if wrong else ""
        return f"{what}{_CAUSES.get(self.cause, '')}"

    def lines(self, width: int = 100, limit: int = 12) -> list[str]:
        """Return the report as lines of at most `width` characters.

        Args:
            width: the most characters of a line.
            limit: how many checks are shown, or as many as fail, up to 40; 0: all.
        """
        shown = self.checks if limit == 0 else self.checks[: max(limit, len(self.wrong[:40]))]
        text = TextTable(
            headings=("result", "kind", "norm", "difference", "bound", "ratio", ""),
            rows=[
                (
                    check.name,
                    check.kind,
                    *map(_number, (check.size, check.difference, check.bound)),
                    f"{check.ratio:.2g}",
                    "ok" if check.ok else "WRONG",
                )
                for check in shown
            ],
            footer=_rest(len(self.checks) - len(shown)),
        ).lines(width)
        if self.variations:
            rows = [
                (x.name, x.result, _number(x.change), "matters" if x.matters else "no difference")
                for x in self.variations
            ]
            headings = ("with", "most changed", "relative change", "")
            text += ["", *TextTable(headings=headings, rows=rows).lines(width)]
        if self.roundings:
            rows = [(x.name, _number(x.of_step), _number(x.of_reference)) for x in self.roundings]
            headings = ("from float64", "step", "plain JAX")
            text += ["", *TextTable(headings=headings, rows=rows).lines(width)]
        sentences = [x for x in (*self.notes, self.memory, self.line, self.first) if x]
        return [*text, "", *(line for x in sentences for line in textwrap.wrap(x, width))]

    def __str__(self) -> str:
        return "\n".join(self.lines(shutil.get_terminal_size((100, 24)).columns))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, numbers and strings that JSON can hold.

        The keys are the attributes, and "ok".
        """
        return {**dataclasses.asdict(self), "ok": self.ok}


_CAUSES = {
    "step": "Plain JAX on the rows of each device gives other values, so the step is wrong, not "
    "the loss: please report it.",
    "rows": "Plain JAX on the rows of each device gives what the step gives: the loss is no mean "
    "of rows, it depends on which rows share a device.",
    "keys": "Every device draws the same random numbers for its rows: pass the key through "
    "`jz.fold_in_device(key)`.",
    "codecs": "Without codecs all holds; with them a result is further off than their errors.",
    "room": "No device has the room for plain JAX on its rows, which would tell an error of the "
    "step from a loss that is no mean of rows.",
    "node": "Steps that a node takes by itself differ: verify the loss without `local_steps`, "
    "which says where.",
    "exchange": "What each node computes by itself holds, and what the nodes exchange does not.",
    "halves": "The gradients hold, and the inner products of those of the half-batches do not.",
    "update": "The gradients hold, and the update of the parameters does not.",
}


def _rest(num: int) -> tuple[str, ...]:
    return (f"and {num} more, nearer to plain JAX",) if num > 0 else ()


def _number(x: float) -> str:
    return f"{x:.2e}" if math.isfinite(x) and x else f"{x:.0f}"
