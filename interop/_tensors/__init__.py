"""Lazy tensors, which read slices of a checkpoint file or a sharded array on demand.

In: the location of a tensor's data. Out: lazy tensors that read any box of elements, and a
`Checkpoint` of named tensors. All other packages of `interop` use it.
"""

from .array_tensor import ArrayTensor as ArrayTensor
from .array_tensor import array_of_torch as array_of_torch
from .array_tensor import as_lazy as as_lazy
from .boxes import MAX_DIMS as MAX_DIMS
from .boxes import Box as Box
from .boxes import box_shape as box_shape
from .boxes import common_box as common_box
from .boxes import replaced as replaced
from .boxes import runs as runs
from .boxes import slices_within as slices_within
from .boxes import whole_box as whole_box
from .checkpoint import AdamMoments as AdamMoments
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import laid_out_as as laid_out_as
from .checkpoint import other_names as other_names
from .checkpoint import read_index as read_index
from .file_tensor import FileTensor as FileTensor
from .file_tensor import called as called
from .file_tensor import span as span
from .first_bytes import kind_of_archive as kind_of_archive
from .first_bytes import kind_of_file as kind_of_file
from .lazy import LazyTensor as LazyTensor
from .lazy import View as View
from .lazy import concatenate as concatenate
from .lazy import stack as stack
from .names import by_plain_name as by_plain_name
from .names import named_leaves as named_leaves
from .names import plain_name as plain_name
from .sharded import ShardedTensor as ShardedTensor
