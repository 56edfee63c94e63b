"""Activations: what forward keeps for backward, and what backward computes again.

In: a program of loss and gradients, and a budget in bytes. Out: a program that keeps as much, and
what became of each value that backward reads. To what plans gathers it is a program like any other.
"""

from .choice import choose_activations as choose_activations
from .costs import is_host_copy as is_host_copy
from .costs import is_view as is_view
from .priced import Chosen as Chosen
from .priced import Point as Point
from .residuals import Residual as Residual
from .residuals import by_kind as by_kind
from .residuals import described as described
from .residuals import described_total as described_total
from .residuals import kept_bytes as kept_bytes
