"""Trace a function to a list of operations; only this package and `_mesh.per_device` read jaxprs.

In: a function and the shapes of its arguments. Out: a `Block` of operations, in which the body of
each loop is a block of its own; and `movable_ops`, the operations that can run before or after a
gather or a reduction.
"""

from . import movable_ops as movable_ops
from .alike_leaves import LeafOf as LeafOf
from .alike_leaves import LeafValues as LeafValues
from .alike_leaves import MatrixStack as MatrixStack
from .alike_leaves import stack_alike_leaves as stack_alike_leaves
from .alike_leaves import stack_of_leaf as stack_of_leaf
from .copies import Copies as Copies
from .copies import like as like
from .frozen_part import SplitStack as SplitStack
from .frozen_part import known_part as known_part
from .frozen_part import rest_part as rest_part
from .frozen_part import run_on_split_stacks as run_on_split_stacks
from .ir import ADDITIONS as ADDITIONS
from .ir import Atom as Atom
from .ir import Barrier as Barrier
from .ir import Block as Block
from .ir import Constant as Constant
from .ir import Loop as Loop
from .ir import Operation as Operation
from .ir import Value as Value
from .ir import exchanged_or_effect as exchanged_or_effect
from .ir import exchanges as exchanges
from .ir import has_host_effect as has_host_effect
from .ir import is_mutable as is_mutable
from .layout_requests import asks_to_split_over as asks_to_split_over
from .operation_kinds import Branch as Branch
from .operation_kinds import CarriedSum as CarriedSum
from .operation_kinds import Fork as Fork
from .operation_kinds import addends as addends
from .operation_kinds import carried_sums as carried_sums
from .operation_kinds import dtype_of as dtype_of
from .operation_kinds import full_reduction as full_reduction
from .operation_kinds import is_broadcast as is_broadcast
from .operation_kinds import is_costly as is_costly
from .operation_kinds import is_elementwise as is_elementwise
from .operation_kinds import is_reshape as is_reshape
from .operation_kinds import is_zero as is_zero
from .operation_kinds import makes_zeros as makes_zeros
from .operation_kinds import may_be_copied as may_be_copied
from .operation_kinds import multiplies_matrices as multiplies_matrices
from .operation_kinds import shape_of as shape_of
from .roll_layers import with_rolled_layers as with_rolled_layers
from .row_mixing import Mixing as Mixing
from .row_mixing import RowInput as RowInput
from .row_mixing import find_mixings as find_mixings
from .scan_indexed_stacks import scan_indexed_stacks as scan_indexed_stacks
from .sink_into_loops import sink_into_loops as sink_into_loops
from .split_conds import split_conds as split_conds
from .table_shards import TableOperations as TableOperations
from .table_shards import Tools as Tools
from .table_shards import exchange_rows as exchange_rows
from .table_uses import Lookup as Lookup
from .table_uses import Table as Table
from .table_uses import find_tables as find_tables
from .trace import OF_MUTABLE as OF_MUTABLE
from .trace import OpenProgram as OpenProgram
from .trace import at_line_of as at_line_of
from .trace import branch_blocks as branch_blocks
from .trace import calls_python as calls_python
from .trace import open_program as open_program
from .trace import operations_for as operations_for
from .trace import rewritten as rewritten
from .trace import trace as trace
from .trace import traced_once as traced_once
from .trace import without_checkpoints as without_checkpoints
from .trace import without_dead_code as without_dead_code
from .uniform import values_made_of as values_made_of
from .unrolled_layers import StackPart as StackPart
from .weight_values import fixed_of as fixed_of
from .weight_values import kept_values as kept_values
from .weight_values import recompute_in_backward as recompute_in_backward
