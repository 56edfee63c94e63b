"""Propose rules for a model from the names and shapes of its parameters.

In: named tensors of a checkpoint and named leaves of a tree. Out: a `Proposal` of rules to confirm.
"""

from .proposal import Proposal as Proposal
from .propose import match as match
from .propose import settled as settled
