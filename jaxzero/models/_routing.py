"""Routers of a mixture of experts: which k experts process a token, with which weights.

    softmax:  p = softmax(logits); the k largest p_e are the weights
    groups:   p = sigmoid(logits); the k largest p_e + correction_e in the best groups are chosen,
              their p_e are the weights

Weights are float32 for 16-bit logits. The choice itself has no gradient.

Dimensions: n tokens, e experts, k experts per token, g groups, m experts per group.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._experts_config import ExpertsConfig, GroupRouting
from ._wide import widened

Routed = tuple[Float[Array, "n k"], Int[Array, "n k"]]  # weight and index of each chosen expert


def route_by_softmax(logits_ne: Float[Array, "n e"], experts: ExpertsConfig) -> Routed:
    """Choose the experts with the largest probabilities, largest first."""
    shares_ne = jax.nn.softmax(logits_ne.astype(widened(logits_ne.dtype)), axis=-1)
    shares_nk, chosen_nk = jax.lax.top_k(shares_ne, experts.num_experts_per_token)
    if experts.normalize:
        shares_nk = shares_nk / shares_nk.sum(axis=-1, keepdims=True)
    return shares_nk, chosen_nk


def route_by_groups(
    logits_ne: Float[Array, "n e"],
    correction_e: Float[Array, "e"],
    experts: ExpertsConfig,
    routing: GroupRouting,
) -> Routed:
    """Choose the best experts of the best groups."""
    shares_ne = jax.nn.sigmoid(logits_ne.astype(widened(logits_ne.dtype)))
    scores_ne = jax.lax.stop_gradient(shares_ne + correction_e.astype(shares_ne.dtype)[None])
    scores_ngm = scores_ne.reshape(len(scores_ne), routing.num_groups, -1)
    worth_ng = jax.lax.top_k(scores_ngm, 2)[0].sum(axis=-1)
    best = jax.lax.top_k(worth_ng, routing.num_chosen_groups)[1]
    allowed_ng = (best[:, :, None] == jnp.arange(routing.num_groups)[None, None]).any(axis=1)
    scores_ngm = jnp.where(allowed_ng[:, :, None], scores_ngm, -jnp.inf)
    _, chosen_nk = jax.lax.top_k(scores_ngm.reshape(scores_ne.shape), experts.num_experts_per_token)
    shares_nk = jnp.take_along_axis(shares_ne, chosen_nk, axis=-1)
    if experts.normalize:
        # Sigmoids may all be 0; the same guard as in transformers.
        shares_nk = shares_nk / (shares_nk.sum(axis=-1, keepdims=True) + 1e-20)
    return shares_nk * routing.scale, chosen_nk
