"""ZeRO-3 and ZeRO++ for JAX as a function transformation. Start at `Zero`.

import jaxzero as jz

mesh = jz.make_mesh(nodes=2)
zero = jz.Zero(mesh, jz.zeropp())
params = zero.init(init_fn, key)
opt_state = zero.init_optimizer(tx, params)
loss, grads = zero.value_and_grad(loss_fn)(params, batch)
"""

from ._checkpoint import Checkpoints as Checkpoints
from ._codecs import Cast as Cast
from ._codecs import Float8 as Float8
from ._codecs import Int4 as Int4
from ._codecs import Int8 as Int8
from ._codecs import MXFloat8 as MXFloat8
from ._codecs import NVFloat4 as NVFloat4
from ._deepspeed import from_deepspeed as from_deepspeed
from ._local_steps import LocalSteps as LocalSteps
from ._local_steps import dasgd as dasgd
from ._local_steps import diloco as diloco
from ._local_steps import streaming_diloco as streaming_diloco
from ._mesh import fold_in_device as fold_in_device
from ._mesh import make_mesh as make_mesh
from ._planner import Cluster as Cluster
from ._planner import Device as Device
from ._planner import compile_for as compile_for
from ._planner import tune as tune
from ._reshard import reshard as reshard
from ._reshard import reshard_report as reshard_report
from ._sharding import CommSchedule as CommSchedule
from ._sharding import ErrorFeedback as ErrorFeedback
from ._sharding import HpZ as HpZ
from ._sharding import Offload as Offload
from ._sharding import PerAxis as PerAxis
from ._sharding import Stages as Stages
from ._sharding import WeightDelta as WeightDelta
from ._sharding import ZeroConfig as ZeroConfig
from ._sharding import compiler_options as compiler_options
from ._sharding import ddp as ddp
from ._sharding import hsdp as hsdp
from ._sharding import pipeline as pipeline
from ._sharding import zero3 as zero3
from ._sharding import zeropp as zeropp
from ._sharding import zeropp4 as zeropp4
from ._simigrad import JumpRule as JumpRule
from ._simigrad import WalkRule as WalkRule
from ._simigrad import simigrad as simigrad
from ._simigrad import simigrad_stats as simigrad_stats
from ._warnings import RowsMixedWarning as RowsMixedWarning
from ._zero import Zero as Zero
from ._zero import freeze_schedule as freeze_schedule
from ._zero import pad_batch as pad_batch
