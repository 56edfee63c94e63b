"""Two-level device meshes, real or simulated on one device, and functions that run on each device.

In: devices, or the number of devices to simulate. Out: a mesh with axes `node` and `local`, and
functions under `shard_map` or its simulation, with arrays in device or host memory.
Any package above may use the names listed here.
"""

from . import gloo_workaround as gloo_workaround
from .emission import Recording as Recording
from .emission import emit as emit
from .gloo_workaround import reduce_scatter as reduce_scatter
from .loop_order import NAMING_ONLY as NAMING_ONLY
from .loop_order import in_turn as in_turn
from .loop_order import last_tokens as last_tokens
from .loop_order import remember as remember
from .loop_order import scan_sizes as scan_sizes
from .mesh import AXES as AXES
from .mesh import LOCAL as LOCAL
from .mesh import NODE as NODE
from .mesh import REDUCTION_HOPS as REDUCTION_HOPS
from .mesh import STAGE as STAGE
from .mesh import check_context as check_context
from .mesh import check_mesh as check_mesh
from .mesh import current_microbatch as current_microbatch
from .mesh import device_index as device_index
from .mesh import fold_in_device as fold_in_device
from .mesh import make_mesh as make_mesh
from .mesh import map_devices as map_devices
from .mesh import microbatch_index as microbatch_index
from .mesh import with_automatic_axes as with_automatic_axes
from .mesh import with_stages as with_stages
from .mesh_kinds import EXCHANGES as EXCHANGES
from .mesh_kinds import AnyMesh as AnyMesh
from .mesh_kinds import NodeMesh as NodeMesh
from .mesh_kinds import SimulatedMesh as SimulatedMesh
from .mesh_kinds import axes_of_dims as axes_of_dims
from .mesh_kinds import exchange_in_turn as exchange_in_turn
from .mesh_kinds import is_one_node as is_one_node
from .mesh_kinds import is_simulating as is_simulating
from .mesh_kinds import map_nodes as map_nodes
from .mesh_kinds import map_specs as map_specs
from .mesh_kinds import physical as physical
from .mesh_kinds import program_axes as program_axes
from .mesh_kinds import refuse_exchanges_inside as refuse_exchanges_inside
from .mesh_kinds import split_if_explicit as split_if_explicit
from .mesh_kinds import varying as varying
from .mesh_kinds import without_node as without_node
from .per_device import CALLS as CALLS
from .per_device import CALLS_AND_REMAT as CALLS_AND_REMAT
from .per_device import HOST as HOST
from .per_device import REMAT as REMAT
from .per_device import bare as bare
from .per_device import bind as bind
from .per_device import empty_in_host as empty_in_host
from .per_device import equations_inside as equations_inside
from .per_device import evaluate as evaluate
from .per_device import forward_only as forward_only
from .per_device import in_host as in_host
from .per_device import is_traced as is_traced
from .per_device import is_tracing as is_tracing
from .per_device import known_together as known_together
from .per_device import memory_kind_of as memory_kind_of
from .per_device import rewrite as rewrite
from .per_device import to_device as to_device
from .per_device import to_host as to_host
from .per_device import without_refs as without_refs
from .token_exchange import GATHERED_EXPERTS as GATHERED_EXPERTS
from .token_exchange import ROWS_APART as ROWS_APART
from .token_exchange import exchange_tokens as exchange_tokens
from .tokens import MIN_FEATURES as MIN_FEATURES
from .tokens import TOKENS as TOKENS
from .tokens import num_token_parts as num_token_parts
from .tokens import on_token_parts as on_token_parts
from .tokens import split_over_tokens as split_over_tokens
from .tokens import split_tokens as split_tokens
from .tokens import split_weight_gradient as split_weight_gradient
from .tokens import weight_dim_of_tokens as weight_dim_of_tokens
from .tokens import whole_weight as whole_weight
