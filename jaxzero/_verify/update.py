"""The update of the parameters, against optax on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .problem import on_host
from .report import Check
from .roundings import moved, shifted
from .samples import Samples, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """The update of the parameters by one step's gradients.

    Attributes:
        names: the names of the parameters.
        got: the new parameters that the step computed.
        function: takes lists of gradients and parameters, in full; returns the new parameters.
        gradients: the gradients of the step, in full.
        params: the parameters before the step, in full.
        grad_names: the names of the gradients, in their order.
        is_apart: whether another program than that of `gradients` computed `got`: its gradients may
            be rounded differently.
    """

    names: list[str]
    got: list[Any]
    function: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    gradients: list[Any]
    params: list[Any]
    grad_names: list[str]
    is_apart: bool


def check_update(update: Update, device: Any, bounds: dict[str, float]) -> list[Check]:
    """The new parameters against optax on one device, with the same gradients.

    Adam divides a gradient near zero by its own size, so that new parameters of two right gradients
    may differ by twice the learning rate. Of the same gradients they differ by roundings only. If
    gradients are rounded anew, they are moved within their bounds before the update.

    Args:
        update: the update.
        device: where optax runs.
        bounds: for each gradient, the bound of its norm.
    """
    moves = [
        bounds.get(name, 0.0) / max(np.size(x), 1) ** 0.5 if update.is_apart else 0.0
        for name, x in zip(update.grad_names, update.gradients, strict=True)
    ]
    grads, params = (
        [jax.device_put(np.asarray(x), device) for x in tree]
        for tree in (update.gradients, update.params)
    )
    want = on_host(jax.jit(update.function)(grads, params))

    def sample(grads: list[Any], params: list[Any], seed: Any) -> list[Any]:
        pairs = zip(grads, moves, strict=True)
        near = [shifted(x, jnp.float32(by), seed) if by else x for x, by in pairs]
        return moved(update.function, (near, params), seed, False)

    sampled = jax.jit(sample)
    samples = Samples.of(lambda seed: on_host(sampled(grads, params, seed)), want)
    return [
        checked(name, "update", x, y, samples.bounds(i))
        for i, (name, x, y) in enumerate(zip(update.names, update.got, want, strict=True))
    ]
