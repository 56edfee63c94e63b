"""Run one round on one node: `every` local steps, during which each fragment is exchanged once.

    for each fragment:
        every / fragments - delay steps
        send the fragment
        delay steps, while the message travels
        apply the fragment

A barrier ties the message to the result of the `delay` steps. Without it XLA would wait for the
message where it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._mesh import split_if_explicit
from .exchange import Exchange, Outer


class Inner(NamedTuple):
    """The parameters of one node and the state of its own optimizer, as lists of arrays."""

    params: list[Array]
    opt_state: list[Array]


class Carry(NamedTuple):
    """The state of one node between rounds: its own training state, and the outer state."""

    inner: Inner
    outer: Outer


NodeStep = Callable[[Inner, Any], tuple[Inner, Any]]  # a step on a batch, and its metrics


def run_round(
    step: NodeStep, exchange: Exchange, numbers: Sequence[int], carry: Carry, batches: Any
) -> tuple[Carry, Any]:
    """Run a round on one node: local steps, and the exchange of every fragment.

    Args:
        step: runs one training step on a batch; returns the new `Inner` and metrics.
        exchange: the exchange of fragments.
        numbers: the indices in `Inner.params` of the exchanged leaves.
        carry: the state before the round.
        batches: the batches of all steps, a tree of arrays `[every, ...]`.

    Returns:
        The state after the round, and the metrics of all steps, a tree of arrays `[every, ...]`.
    """
    method = exchange.method
    before = method.steps_per_fragment - method.delay

    def turn(carry: Carry, xs: tuple[Array, Any]) -> tuple[Carry, Any]:
        number, batches = xs
        inner, outer = carry
        inner, first = lax.scan(step, inner, jax.tree.map(lambda x: x[:before], batches))
        sent, residuals = exchange.send([inner.params[i] for i in numbers], outer, number)
        outer = outer._replace(residuals=residuals)
        if method.delay:
            inner, last = lax.scan(step, inner, jax.tree.map(lambda x: x[before:], batches))
            first = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), first, last)
            # The receipt waits for the steps of the delay, which run while the message is sent.
            sent, inner = lax.optimization_barrier((sent, inner))
        params = list(inner.params)
        new, outer = exchange.receive(sent, [params[i] for i in numbers], outer, number)
        for i, x in zip(numbers, new, strict=True):
            # The exchange returns shards; at stages below 3 a step takes whole parameters.
            params[i] = split_if_explicit(x, jax.typeof(params[i]).sharding.spec)
        return Carry(Inner(params, inner.opt_state), outer), first

    turns = jnp.arange(method.fragments, dtype=jnp.int32)
    shape = (method.fragments, method.steps_per_fragment)
    batches = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batches)
    if method.fragments == 1:
        return turn(carry, (turns[0], jax.tree.map(lambda x: x[0], batches)))
    carry, metrics = lax.scan(turn, carry, (turns, batches))
    return carry, jax.tree.map(lambda x: x.reshape(method.every, *x.shape[2:]), metrics)
