"""Define flags for what the XLA of the installed version of JAX does.

Supported versions of JAX come with versions of XLA that differ. `IS_BEFORE_0_11` is true for
versions of JAX before 0.11. Each other flag is true from some version of JAX on.
"""

from typing import Final

import jax

_VERSION: Final = jax.__version_info__

IS_BEFORE_0_11: Final = _VERSION < (0, 11)  # compiler options differ, and which of them help

# On CPUs a matrix product has the same bits whether one operation reads it or two.
PRODUCTS_MAY_BE_READ_TWICE: Final = _VERSION >= (0, 11)

# A loop may index host memory by a value computed from its counter, and scan it in reverse. Earlier
# versions of XLA copy row `i` in iteration `i`, whatever the index, so results are wrong
# (openxla/xla#46231).
COUNTERS_INDEX_HOST: Final = _VERSION >= (0, 12)
