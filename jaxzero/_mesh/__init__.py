"""Two-level device meshes, real or simulated on one device, and functions that run on each device.

In: devices, or the number of devices to simulate. Out: a mesh with axes `node` and `local`, and
functions under `shard_map` or its simulation, with arrays in device or host memory.
Any package above may use the names listed here.
"""

from . import gloo_groups as gloo_groups
from . import gloo_workaround as gloo_workaround
from . import simulated as simulated
from .gloo_workaround import reduce_scatter as reduce_scatter
from .loop_order import in_turn as in_turn
from .loop_order import last_tokens as last_tokens
from .loop_order import remember as remember
from .loop_order import scan_sizes as scan_sizes
from .memory import HOST as HOST
from .memory import empty_in_host as empty_in_host
from .memory import in_host as in_host
from .memory import memory_kind_of as memory_kind_of
from .memory import to_device as to_device
from .memory import to_host as to_host
from .mesh import AXES as AXES
from .mesh import LOCAL as LOCAL
from .mesh import NODE as NODE
from .mesh import REDUCTION_HOPS as REDUCTION_HOPS
from .mesh import check_context as check_context
from .mesh import check_mesh as check_mesh
from .mesh import current_microbatch as current_microbatch
from .mesh import device_index as device_index
from .mesh import fold_in_device as fold_in_device
from .mesh import make_mesh as make_mesh
from .mesh import map_devices as map_devices
from .mesh import microbatch_index as microbatch_index
from .mesh import with_automatic_axes as with_automatic_axes
from .one_node import AnyMesh as AnyMesh
from .one_node import NodeMesh as NodeMesh
from .one_node import is_one_node as is_one_node
from .one_node import map_nodes as map_nodes
from .one_node import physical as physical
from .one_node import program_axes as program_axes
from .one_node import split_if_explicit as split_if_explicit
from .one_node import without_node as without_node
from .per_device import bare as bare
from .per_device import forward_only as forward_only
from .per_device import is_traced as is_traced
from .per_device import is_tracing as is_tracing
from .per_device import known_together as known_together
from .per_device import rewrite as rewrite
from .per_device import without_refs as without_refs
from .simulated import SimulatedMesh as SimulatedMesh
from .simulated import varying as varying
