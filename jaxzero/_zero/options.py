"""`Options`: the arguments of `Zero.value_and_grad` and `Zero.apply` other than the function."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Options:
    """The options given to `value_and_grad`, or (`has_gradients` False) to `apply`."""

    argnums: tuple[int, ...]
    has_aux: bool = False
    microbatches: int = 1
    weighted: bool = False
    reduce: tuple[tuple[str, ...], Any] | None = None  # reductions of outputs: names, treedef
    has_gradients: bool = True
    shares: tuple[int, ...] | None = None  # of the nodes, without a common factor; None: all equal
    halves: bool = False  # whether gradients of two half-batches are compared
