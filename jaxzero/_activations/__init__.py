"""Activations: what forward keeps for backward, and what backward computes again.

In: a traced program of loss and gradients, and a budget in bytes. Out: a program whose forward part
keeps at most so many bytes for backward, and for each value that backward reads whether it is kept,
recomputed or in host memory. `_plan` then plans the gathers of that program as of any other.
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
