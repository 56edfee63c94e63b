"""Whether a step computes what plain JAX on one device would, under bounds that are derived.

In: a `Problem`, one call of a loss with full arrays, and `Runs` of the configured step. Out: a
`VerifyReport`. `_zero` makes both for `Zero.verify`.
"""

from .problem import Problem as Problem
from .problem import on_host as on_host
from .report import VerifyReport as VerifyReport
from .update import Update as Update
from .verify import Runs as Runs
from .verify import Verification as Verification
