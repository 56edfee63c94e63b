"""Issue warnings that name a line of the user's code, also from deep inside JAX."""

from __future__ import annotations

import functools
import sys
import sysconfig
import warnings
from pathlib import Path

# Packages whose frames lie between the user's line and the code that warns.
INSIDE = ("jaxzero", "jax", "jaxtyping", "beartype", "contextlib", "functools")


def warn(message: str) -> None:
    """Issue a `UserWarning` that names the line of user code which called into this package.

    It is the innermost line on the call stack that is outside of the packages in `INSIDE`.
    """
    level, frame = 1, sys._getframe()
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in INSIDE:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


class RowsMixedWarning(UserWarning):
    """The warning that a loss combines rows of a batch, other than in a sum or mean over all rows.

    An example is to divide by a mean over rows. Each device divides by the mean over its own rows,
    so the result differs from that of one device that has all rows.
    """


_shown: dict[str, dict] = {}  # by file, Python's registry of the warnings that it has shown


def warn_at(message: str, category: type[Warning], file: str, line: int) -> None:
    """Issue a warning for a line of a source file, which need not be on the call stack.

    Python shows it once for a line, message and category, unless filters say otherwise.
    """
    warnings.warn_explicit(message, category, file, line, registry=_shown.setdefault(file, {}))


@functools.cache
def is_of_user(file: str) -> bool:
    """Return True if a source file is neither Python's, jaxzero's nor of an installed package."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.add(str(Path(__file__).parent))
    is_installed = any(x in file for x in ("site-packages", "dist-packages", "<frozen "))
    return not is_installed and not any(file.startswith(f"{x}/") for x in folders)
