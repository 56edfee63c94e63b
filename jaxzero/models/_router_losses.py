"""What keeps the experts of a layer equally busy: losses of its router, and corrected choices.

With f_e the choices of expert e for each token and P_e its mean probability, over the tokens of all
devices, and E experts:

    load balancing  E sum of f_e P_e               (Switch Transformers, arXiv 2101.03961)
    router z        mean of logsumexp(logits)^2    (ST-MoE, arXiv 2202.08906)
    correction      b_e + rate sign(mean of f - f_e)    (DeepSeek-V3, arXiv 2412.19437)

f and P are averaged before their product: the mean of products of devices is another loss, which
asks each device for balance by itself. Inside a step they are averaged over devices by one
all-reduce of 2 E numbers; in a step with micro-batches they are those of one micro-batch.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._mesh import AXES, program_axes
from ._parts import widened


def load_balancing_loss(
    logits_ne: Float[Array, "n e"],
    chosen_nk: Int[Array, "n k"],
    mask_n: Bool[Array, " n"] | None = None,
) -> Float[Array, ""]:
    """Compute the load-balancing loss of one router, over the tokens of all devices.

    It is `k` where all experts are chosen equally often, as in transformers. Add it to the loss,
    times a coefficient such as 0.01.

    Args:
        logits_ne: of the router, for this device's tokens.
        chosen_nk: the experts that each token chose.
        mask_n: False for padding, which does not count; None if there is none.
    """
    shares_ne = jax.nn.softmax(logits_ne.astype(widened(logits_ne.dtype)), axis=-1)
    chosen_ne = _counts(chosen_nk, logits_ne.shape[1]).astype(shares_ne.dtype)
    f_e, p_e = _mean_over_tokens(jnp.stack([chosen_ne, shares_ne]), mask_n)
    return len(f_e) * jnp.sum(jax.lax.stop_gradient(f_e) * p_e)


def router_z_loss(
    logits_ne: Float[Array, "n e"], mask_n: Bool[Array, " n"] | None = None
) -> Float[Array, ""]:
    """Compute the mean squared logarithm of the softmax's denominator, over all devices' tokens.

    It keeps logits small; a usual coefficient is 0.001. Arguments are those of
    `load_balancing_loss`.
    """
    total_n = jax.nn.logsumexp(logits_ne.astype(widened(logits_ne.dtype)), axis=-1)
    return _mean_over_tokens(total_n[None, :, None] ** 2, mask_n)[0, 0]


def corrected_choices(
    correction_e: Float[Array, " e"],
    chosen_nk: Int[Array, "n k"],
    rate: float = 0.001,
    mask_n: Bool[Array, " n"] | None = None,
) -> Float[Array, " e"]:
    """The next correction of a router by groups: up for experts that were chosen less than others.

    The correction is added to scores when experts are chosen, and has no gradient. Return it from
    the loss as `aux` and store it in the parameters after the update; mask it from the optimizer's
    weight decay. The other arguments are those of `load_balancing_loss`.
    """
    chosen_ne = _counts(chosen_nk, len(correction_e)).astype(correction_e.dtype)
    f_e = jax.lax.stop_gradient(_mean_over_tokens(chosen_ne[None], mask_n)[0])
    return correction_e + rate * jnp.sign(f_e.mean() - f_e)


def _counts(chosen_nk: Int[Array, "n k"], num_experts: int) -> Int[Array, "n e"]:
    return jax.nn.one_hot(chosen_nk, num_experts, dtype=jnp.int32).sum(axis=1)


def _mean_over_tokens(
    x_sne: Float[Array, "s n e"], mask_n: Bool[Array, " n"] | None
) -> Float[Array, "s e"]:
    """The mean over the tokens of all devices, inside a step, and otherwise of these."""
    weight_n = jnp.ones(x_sne.shape[1], x_sne.dtype)
    weight_n = weight_n if mask_n is None else mask_n.astype(x_sne.dtype)
    total = jnp.einsum("sne,n->se", x_sne, weight_n), weight_n.sum()
    with contextlib.suppress(NameError):  # outside of a step, which has no axes
        total = jax.lax.psum(total, program_axes(AXES))
    return total[0] / jnp.maximum(total[1], 1)
