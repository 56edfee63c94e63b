"""One training step, compiled: the place where jaxzero does its work."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from .._config import ZeroConfig
from .._simigrad_state import SimigradState, simigrad_stats
from ._retrieval import Metrics, Params, contrastive_loss, make_embed
from ._setup import Setup
from ._tokens import PairTokens

LossFn = Callable[[Params, PairTokens], tuple[Float[Array, ""], Metrics]]
# Metrics that are not finite before the first update, or where gradients drown in noise, and what
# `simigrad_stats` calls them.
SOMETIMES_UNKNOWN = {"gradient_similarity": "similarity", "noise_scale_steps": "noise_scale"}

StepFn = Callable[[Params, Any, Any, PairTokens], tuple[Params, Any, Any, Metrics]]


def make_loss(setup: Setup, *, temperature: float) -> LossFn:
    """Make `loss(params, tokens) -> (loss, metrics)`, which is trained on."""
    embed = make_embed(setup.graph)

    def loss(params: Params, tokens: PairTokens) -> tuple[Float[Array, ""], Metrics]:
        return contrastive_loss(embed(params, tokens), temperature=temperature)

    return loss


def make_step(setup: Setup, loss: LossFn) -> StepFn:
    """Make `step(params, opt_state, wire_state, tokens)`, which returns the next of each.

    In the place of the tokens it returns metrics. The other arguments are donated: their memory is
    taken over by the results. `wire_state` is None where the wire remembers nothing.
    """
    loss_and_grads = setup.zero.value_and_grad(loss, has_aux=True)

    def step(params: Params, opt_state: Any, wire_state: Any, tokens: PairTokens):
        (value, metrics), grads, *wire_states = loss_and_grads(
            params, tokens, wire_state=wire_state
        )
        updates, opt_state = setup.optimizer.update(grads, opt_state, params)
        wire_state = wire_states[0] if wire_states else None
        metrics = {"loss": value, **metrics, **_batch_metrics(opt_state)}
        return optax.apply_updates(params, updates), opt_state, wire_state, metrics

    return jax.jit(step, donate_argnums=(0, 1, 2))


def _batch_metrics(opt_state: Any) -> Metrics:
    """What is known of batches that adapt; nothing if they do not."""
    if not isinstance(opt_state, SimigradState):
        return {}
    stats = simigrad_stats(opt_state)
    return {
        "updates": stats["updates"].astype(jnp.float32),
        "steps_per_update": stats["steps"].astype(jnp.float32),
        **{name: stats[stat] for name, stat in SOMETIMES_UNKNOWN.items()},
    }


def make_sharded_embed(setup: Setup) -> Callable[[Params, PairTokens], Float[Array, "b 2 d"]]:
    """Make `embed(params, tokens)` over all devices, for evaluation.

    Weights travel as they are, whatever the wire of the training: judged is what is exported.
    """
    zero, _ = setup.other_zero(ZeroConfig(stage=setup.zero.config.stage))
    compiled = jax.jit(zero.apply(make_embed(setup.graph)))
    rows = NamedSharding(zero.mesh, zero.batch_spec)
    return lambda params, tokens: compiled(params, jax.device_put(tokens, rows))
