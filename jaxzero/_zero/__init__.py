"""`Zero`, the class that users hold: it shards trees, and transforms functions of them.

In: the user's functions, trees, batches and optimizers. Out: functions that run under `shard_map`,
and errors that are raised before anything is traced. Packages above use `Zero`; `_checkpoint` also
uses `placement` and `host_memory`.
"""

from .frozen_layers import freeze_schedule as freeze_schedule
from .host_memory import check_host_bytes as check_host_bytes
from .local_rounds import LocalRounds as LocalRounds
from .local_state import LocalState as LocalState
from .placement import auto_mesh as auto_mesh
from .placement import pad_leaf as pad_leaf
from .placement import run_automatic as run_automatic
from .rows import pad_batch as pad_batch
from .zero import Zero as Zero
