"""Choose the activations that forward keeps for backward, and those that backward recomputes.

In: a traced program of loss and gradients, and a budget in bytes. Out: a program whose forward part
keeps at most so many bytes for backward; and for each value that backward reads, whether it is
kept, recomputed or in host memory. `_plan` then plans the gathers of the new program.

Backward recomputes a value by repeating operations of forward. The values that forward makes and
backward reads are called residuals. Each has a cost: the bytes to keep it, at a price in seconds
per byte, or the seconds to recompute it (`min_cut`). `choice` searches for the price whose cheapest
choice fits the budget.
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
