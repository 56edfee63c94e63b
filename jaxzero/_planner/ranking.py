"""Order the plans of a search, and give for each plan the reason why it is not taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .plans import PlanRow
from .search import Search


def ranked(search: Search) -> tuple[PlanRow, ...]:
    """Return the rows of a search, the best first.

    Plans that fit come first. Among these, plans compiled in full come before proxies, and proxies
    before plans with bounds alone; then the value that is minimised decides.
    """
    rows = _settled(search)
    return tuple(sorted(rows, key=lambda row: (bool(row.discarded), *_order(search, row))))


def notes_on_best(rows: Sequence[PlanRow]) -> tuple[str, ...]:
    """Return a note for users if the best row was compiled as a proxy only; else an empty tuple."""
    best = next((row for row in rows if not row.discarded), None)
    if best is None or best.stage != "proxy":
        return ()
    return (
        f"`{best.candidate.name}` was not compiled in full: it may need up to a tenth more memory "
        "than is shown",
    )


def _settled(search: Search) -> list[PlanRow]:
    """Return all rows; if there is a compiler, with the reason for each plan that is not taken."""
    if search.compiler is None:
        return list(search.rows.values())
    fitting = [row for row in search.compiled_rows() if row.memory <= search.limit]
    best = min(fitting, key=lambda row: _order(search, row), default=None)
    return [_with_reason(search, row, best) for row in search.rows.values()]


def _with_reason(search: Search, row: PlanRow, best: PlanRow | None) -> PlanRow:
    why, is_open = row.discarded, False
    if why or row.stage == "compiled":
        pass
    elif row.stage == "proxy" and row.memory > search.limit:
        why, is_open = f"{search.needs(row.memory)}, and was not compiled in full", True
    elif row.stage == "bound":
        why = search.why_too_large(row)
        if not why and best is not None and search.value(row)[0] >= search.value(best)[0]:
            why = "its bound is above the best plan"
        if not why:
            less = ": less is expected of it" if best is not None else ""
            why, is_open = f"was not compiled{less}", True
    return dataclasses.replace(row, discarded=why, undecided=is_open)


def _order(search: Search, row: PlanRow) -> tuple[int, tuple[float, float]]:
    """Return the key by which rows are sorted: the kind of compile, and then `Search.value`."""
    return ("compiled", "proxy", "bound").index(row.stage), search.value(row)
