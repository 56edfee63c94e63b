"""Warnings that name the line of the user's code, however deep inside JAX they are issued."""

from __future__ import annotations

import sys
import warnings

INSIDE = ("jaxzero", "jax", "jaxtyping", "beartype", "contextlib", "functools")


def warn(message: str) -> None:
    """Issue a `UserWarning` for the first line outside of JAX and this package."""
    level, frame = 1, sys._getframe()
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in INSIDE:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
