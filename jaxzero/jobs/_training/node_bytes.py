"""Count the bytes that enter a node in a training step, compared with plain ZeRO-3.

The bytes come from the plan of the step: the model is traced, but not compiled or run. The plan
does not include communication of the loss itself (embeddings) or of the compiler: at stages 1 and 2
the compiler gathers the weights, which the optimizer updates in shards.
"""

import dataclasses
from typing import Any

import jax

from ..._mesh import NODE
from ..._plan import Plan
from ..._sharding import ZeroConfig
from ..._zero import LocalRounds, Zero
from .._settings import Sharding
from .._task import PairTokens
from .loss import LossFn
from .setup import Setup, zero_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeBytes:
    """Bytes of weights and gradients that enter each node in one step, beside plain ZeRO-3's.

    With local steps, those of parameters.
    """

    sent: int  # by the job
    round_steps: int  # those of a round of local steps, of which `sent` is the mean; else 0
    weights_counted: bool  # False if `sent` counts gradients only; full weights are sent too
    zero3_float32: int  # by plain ZeRO-3, without codecs
    zero3_bfloat16: int  # by plain ZeRO-3 in 16 bits, as in the papers


def node_bytes(
    setup: Setup, loss: LossFn, tokens: PairTokens, work: Plan | LocalRounds
) -> NodeBytes | None:
    """Count the bytes that enter a node; None if there is only one node.

    Args:
        setup: devices, sharding, model and optimizer.
        loss: the training loss.
        tokens: abstract tokens of one step.
        work: plan of one step, or the rounds of local steps.
    """
    if setup.zero.mesh.shape[NODE] == 1:
        return None

    def count(config: ZeroConfig) -> int:
        zero, params = setup.other_zero(config)
        if isinstance(work, Plan) and config == setup.zero.config:
            plan = work
        else:
            plan = plan_step(zero, params, loss, tokens)
        traffic = zero.report(params, plan=plan).traffic
        assert traffic is not None
        return traffic.node_bytes

    if isinstance(work, Plan):
        sent, round_steps = count(setup.zero.config), 0
    else:
        sent, round_steps = round(work.report().bytes_per_step), work.method.every
    return NodeBytes(
        sent=sent,
        round_steps=round_steps,
        weights_counted=setup.zero.config.stage in (0, 3) or round_steps > 0,
        zero3_float32=count(zero_config(Sharding(wire="float32"))),
        zero3_bfloat16=count(zero_config(Sharding(wire="bfloat16"))),
    )


def plan_step(zero: Zero, params: Any, loss: LossFn, tokens: PairTokens) -> Plan:
    """The plan of a training step; `params` and `tokens` may be `ShapeDtypeStruct`s."""
    wire_state = None
    if zero.config.needs_wire_state:
        wire_state = jax.eval_shape(zero.init_wire_state, params)
    return zero.plan(loss, params, tokens, has_aux=True, wire_state=wire_state)
