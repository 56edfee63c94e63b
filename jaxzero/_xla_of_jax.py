"""What XLA does in the installed version of JAX, where the versions that run here differ.

Each name but the first says what later versions do.
"""

from typing import Final

import jax

_VERSION: Final = jax.__version_info__

IS_BEFORE_0_11: Final = _VERSION < (0, 11)  # other compiler options exist, or help

# On CPUs a matrix product is rounded in the same way if a second operation reads it.
PRODUCTS_MAY_BE_READ_TWICE: Final = _VERSION >= (0, 11)

# Host memory may be indexed by what is computed from a loop's counter, and scanned in reverse.
# Before, XLA took turn `i` to be at row `i`, and copied the wrong rows.
COUNTERS_INDEX_HOST: Final = _VERSION >= (0, 12)
