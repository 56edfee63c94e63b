"""`VerifyReport`: what was compared, under which bound, and what follows from it."""

from __future__ import annotations

import dataclasses
import math
import shutil
import textwrap
from typing import Any

from .._report import TextTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One result, or leaf of a result, of the step and of plain JAX.

    Attributes:
        name: `loss`, or the path of an `aux` leaf or parameter.
        kind: "loss", "aux", "gradient", "update", or one of these with codecs: "gradient, encoded";
            with `halves` "half-batches";
            of a round "loss", "parameter", "optimizer state", "outer parameter" and "outer state".
        size: the norm of plain JAX's result.
        difference: the norm of the difference.
        bound: what it may be, from roundings, dtypes and codecs.
        ratio: difference over bound, the largest of those for the norm, the largest element and
            the part along the result; above 1 the result is wrong.
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
    """The same step with one thing changed that should not matter.

    Attributes:
        name: what was changed.
        result: the result that changed most, relative to its bound.
        change: the norm of its change, relative to the norm of the result.
        ratio: the change over the bound of roundings.
    """

    name: str
    result: str
    change: float
    ratio: float

    @property
    def matters(self) -> bool:
        """Whether the results change by more than roundings."""
        return self.ratio > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """Distances of one result from the same in float64, as norms.

    Attributes:
        name: the name of the result.
        of_step: the distance of the step's result.
        of_reference: the distance of plain JAX's result.
    """

    name: str
    of_step: float
    of_reference: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of `Zero.verify`; `print` it.

    Attributes:
        checks: one for each result, the largest ratio of difference and bound first.
        variations: what changes with other micro-batches, with permuted rows, with other keys.
        roundings: with `float64=True`, how far each result of the step and of plain JAX is from the
            same in float64.
        cause: where a check fails: "step" (plain JAX on each device's rows gives other values: an
            error of the step), "rows" (it gives the same: the loss depends on which rows share a
            device), "keys" (devices draw the same random numbers), "codecs", "update", "halves",
            "room" (a device has not the room to tell the first two apart); of a round "node" (steps
            that a node takes by itself) and "exchange"; "" if all holds.
        first: the first operation whose value on a device's rows differs, with the user's line; of
            a round the nodes on which a result differs.
        notes: what was not compared, and why.
        memory: what plain JAX needed, and where it ran.
        is_round: whether this is about a round of local steps.
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
        """Whether every result is within its bound, and devices draw different numbers."""
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
        """The report as lines of at most `width` columns; of the checks the first `limit`."""
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
        """The report as numbers and strings, for a file in JSON."""
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
