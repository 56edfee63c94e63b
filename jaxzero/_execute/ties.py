"""Barriers that make arrays wait for others: see [Note: ties] in `_plan.ties`."""

from __future__ import annotations

from typing import Any

from jax import lax


def tied(arrays: Any, value: Any) -> tuple[Any, Any]:
    """Return `arrays` and `value`, each available only once both are.

    XLA drops an operand of a barrier if nothing but the barrier reads it and nothing reads its
    output. `value` can come to that when XLA rewrites its readers. An example: if each device has
    one row, the readers of a matrix product `[1, s, d]` are made to read `[s, d]`, and only the
    barrier is left to read the reshaped product. Two barriers are two readers, so both wait.
    """
    arrays, after = lax.optimization_barrier((arrays, value))
    return lax.optimization_barrier((arrays, value))[0], after
