"""The dtype in which narrow floats are added up."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike


def widened(dtype: DTypeLike) -> np.dtype:
    """Float32 for narrower floats, else `dtype`: a sum in 16 bits would lose its small terms."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype
