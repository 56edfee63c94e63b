"""One training step, compiled: the place where jaxzero does its work."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from ._retrieval import Metrics, Params, contrastive_loss, make_embed
from ._setup import Setup
from ._tokens import PairTokens

StepFn = Callable[[Params, Any, PairTokens], tuple[Params, Any, Metrics]]


def make_step(setup: Setup, *, temperature: float) -> StepFn:
    """Make `step(params, opt_state, tokens) -> (params, opt_state, metrics)`.

    The first two arguments are donated: their memory is taken over by the results.
    """
    embed = make_embed(setup.graph)

    def loss(params: Params, tokens: PairTokens) -> tuple[Float[Array, ""], Metrics]:
        return contrastive_loss(embed(params, tokens), temperature=temperature)

    loss_and_grads = setup.zero.value_and_grad(loss, has_aux=True)

    def step(params: Params, opt_state: Any, tokens: PairTokens):
        (value, metrics), grads = loss_and_grads(params, tokens)
        updates, opt_state = setup.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": value, **metrics}

    compiled = jax.jit(step, donate_argnums=(0, 1))
    return lambda params, opt_state, tokens: compiled(params, opt_state, place(setup, tokens))


def make_sharded_embed(setup: Setup) -> Callable[[Params, PairTokens], Float[Array, "b 2 d"]]:
    """Make `embed(params, tokens)` over all devices, for evaluation."""
    compiled = jax.jit(setup.zero.apply(make_embed(setup.graph)))
    return lambda params, tokens: compiled(params, place(setup, tokens))


def place(setup: Setup, tokens: PairTokens) -> PairTokens:
    """Put each device's rows of a batch on it."""
    return jax.device_put(tokens, NamedSharding(setup.zero.mesh, setup.zero.batch_spec))
