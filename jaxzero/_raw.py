"""View elements of arrays as integers, so that numpy copies them fast.

numpy copies arrays of bfloat16 one element at a time.
"""

import numpy as np


def raw(array: np.ndarray) -> np.ndarray:
    """Return a view of an array with each element as an unsigned integer of the same size.

    An array whose elements have more than 8 bytes is returned as it is.
    """
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize <= 8 else array
