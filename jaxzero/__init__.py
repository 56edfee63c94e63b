"""ZeRO-3 and ZeRO++ for JAX as a function transformation. Start at `Zero`.

import jaxzero as jz

mesh = jz.make_mesh(nodes=2)
zero = jz.Zero(mesh, jz.zeropp())
params = zero.init(init_fn, key)
opt_state = zero.init_optimizer(tx, params)
loss, grads = zero.value_and_grad(loss_fn)(params, batch)
"""

from ._batch_rules import Jump as Jump
from ._batch_rules import Walk as Walk
from ._block_codecs import Float8 as Float8
from ._block_codecs import Int4 as Int4
from ._block_codecs import Int8 as Int8
from ._checkpoint import Checkpoints as Checkpoints
from ._codecs import Cast as Cast
from ._compiler import compiler_options as compiler_options
from ._config import Difference as Difference
from ._config import ErrorFeedback as ErrorFeedback
from ._config import Hops as Hops
from ._config import HpZ as HpZ
from ._config import Schedule as Schedule
from ._config import ZeroConfig as ZeroConfig
from ._deepspeed_config import from_deepspeed as from_deepspeed
from ._mesh import fold_in_device as fold_in_device
from ._mesh import make_mesh as make_mesh
from ._pad_batch import pad_batch as pad_batch
from ._presets import ddp as ddp
from ._presets import hsdp as hsdp
from ._presets import zero3 as zero3
from ._presets import zeropp as zeropp
from ._presets import zeropp4 as zeropp4
from ._simigrad import simigrad as simigrad
from ._simigrad_state import simigrad_stats as simigrad_stats
from ._zero import Zero as Zero
