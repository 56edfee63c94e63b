"""Count the scalar multiplications of a matrix product or a convolution."""

from __future__ import annotations

import math
from typing import Any


def multiplications(equation: Any) -> int:
    """Count the multiplications of an equation; 0 if no matrix product and no convolution."""
    name, params = equation.primitive.name, equation.params
    if name == "conv_general_dilated":
        kernel, numbers = equation.invars[1].aval.shape, params["dimension_numbers"]
        channels = kernel[numbers.rhs_spec[0]]
        return equation.outvars[0].aval.size * math.prod(kernel) // max(channels, 1)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        groups = 1
    elif name == "ragged_dot_general":  # each row with the matrix of one group
        numbers = params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        is_split = not {*numbers.lhs_ragged_dimensions}.isdisjoint(contracted)
        groups = equation.invars[2].aval.shape[-1] if is_split else 1
    else:
        return 0
    left = equation.invars[0].aval.shape
    products = equation.outvars[0].aval.size * math.prod(left[dim] for dim in contracted)
    return products // max(groups, 1)
