"""Compare what a JAX function and a PyTorch module compute from the same inputs.

In: a function, a module, inputs, and names of submodules. Out: a `Comparison`, which prints as a
table. PyTorch is imported when a comparison runs.
"""

from .compare import compare as compare
from .result import ComparedOutput as ComparedOutput
from .result import Comparison as Comparison
