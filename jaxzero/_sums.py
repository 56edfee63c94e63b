"""Choose the dtype in which floats of few bits are added up."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike


def widened(dtype: DTypeLike) -> np.dtype:
    """Return the dtype in which to sum floats of `dtype`: itself, or float32 if that has more bits.

    A sum in 16 bits would lose its small terms.
    """
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype
