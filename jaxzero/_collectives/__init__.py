"""All-gather weights and reduce-scatter gradients over the mesh axes, in buckets, with codecs.

In: encoded shards, or gradients, each with its `ReduceSpec`. Out: full weights, or shards of sums.
Runs inside `shard_map`; `primitives` issues every collective and records it in the ledger.
"""

from .alike import alike_once as alike_once
from .alike import for_alike as for_alike
from .comm_spec import CommSpec as CommSpec
from .comm_spec import ReduceSpec as ReduceSpec
from .comm_spec import accumulator_dtype as accumulator_dtype
from .comm_spec import reduce_axes as reduce_axes
from .encoded_shards import EncodedShards as EncodedShards
from .encoded_shards import from_stored as from_stored
from .encoded_shards import to_stored as to_stored
from .gather import encode_node_slice as encode_node_slice
from .gather import gather_hop as gather_hop
from .gather import gathered_aval as gathered_aval
from .gather import move_split as move_split
from .gather import node_slices as node_slices
from .gather import start_gather as start_gather
from .gather_bucket import GatherBucket as GatherBucket
from .gather_bucket import arrays as arrays
from .ledger import HostTransfer as HostTransfer
from .ledger import Ledger as Ledger
from .ledger import Transfer as Transfer
from .ledger import labelled as labelled
from .ledger import note as note
from .ledger import picked as picked
from .ledger import readable_bytes as readable_bytes
from .ledger import recording as recording
from .ledger import repeated as repeated
from .partial_sums import HalfBatchSum as HalfBatchSum
from .partial_sums import Sum as Sum
from .partial_sums import as_pair as as_pair
from .primitives import all_gather as all_gather
from .primitives import all_max as all_max
from .primitives import all_reduce as all_reduce
from .primitives import all_to_all as all_to_all
from .primitives import copy_to_device as copy_to_device
from .primitives import copy_to_host as copy_to_host
from .primitives import gather_nodes as gather_nodes
from .primitives import in_loop as in_loop
from .primitives import in_region as in_region
from .primitives import note_moves as note_moves
from .primitives import permute as permute
from .primitives import reduce_nodes as reduce_nodes
from .primitives import reduce_scatter as reduce_scatter
from .reduce_hop import reduce_over_node as reduce_over_node
from .reduce_hop import shard_shape as shard_shape
from .reduce_hop import sum_full as sum_full
from .reductions import ReduceBucket as ReduceBucket
from .reductions import reduce_gradient as reduce_gradient
from .reductions import reduce_next_axis as reduce_next_axis
from .reductions import start_reduction as start_reduction
from .row_exchange import RowExchange as RowExchange
from .row_exchange import gather_ids as gather_ids
from .tree_sums import check_tree as check_tree
from .tree_sums import sum_over_devices as sum_over_devices
