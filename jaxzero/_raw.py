"""View elements as integers, which numpy copies fast; bfloat16 it copies one element at a time."""

import numpy as np


def raw(array: np.ndarray) -> np.ndarray:
    """View elements as unsigned integers of their size; return an array of wider ones as it is."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize <= 8 else array
