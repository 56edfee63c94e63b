"""Define flags for differences between the versions of XLA that supported versions of JAX have.

They are for the installed version. `IS_BEFORE_0_11` is true for older versions; the other flags are
true for newer versions.
"""

from typing import Final

import jax

_VERSION: Final = jax.__version_info__

IS_BEFORE_0_11: Final = _VERSION < (0, 11)  # other compiler options exist, or help

# On CPUs a matrix product has the same bits whether one operation reads it or two.
PRODUCTS_MAY_BE_READ_TWICE: Final = _VERSION >= (0, 11)

# A loop may index host memory by a value computed from its counter, and scan it in reverse. Earlier
# versions of XLA copy row `i` in iteration `i`, whatever the index, so results are wrong.
COUNTERS_INDEX_HOST: Final = _VERSION >= (0, 12)
