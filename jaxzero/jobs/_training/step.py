"""The compiled training step: loss and gradients by `jz.Zero`, then the optimizer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ..._sharding import ZeroConfig, compiler_options
from ..._simigrad import SimigradState, simigrad_stats
from .._task import Metrics, PairTokens, Params, contrastive_loss, make_embed
from .setup import Setup

LossFn = Callable[[Params, PairTokens], tuple[Float[Array, ""], Metrics]]
StepFn = Callable[[Params, Any, Any, PairTokens], tuple[Params, Any, Any, Metrics]]


def make_loss(setup: Setup, *, temperature: float) -> LossFn:
    """Make the training loss, `loss(params, tokens) -> (loss, metrics)`."""
    embed = make_embed(setup.graph)

    def loss(params: Params, tokens: PairTokens) -> tuple[Float[Array, ""], Metrics]:
        return contrastive_loss(embed(params, tokens), temperature=temperature)

    return loss


def make_step(setup: Setup, loss: LossFn) -> StepFn:
    """Make the jitted step, from `(params, opt_state, wire_state, tokens)`.

    It returns the next `params`, `opt_state` and `wire_state`, and metrics. The first three
    arguments are donated, so that the results reuse their memory. `wire_state` is None if the
    config needs none.
    """
    loss_and_grads = setup.zero.value_and_grad(loss, has_aux=True)

    def step(params: Params, opt_state: Any, wire_state: Any, tokens: PairTokens):
        (value, metrics), grads, *wire_states = loss_and_grads(
            params, tokens, wire_state=wire_state
        )
        params, opt_state = setup.zero.apply_gradients(
            setup.optimizer, grads, opt_state, params, value=value
        )
        if wire_states:  # errors fed back would stay non-finite for ever
            wire_state = jax.tree.map(
                lambda new, old: jnp.where(opt_state.last_finite, new, old),
                wire_states[0],
                wire_state,
            )
        metrics = {"loss": value, **metrics, **_optimizer_metrics(opt_state)}
        return params, opt_state, wire_state, metrics

    platform = setup.zero.mesh.devices.flat[0].platform
    options = compiler_options(platform, offload=setup.zero.config.offload is not None)
    return jax.jit(step, donate_argnums=(0, 1, 2), compiler_options=options)


def _optimizer_metrics(opt_state: Any) -> Metrics:
    """Return counts of skipped steps and, with `adaptive_batch`, the statistics of SimiGrad."""
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


def make_sharded_embed(setup: Setup) -> Callable[[Params, PairTokens], Float[Array, "b 2 d"]]:
    """Make `embed(params, tokens)`, sharded over all devices, for evaluation.

    Weights are gathered without a codec, so that the exported weights are evaluated. The result is
    replicated.
    """
    config = setup.zero.config
    zero, _ = setup.other_zero(ZeroConfig(stage=config.stage, offload=config.offload))
    everywhere = NamedSharding(zero.mesh, PartitionSpec())  # each process ranks all of them
    compiled = jax.jit(zero.apply(make_embed(setup.graph)), out_shardings=everywhere)
    rows = NamedSharding(zero.mesh, zero.batch_spec)
    return lambda params, tokens: compiled(params, jax.device_put(tokens, rows))
