"""The rows of the race over a slow network as a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "slow_network"


def print_table(rows: Sequence[Mapping[str, Any]]) -> None: ...


def draw(rows: Sequence[Mapping[str, Any]], size: str, file: Path) -> None: ...
