"""Choose what forward keeps for backward: a program in, one that keeps less and computes more out.

The choice is made after differentiation and before the plan, which sees an ordinary program.
"""

from .choice import Chosen as Chosen
from .choice import Residual as Residual
from .choice import choose_activations as choose_activations
