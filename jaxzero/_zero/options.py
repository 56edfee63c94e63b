"""`Options`: the arguments of `Zero.value_and_grad` and `Zero.apply` other than the function."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
    # How gradients are reduced, as `reduce`; None: as the leaves say (`overwritten_leaves`).
    gradient_reduce: tuple[tuple[str, ...], Any] | None = None


def argument_numbers(argnums: Any) -> tuple[int, ...]:
    """`argnums` as a tuple.

    Raises:
        ValueError: it is no position of an argument, nor several.
    """
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(numbers, Sequence) or not all(isinstance(x, int) for x in numbers):
        raise ValueError(
            f"`argnums` must be the position of an argument, or several; got {argnums!r}. Of an "
            "`nnx.Module` what is an `nnx.Param` is differentiated, without a filter."
        )
    return tuple(numbers)
