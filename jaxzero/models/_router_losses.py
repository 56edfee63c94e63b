"""Keep the experts of a layer equally busy: losses for its router, and a correction of its choices.

Let f_e be the mean number of times that a token chooses expert e, and P_e the mean probability of
expert e, over the tokens of all devices; and E the number of experts:

    load balancing  E sum of f_e P_e                    (Switch Transformers, arXiv 2101.03961)
    router z        mean of logsumexp(logits)^2         (ST-MoE, arXiv 2202.08906)
    correction      b_e + rate sign(mean of f - f_e)    (DeepSeek-V3, arXiv 2412.19437)

f and P are averaged over devices before they are multiplied: the mean of the devices' products is
another loss, which asks for balance on each device alone. Inside a step one all-reduce of 2 E + 2
numbers does this. In a step with micro-batches, f and P are those of one micro-batch.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._mesh import AXES, program_axes
from .._sums import widened


class RouterBalance(NamedTuple):
    """Measurements of how evenly a router chooses experts.

    From a `Decoder`, the arrays have a leading dim for layers.

    Attributes:
        load_balancing: the load-balancing loss; it is k, the number of experts per token, if all
            experts are chosen equally often. Its gradient goes through the probabilities, not
            through the counts, as in transformers.
        z: the router z-loss.
        loads: `[e]`, how often a token chooses each expert, on average; without a gradient.
    """

    load_balancing: Float[Array, "*layers"]
    z: Float[Array, "*layers"]
    loads: Float[Array, "*layers e"]


def router_balance(
    logits: Float[Array, "n e"],
    chosen: Int[Array, "n k"],
    mask: Bool[Array, " n"] | None = None,
    *,
    sigmoids: bool = False,
) -> RouterBalance:
    """Compute the balance of a router, over the tokens of all devices.

    Add its two losses to the loss, times coefficients such as 0.01 and 0.001.

    Args:
        logits: `[n, e]`, of the router, for this device's tokens.
        chosen: `[n, k]`, the experts that each token chose.
        mask: `[n]`, False for padding, which does not count; None if there is none.
        sigmoids: whether probabilities are the sigmoids of logits, scaled to a sum of 1; by default
            they are the softmax.
    """
    num_experts = logits.shape[1]
    logits_ne = logits.astype(widened(logits.dtype))
    # The softmax of logarithms of sigmoids is the sigmoids divided by their sum.
    scores_ne = jax.nn.log_sigmoid(logits_ne) if sigmoids else logits_ne
    shares_ne = jax.nn.softmax(scores_ne, axis=-1)
    chosen_ne = jax.nn.one_hot(chosen, num_experts, dtype=logits_ne.dtype).sum(axis=1)
    squares_n1 = jax.nn.logsumexp(logits_ne, axis=-1, keepdims=True) ** 2
    ones_n1 = jnp.ones_like(squares_n1)
    # In one array, so that one collective sums all of it.
    columns = jnp.concatenate([chosen_ne, shares_ne, squares_n1, ones_n1], axis=1)
    if mask is not None:
        columns = jnp.where(mask[:, None], columns, 0)
    sums = columns.sum(axis=0)
    with contextlib.suppress(NameError):  # outside of a step, which has no axes
        sums = jax.lax.psum(sums, program_axes(AXES))
    means = sums[:-1] / jnp.maximum(sums[-1], 1)
    loads_e = jax.lax.stop_gradient(means[:num_experts])
    loss = num_experts * jnp.sum(loads_e * means[num_experts:-1])
    return RouterBalance(loss, means[-1], loads_e)


def next_correction(
    correction: Float[Array, "*layers e"], loads: Float[Array, "*layers e"], rate: float = 0.001
) -> Float[Array, "*layers e"]:
    """Return a router's next correction: larger for experts that are chosen less than the mean.

    The correction is added to the scores by which experts are chosen, and has no gradient. Return
    `loads` from the loss as `aux`, and store the correction in the parameters after the optimizer's
    update; exclude it from weight decay.

    Args:
        correction: the router's correction in this step.
        loads: the loads in this step, from `router_balance`.
        rate: by how much it changes.
    """
    difference = loads.mean(axis=-1, keepdims=True) - loads
    return correction + (rate * jnp.sign(difference)).astype(correction.dtype)
