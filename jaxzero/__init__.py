"""Train with ZeRO-3 and ZeRO++ in JAX, by transforming the loss function. Start at `Zero`.

import jaxzero as jz

mesh = jz.make_mesh(nodes=2)
zero = jz.Zero(mesh, jz.zeropp())
params = zero.init(init_fn, key)
opt_state = zero.init_optimizer(tx, params)
loss, grads = zero.value_and_grad(loss_fn)(params, batch)
"""

from typing import TYPE_CHECKING

from ._first_use import exported_on_first_use

if TYPE_CHECKING:
    from ._attention import attention as attention
    from ._checkpoint import Checkpoints as Checkpoints
    from ._codecs import Cast as Cast
    from ._codecs import Float8 as Float8
    from ._codecs import Int4 as Int4
    from ._codecs import Int8 as Int8
    from ._codecs import MXFloat8 as MXFloat8
    from ._codecs import NVFloat4 as NVFloat4
    from ._cross_entropy import softmax_cross_entropy as softmax_cross_entropy
    from ._deepspeed import from_deepspeed as from_deepspeed
    from ._local_steps import LocalSteps as LocalSteps
    from ._local_steps import dasgd as dasgd
    from ._local_steps import diloco as diloco
    from ._local_steps import streaming_diloco as streaming_diloco
    from ._mesh import exchange_tokens as exchange_tokens
    from ._mesh import fold_in_device as fold_in_device
    from ._mesh import make_mesh as make_mesh
    from ._mesh import split_tokens as split_tokens
    from ._planner import Cluster as Cluster
    from ._planner import Device as Device
    from ._planner import compile_for as compile_for
    from ._planner import tune as tune
    from ._reshard import reshard as reshard
    from ._reshard import reshard_report as reshard_report
    from ._sharding import Activations as Activations
    from ._sharding import CommSchedule as CommSchedule
    from ._sharding import ErrorFeedback as ErrorFeedback
    from ._sharding import HpZ as HpZ
    from ._sharding import Offload as Offload
    from ._sharding import PerAxis as PerAxis
    from ._sharding import Stages as Stages
    from ._sharding import Ungathered as Ungathered
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

# A name is imported when it is first used: checkpoints bring Orbax, the planner compiles.
__getattr__, __dir__ = exported_on_first_use(
    __name__,
    {
        "_attention": "attention",
        "_checkpoint": "Checkpoints",
        "_codecs": "Cast Float8 Int4 Int8 MXFloat8 NVFloat4",
        "_cross_entropy": "softmax_cross_entropy",
        "_deepspeed": "from_deepspeed",
        "_local_steps": "LocalSteps dasgd diloco streaming_diloco",
        "_mesh": "exchange_tokens fold_in_device make_mesh split_tokens",
        "_planner": "Cluster Device compile_for tune",
        "_reshard": "reshard reshard_report",
        "_sharding": "Activations CommSchedule ErrorFeedback HpZ Offload PerAxis Stages "
        "Ungathered WeightDelta ZeroConfig compiler_options ddp hsdp pipeline zero3 zeropp zeropp4",
        "_simigrad": "JumpRule WalkRule simigrad simigrad_stats",
        "_warnings": "RowsMixedWarning",
        "_zero": "Zero freeze_schedule pad_batch",
    },
)
