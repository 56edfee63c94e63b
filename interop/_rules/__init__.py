"""Rules that map tensors of a checkpoint to parameters of a tree, and back.

In: rules and named tensors. Out: a lazy tensor per parameter, or per tensor of the checkpoint.
The two directions are exact inverses, except for steps that compute (`AddBiases`, `WeightNorm`).
"""

from .apply import to_ours as to_ours
from .apply import to_theirs as to_theirs
from .computed import AddBiases as AddBiases
from .computed import WeightNorm as WeightNorm
from .rotary_pairs import RotaryPairs as RotaryPairs
from .rule import Rule as Rule
from .rule import Shapes as Shapes
from .rule import check_moves as check_moves
from .rule import pattern_of as pattern_of
from .rule import patterns_in as patterns_in
from .rule import rules_in as rules_in
from .rule import uses_of as uses_of
from .steps import Flatten as Flatten
from .steps import Merge as Merge
from .steps import MergeHeads as MergeHeads
from .steps import Split as Split
from .steps import SplitHeads as SplitHeads
from .steps import Step as Step
from .steps import Transpose as Transpose
from .steps import Unflatten as Unflatten
