"""Tell which operations compute each element from the elements in its place, or reduce an array.

Such operations can be run on any part of an array: on a device's shard, or on one window of it.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from .ir import Atom, Operation, Value

# A list of names, because JAX does not mark elementwise primitives. An input may also be a scalar.
_ELEMENTWISE = {
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh"),
    *("cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "cos", "cosh"),
    *("digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge"),
    *("gt", "igamma", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log"),
    *("log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or"),
    *("population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh"),
    *("sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
}
_RESHAPES = {"broadcast_in_dim", "expand_dims", "reshape", "squeeze"}
_REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "max",
    "reduce_and": "min",
}


def is_elementwise(operation: Operation) -> bool:
    """Whether each output element depends only on the input elements at its index."""
    return operation.name in _ELEMENTWISE


def is_reshape(operation: Operation) -> bool:
    """Whether the output has the elements of the only input, in the same order."""
    if operation.name not in _RESHAPES or len(operation.inputs) != 1:
        return False
    if operation.name == "reshape" and operation.equation.params["dimensions"] is not None:
        return False
    return math.prod(operation.outputs[0].shape) == math.prod(shape_of(operation.inputs[0]))


def is_broadcast(operation: Operation) -> bool:
    """Whether it repeats the elements of its only input."""
    return operation.name == "broadcast_in_dim" and len(operation.inputs) == 1


def full_reduction(operation: Operation) -> str | None:
    """How an operation reduces all elements of its inputs to a scalar; None if it does not.

    Returns:
        "sum", "max", "min" (of booleans: "max" for any, "min" for all), or "dot" for the inner
        product of two vectors.
    """
    params = operation.equation.params
    if operation.name in _REDUCTIONS and operation.outputs[0].shape == ():
        return _REDUCTIONS[operation.name]
    if operation.name == "dot_general" and operation.outputs[0].shape == ():
        (left, right), _ = params["dimension_numbers"]
        return "dot" if len(left) == len(right) == 1 else None
    return None


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of a value or a constant."""
    return atom.shape if isinstance(atom, Value) else np.shape(atom.value)


def dtype_of(atom: Atom) -> Any:
    """The dtype of a value or a constant."""
    return atom.dtype if isinstance(atom, Value) else jnp.result_type(atom.value)
