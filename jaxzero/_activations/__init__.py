"""Choose what forward keeps for backward: a program in, one that keeps less and computes more out.

The choice is made after differentiation and before the plan, which sees an ordinary program.
"""

from .choice import Chosen as Chosen
from .choice import choose_activations as choose_activations
from .residuals import Residual as Residual
from .residuals import by_kind as by_kind
from .residuals import described as described
from .residuals import kept_bytes as kept_bytes
