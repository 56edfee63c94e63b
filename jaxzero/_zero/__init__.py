"""`Zero`: sharded trees, and functions over them in place of `jax.value_and_grad`.

In: the user's functions, trees, batches and optimizers. Out: functions under `shard_map`, and
errors before anything is traced. Rooms above use `Zero`, and placement for checkpoints.
"""

from .pad_batch import pad_batch as pad_batch
from .placement import auto_mesh as auto_mesh
from .placement import pad_leaf as pad_leaf
from .placement import run_automatic as run_automatic
from .zero import Zero as Zero
