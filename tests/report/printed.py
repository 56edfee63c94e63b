"""What a report gives as plain data and as printed tables, as tests compare it."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """An entry of the timeline; its fields have the keys of the plain data."""

    action: str
    region: str
    names: tuple[str, ...]
    num_bytes: int
    sent: str
    start: int
    needed: int
    stop: int
    trips: int
    held: int
    windowed: bool
    hops: Any


def spans(report: Any) -> list[Span]:
    """The timeline of a report."""
    return [Span(**x) for x in report.as_dict()["timeline"]]


def live_bytes(spans: Sequence[Span], *actions: str) -> int:
    """The most bytes that buckets of these actions take at one operation, and so together."""
    held = np.zeros(1 + max(x.stop for x in spans), np.int64)
    for x in spans:
        if x.action in actions:
            held[x.start : x.stop + 1] += x.num_bytes
    return int(held.max())


@dataclasses.dataclass(frozen=True)
class Wait:
    """A row of the table of exposed collectives; `size` is text."""

    action: str
    region: str
    size: str
    trips: int
    num: int
    names: tuple[str, ...]


def waits(report: Any) -> list[Wait]:
    """The exposed collectives of a report, as it prints them."""
    lines = printed(report, "waits", width=1000)
    rows = [*lines[1 + next(i for i, x in enumerate(lines) if x.startswith("---")) :]]
    found = []
    for row, names in zip(rows[::2], rows[1::2], strict=False):
        if not names.startswith("  "):  # the last lines are a footer
            break
        action, region, size, trips, num = re.split(r"\s{2,}", row)
        found.append(Wait(action, region, size, int(trips), int(num), tuple(names[2:].split(", "))))
    return found


def printed(report: Any, detail: Any = None, width: int = 80) -> list[str]:
    """The lines of a report."""
    out = io.StringIO()
    report.print(detail, console=Console(file=out, width=width))
    return out.getvalue().splitlines()


def readable(num_bytes: int) -> str:
    """A size as reports print it, up to the largest of tests."""
    return f"{num_bytes / 1024:.2f} KiB" if num_bytes >= 1024 else f"{num_bytes} B"
