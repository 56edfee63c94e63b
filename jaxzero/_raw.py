"""View elements as integers: numpy copies foreign types (bfloat16) one element at a time."""

import numpy as np


def raw(array: np.ndarray) -> np.ndarray:
    """View elements of up to 8 bytes as unsigned integers of their size."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize <= 8 else array
