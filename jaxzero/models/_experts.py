"""Mixture of experts (https://arxiv.org/abs/2101.03961): a router sends each token to k experts.

    p = softmax(router(x))             over all experts
    y = sum of p_e mlp_e(x)            over the k experts with the largest p_e

There are two implementations. "scan" loops over experts and applies each to every token: ZeRO then
gathers the weights of one expert at a time, for num_experts / k times the arithmetic. "ragged"
sorts the tokens by expert and multiplies each group by its expert's weights
(`jax.lax.ragged_dot`): no arithmetic is wasted if the backend has a kernel for it, but the
weights of all experts of a layer are in memory at once.

Dimensions: n tokens of the batch, k experts per token, e experts, d hidden, f width of an expert.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ._attention import make_linear
from ._decoder_config import DecoderConfig
from ._experts_config import ExpertsConfig
from ._mlp import ACTIVATIONS
from ._wide import widened


class Experts(nnx.Module):
    """Gated MLPs, of which `k` process each token."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, *, rngs: nnx.Rngs):
        self.config, self.experts = config, experts
        initial = nnx.initializers.normal(config.initializer_range)
        num, hidden, wide = experts.num_experts, config.hidden_size, experts.intermediate_size
        self.router = make_linear(config, hidden, num, False, rngs)
        self.gate = nnx.Param(initial(rngs.params(), (num, hidden, wide)))
        self.up = nnx.Param(initial(rngs.params(), (num, hidden, wide)))
        self.down = nnx.Param(initial(rngs.params(), (num, wide, hidden)))

    def __call__(self, x_btd: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        x_nd = x_btd.reshape(-1, x_btd.shape[-1])
        shares_nk, chosen_nk = self.route(x_nd)
        compute = _one_by_one if self.config.expert_loop == "scan" else _sorted_by_expert
        weights = tuple(each[...].astype(x_nd.dtype) for each in (self.gate, self.up, self.down))
        bend = ACTIVATIONS[self.config.activation]
        return compute(bend, weights, x_nd, shares_nk, chosen_nk).reshape(x_btd.shape)

    def route(self, x_nd: Float[Array, "n d"]) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
        """Return weight and index of the k experts of each token, largest weight first."""
        logits_ne = self.router(x_nd)
        shares_ne = jax.nn.softmax(logits_ne.astype(widened(logits_ne.dtype)), axis=-1)
        shares_nk, chosen_nk = jax.lax.top_k(shares_ne, self.experts.num_experts_per_token)
        if self.experts.normalize:
            shares_nk = shares_nk / shares_nk.sum(axis=-1, keepdims=True)
        return shares_nk, chosen_nk


def _one_by_one(bend, weights, x_nd, shares_nk, chosen_nk):
    def add_expert(total_nd, scanned):
        number, gate_df, up_df, down_fd = scanned
        share_n = jnp.where(chosen_nk == number, shares_nk, 0.0).sum(axis=-1)
        y_nd = (bend(x_nd @ gate_df) * (x_nd @ up_df)) @ down_fd
        return total_nd + share_n[:, None] * y_nd.astype(share_n.dtype), None

    numbers = jnp.arange(weights[0].shape[0], dtype=chosen_nk.dtype)
    start = jnp.zeros(x_nd.shape, shares_nk.dtype)
    total_nd, _ = jax.lax.scan(add_expert, start, (numbers, *weights))
    return total_nd.astype(x_nd.dtype)


def _sorted_by_expert(bend, weights, x_nd, shares_nk, chosen_nk):
    gate_edf, up_edf, down_efd = weights
    num_chosen = chosen_nk.shape[1]
    order = jnp.argsort(chosen_nk.reshape(-1))  # of (token, choice) pairs; stable
    tokens = order // num_chosen
    counts_e = jnp.bincount(chosen_nk.reshape(-1), length=gate_edf.shape[0])
    counts_e = counts_e.astype(jnp.int32)
    rows = x_nd[tokens]
    wide = bend(jax.lax.ragged_dot(rows, gate_edf, counts_e))
    wide = wide * jax.lax.ragged_dot(rows, up_edf, counts_e)
    y = jax.lax.ragged_dot(wide, down_efd, counts_e).astype(shares_nk.dtype)
    y = y * shares_nk.reshape(-1)[order][:, None]
    return jnp.zeros(x_nd.shape, y.dtype).at[tokens].add(y).astype(x_nd.dtype)
