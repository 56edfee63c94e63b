"""Barriers that make arrays wait for others: see [Note: ties] in `_plan.schedule`."""

from __future__ import annotations

from typing import Any

from jax import lax


def tied(arrays: Any, value: Any) -> tuple[Any, Any]:
    """Return `arrays` and `value`, each available only once both are.

    XLA removes an operand of a barrier whose output nothing reads, unless something else reads the
    operand. Readers that `value` has can vanish: where each device has one row, XLA adds to the
    product of two matrices before it adds the dimension of the rows, and only the barrier reads
    the product with that dimension. A second barrier is a reader that stays.
    """
    arrays, after = lax.optimization_barrier((arrays, value))
    return lax.optimization_barrier((arrays, value))[0], after
