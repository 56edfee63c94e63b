"""Check that a step computes what plain JAX computes on one device, under derived bounds.

In: a `Problem`, which is one call of a loss with full arrays, for plain JAX; and `Runs`, functions
that run the configured step on the same arrays. For local steps: a `Round` and `RoundRuns`. Out: a
`VerifyReport`. `_zero` makes the inputs for `Zero.verify`.
"""

from .problem import Problem as Problem
from .problem import on_host as on_host
from .report import VerifyReport as VerifyReport
from .rounds import LOSS as LOSS
from .rounds import NEXT as NEXT
from .rounds import OUTER as OUTER
from .rounds import OUTER_STATE as OUTER_STATE
from .rounds import OWN as OWN
from .rounds import STATE as STATE
from .rounds import Round as Round
from .rounds import RoundRuns as RoundRuns
from .rounds import RoundVerification as RoundVerification
from .update import Update as Update
from .verify import Runs as Runs
from .verify import Verification as Verification
