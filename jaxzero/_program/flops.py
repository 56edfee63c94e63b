"""Count the operations of matrix products in a traced program, loops included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from .ir import Operation
from .multiplications import multiplications


def matrix_flops(function: Callable, *args: Any, **kwargs: Any) -> float:
    """Count the floating-point operations of the matrix products of `function(*args, **kwargs)`.

    The count is for all devices together. A product of two numbers and its addition to a sum are
    two operations. The body of a `shard_map` counts once for each device along its manual axes. A
    `while` loop, whose length is not known, counts once. A `cond` counts as its largest branch.
    """
    return _flops(jax.make_jaxpr(function)(*args, **kwargs).jaxpr)


def flops_of(operation: Operation) -> float:
    """Count the floating-point operations of one operation, as `matrix_flops` does."""
    return _of_equation(operation.equation)


def _flops(jaxpr: Any) -> float:
    return sum((_of_equation(equation) for equation in jaxpr.eqns), 0.0)


def _of_equation(equation: Any) -> float:
    if products := multiplications(equation):
        return 2.0 * products
    name, params = equation.primitive.name, equation.params
    inner = [
        [_flops(getattr(x, "jaxpr", x)) for x in (value if isinstance(value, tuple) else (value,))]
        for value in params.values()
        if _holds_programs(value)
    ]
    if name == "cond":
        return max((max(found) for found in inner), default=0.0)
    times = 1
    if name == "scan":
        times = params["length"]
    elif name == "shard_map":
        mesh = params["mesh"]
        times = math.prod(mesh.shape[axis] for axis in params["newly_manual_axes"])
    return times * sum(map(sum, inner), 0.0)


def _holds_programs(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return bool(values) and all(hasattr(getattr(x, "jaxpr", x), "eqns") for x in values)
