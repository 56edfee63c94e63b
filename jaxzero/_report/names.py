"""Names of repeated layers on one line: `layers[0..23].mlp.up` stands for 24 leaves.

Rows of a table whose cells are equal, and whose names differ in one number only, become one row.
No name is shortened otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_Component = str | tuple[int, ...]  # of a path; a tuple stands for several numbers
_Path = tuple[_Component, ...]
_Row = tuple[tuple[_Path, ...], tuple[str, ...], tuple[int, ...]]  # names, cells, members


@dataclasses.dataclass(frozen=True)
class NamedRow:
    """One row of a table.

    Attributes:
        names: names of the leaves in the row.
        cells: the other columns.
        members: the rows that were joined into this one, as indices into the sequence given to
            `merge_layers`.
    """

    names: tuple[str, ...]
    cells: tuple[str, ...]
    members: tuple[int, ...]


def merge_layers(rows: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[NamedRow]:
    """Join rows that are equal, or equal except for one number in their names.

    Args:
        rows: `(names, cells)` of each row.

    Returns:
        The rows in the order of their first members. A row of several leaves is joined only where
        all of its names have the same number.
    """
    equal: dict[tuple, list[int]] = {}
    for index, (names, cells) in enumerate(rows):
        paths = tuple(tuple(name.split(".")) for name in names)
        equal.setdefault((paths, tuple(cells)), []).append(index)
    found: list[_Row] = [(*row, tuple(members)) for row, members in equal.items()]
    depth = max((len(path) for paths, _, _ in found for path in paths), default=0)
    for place in reversed(range(depth)):
        found = _merge_at(place, found)
    return [NamedRow(tuple(map(_text, paths)), cells, each) for paths, cells, each in found]


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as text, sorted and with runs joined: `0..3,5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def summarized(names: Sequence[str]) -> str:
    """Name several leaves by their common path, or by the first and the number of the others."""
    names = tuple(dict.fromkeys(names))
    if len(names) == 1:
        return names[0]
    paths = [name.split(".") for name in names]
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == paths[0][shared] for p in paths):
        shared += 1
    if shared:
        return f"{'.'.join(paths[0][:shared])} ({len(names)} leaves)"
    return f"{names[0]} and {len(names) - 1} more"


def _merge_at(place: int, rows: list[_Row]) -> list[_Row]:
    """Join rows whose names differ in component `place`, where it is a number."""
    groups: dict[tuple, list] = {}
    for paths, cells, members in rows:
        number = _shared_number(paths, place)
        key = (paths, cells) if number is None else (_without(paths, place), cells, place)
        groups.setdefault(key, []).append((number, paths, cells, members))
    merged: list[_Row] = []
    for some in groups.values():
        numbers = [number for number, *_ in some]
        if len(some) == 1 or None in numbers or len(set(numbers)) < len(some):
            merged += [(paths, cells, members) for _, paths, cells, members in some]
            continue
        _, paths, cells, _ = some[0]
        together = tuple((*path[:place], tuple(numbers), *path[place + 1 :]) for path in paths)
        merged.append((together, cells, tuple(i for *_, members in some for i in members)))
    return sorted(merged, key=lambda row: min(row[2]))


def _shared_number(paths: tuple[_Path, ...], place: int) -> int | None:
    found = {path[place] if len(path) > place else None for path in paths}
    one = next(iter(found)) if len(found) == 1 else None
    return int(one) if isinstance(one, str) and one.isdecimal() else None


def _without(paths: tuple[_Path, ...], place: int) -> tuple[_Path, ...]:
    return tuple((*path[:place], "", *path[place + 1 :]) for path in paths)


def _text(path: _Path) -> str:
    text = ""
    for component in path:
        if isinstance(component, tuple):
            text += f"[{ranges(component)}]"
        else:
            text += f".{component}" if text else component
    return text
