"""A `lax.cond`: one that devices may take differently, or each branch as a loop of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .ir import Atom, Loop, Operation, scope


@dataclasses.dataclass(frozen=True, eq=False)
class Fork(Operation):
    """A `cond` of which devices may take different branches."""


@dataclasses.dataclass(frozen=True, eq=False)
class Branch(Loop):
    """A branch of a `cond`: a loop that runs once or not at all.

    It carries its results, and last whether it runs. It scans nothing. If it does not run, it
    returns what it is given to carry.
    """

    operands: tuple[Atom, ...] = ()  # what any branch of the `cond` reads

    @property
    def length(self) -> int:
        return 1

    @property
    def is_reversed(self) -> bool:
        return False

    def scan(
        self, body: Callable, carry: Any, stacks: Any, length: int | None = 1
    ) -> tuple[Any, Any]:
        """Run the body once if the last carried value is true; it may return no stacks."""
        assert length == 1
        layers, stacked = jax.tree.map(lambda x: x[0], stacks), None

        def run(carry: Any) -> Any:
            nonlocal stacked
            results, stacked = body(carry, layers)
            assert not jax.tree.leaves(stacked)
            # A result may be a Python scalar, whose type is weaker.
            return jax.tree.map(lambda x, y: lax.convert_element_type(x, y.dtype), results, carry)

        with scope(self.equation):
            return lax.cond(carry[-1], run, lambda carry: carry, carry), stacked
