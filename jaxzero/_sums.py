"""Choose the dtype in which narrow floats are added up."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike


def widened(dtype: DTypeLike) -> np.dtype:
    """Return the dtype to sum in: float32 for narrower floats, otherwise `dtype` itself.

    A sum in 16 bits would lose its small terms.
    """
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype
