"""Local steps: nodes train by themselves, and exchange fragments of their parameters now and then.

In: the training step of one node, and the node's arrays. Out: one round of steps; the exchange of a
fragment runs while further steps are computed. `_zero` lays out the arrays.
"""

from .exchange import AsTree as AsTree
from .exchange import Exchange as Exchange
from .exchange import Outer as Outer
from .exchange import OuterLayout as OuterLayout
from .fragments import Cut as Cut
from .round import Carry as Carry
from .round import Inner as Inner
from .round import run_round as run_round
from .settings import LocalSteps as LocalSteps
from .settings import dasgd as dasgd
from .settings import diloco as diloco
from .settings import streaming_diloco as streaming_diloco
