"""Tensors of checkpoint files that are read when they are needed, and what holds them.

In: where the bytes of a tensor lie. Out: lazy tensors that read any box of elements, and a
`Checkpoint` of named ones. All other rooms of `interop` use it.
"""

from .checkpoint import AdamMoments as AdamMoments
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import gather_moments as gather_moments
from .checkpoint import laid_out_as as laid_out_as
from .checkpoint import read_step as read_step
from .lazy import ArrayTensor as ArrayTensor
from .lazy import Box as Box
from .lazy import LazyTensor as LazyTensor
from .lazy import concatenate as concatenate
from .lazy import stack as stack
from .named_leaves import named_leaves as named_leaves
from .sharded import ShardedTensor as ShardedTensor
from .text import some as some
