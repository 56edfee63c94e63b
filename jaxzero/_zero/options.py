"""The options of one transformed function."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked of `value_and_grad`, or (`has_gradients` False) of `apply`."""

    argnums: tuple[int, ...]
    has_aux: bool = False
    microbatches: int = 1
    weighted: bool = False
    reduce: tuple[tuple[str, ...], Any] | None = None  # how outputs are combined: a flat tree
    has_gradients: bool = True
    halves: bool = False  # of the devices are to be compared
