"""Rules from names and shapes of a checkpoint to those of a tree, and back.

In: rules and named tensors. Out: the tensors of each leaf, and the other way round, exactly.
"""

from .apply import to_ours as to_ours
from .apply import to_theirs as to_theirs
from .rule import Rule as Rule
from .rule import pattern_of as pattern_of
from .steps import Flatten as Flatten
from .steps import Merge as Merge
from .steps import Split as Split
from .steps import Step as Step
from .steps import Transpose as Transpose
from .steps import Unflatten as Unflatten
