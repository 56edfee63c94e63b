"""Make the compiled training step: loss and gradients by `jz.Zero`, then the optimizer.

With local steps, the program is a round of such steps on each node.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from .._local_steps import LocalSteps
from .._mesh import NODE
from .._sharding import compiler_options
from .._simigrad import SimigradState, simigrad_stats
from .._zero import LocalRounds, LocalState
from ._retrieval import LossFn, Metrics, Params
from ._setup import Setup

StepFn = Callable[[Params, Any, Any, Any], tuple[Params, Any, Any, Metrics]]
RoundFn = Callable[[LocalState, Any], tuple[LocalState, dict[str, Float[Array, "every"]]]]


def make_step(setup: Setup, loss: LossFn) -> StepFn:
    """Make the jitted training step, a function of `(params, opt_state, wire_state, tokens)`.

    The step returns the next `params`, `opt_state` and `wire_state`, and metrics. Its first three
    arguments are donated, so that the results reuse their memory. `wire_state` is None if the
    config needs none.
    """
    step = _make_uncompiled(setup, loss)
    return jax.jit(step, donate_argnums=(0, 1, 2), compiler_options=_options(setup))


def make_rounds(setup: Setup, loss: LossFn, method: LocalSteps) -> LocalRounds:
    """Make rounds of local steps, in which each node by itself takes the step of `make_step`.

    The rounds are not compiled.

    Raises:
        ValueError: there is one node, or the config needs a wire state.
    """
    if setup.zero.mesh.shape[NODE] == 1:
        raise ValueError(
            "`local_steps` needs at least 2 `nodes`, which exchange; the devices form 1. Give "
            "`nodes`."
        )
    step = _make_uncompiled(setup, loss)

    def on_node(params: Params, opt_state: Any, tokens: Any):
        params, opt_state, _, metrics = step(params, opt_state, None, tokens)
        return params, opt_state, metrics

    return setup.zero.local_steps(on_node, method)


def make_round(setup: Setup, rounds: LocalRounds) -> RoundFn:
    """Make the jitted round: `(state, batches) -> (next state, metrics)`; the state is donated.

    `batches` are the batches of a round's steps, stacked along a new first dimension. The metrics
    are those of each step: means over nodes, or, for numbers of skipped steps, the largest.
    """
    options = _options(setup, local_steps=True)
    run = jax.jit(rounds, donate_argnums=0, compiler_options=options)
    everywhere = NamedSharding(setup.zero.mesh, PartitionSpec())  # each process reads all of them

    def over_nodes(metrics: dict[str, Float[Array, "every nodes"]]):
        return {
            name: x.max(axis=1) if name.startswith("skipped") else x.mean(axis=1)
            for name, x in metrics.items()
        }

    combine = jax.jit(over_nodes, out_shardings=everywhere)

    def run_round(state: LocalState, batches: Any):
        state, metrics = run(state, batches)
        return state, combine(metrics)

    return run_round


def _options(setup: Setup, *, local_steps: bool = False) -> dict[str, Any]:
    platform = setup.zero.mesh.devices.flat[0].platform
    config = setup.zero.config
    return compiler_options(
        platform,
        offload=config.offload is not None,
        local_steps=local_steps,
        stages=config.stages is not None,
    )


def _make_uncompiled(setup: Setup, loss: LossFn) -> StepFn:
    loss_and_grads = setup.zero.value_and_grad(loss, has_aux=True)

    def step(params: Params, opt_state: Any, wire_state: Any, tokens: Any):
        (value, metrics), grads, *wire_states = loss_and_grads(
            params, tokens, wire_state=wire_state
        )
        params, opt_state = setup.zero.apply_gradients(
            setup.optimizer, grads, opt_state, params, value=value
        )
        if wire_states:  # a residual that is not finite would make all later steps non-finite
            wire_state = jax.tree.map(
                lambda new, old: jnp.where(opt_state.last_finite, new, old),
                wire_states[0],
                wire_state,
            )
        metrics = {"loss": value, **metrics, **_optimizer_metrics(opt_state)}
        return params, opt_state, wire_state, metrics

    return step


def _optimizer_metrics(opt_state: Any) -> Metrics:
    """Return metrics: counts of skipped steps and, with `adaptive_batch`, SimiGrad's statistics."""
    skipped = {
        "skipped": opt_state.total_notfinite.astype(jnp.float32),
        "skipped_in_a_row": opt_state.notfinite_count.astype(jnp.float32),
    }
    if not isinstance(opt_state.inner_state, SimigradState):
        return skipped
    stats = simigrad_stats(opt_state.inner_state)
    return {
        **skipped,
        "updates": stats["updates"].astype(jnp.float32),
        "steps_per_update": stats["steps"].astype(jnp.float32),
        # Not finite before the first update, or where gradients drown in noise.
        "gradient_similarity": stats["similarity"],
        "noise_scale_steps": stats["noise_scale"],
    }
