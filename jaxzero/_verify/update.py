"""Compare the parameters that a step has updated with those that optax updates on one device."""

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
    """The update that a step made, and what optax needs to compute it again.

    Attributes:
        names: the names of the parameters.
        got: the new parameters that the step computed.
        function: takes lists of full gradients and full parameters; returns the new parameters.
        gradients: the full gradients of the step.
        params: the full parameters before the step.
        grad_names: the names of `gradients`.
        is_apart: whether `got` and `gradients` come from different programs. Then the update may
            have read gradients that were rounded differently.
    """

    names: list[str]
    got: list[Any]
    function: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    gradients: list[Any]
    params: list[Any]
    grad_names: list[str]
    is_apart: bool


def check_update(update: Update, device: Any, bounds: dict[str, float]) -> list[Check]:
    """Compare the step's new parameters with those that optax computes from the same gradients.

    Adam divides a gradient near zero by its own size. So new parameters that are computed from two
    right gradients may differ by twice the learning rate. Those computed from equal gradients
    differ by roundings only. If the update may have read gradients that were rounded differently
    (`is_apart`), samples move the gradients within their bounds.

    Args:
        update: the step's update.
        device: the device that optax runs on.
        bounds: for each gradient by name, the bound of the norm of its error.
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
