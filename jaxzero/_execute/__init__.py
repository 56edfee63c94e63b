"""Run a planned program on one device: gather weights before use, reduce gradients once made.

In: a loss function, parameter shards, this device's rows of the batch and the wire state. Out: the
loss, shards of the mean gradients, the next wire state. Start reading at `run_on_device`.
"""

from .buckets import number_after as number_after
from .device_step import Result as Result
from .device_step import run_on_device as run_on_device
from .loop_inputs import LeafUpdate as LeafUpdate
from .mean_gradients import HalfSums as HalfSums
from .microbatches import GRADIENT_REDUCTIONS as GRADIENT_REDUCTIONS
from .microbatches import REDUCTIONS as REDUCTIONS
from .microbatches import check_microbatches as check_microbatches
from .microbatches import combine as combine
from .microbatches import split_microbatches as split_microbatches
from .parameters import Parameters as Parameters
from .total_weight import total_weight as total_weight
from .wire_state import DeviceWireState as DeviceWireState
from .wire_state import WireState as WireState
from .wire_state import first_state as first_state
from .wire_state import from_tree as from_tree
from .wire_state import specs_of as specs_of
from .wire_state import to_tree as to_tree
