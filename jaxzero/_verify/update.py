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
from .roundings import moved
from .samples import NUM_SAMPLES, Samples, checked, measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """The update of the parameters by one step's gradients.

    Attributes:
        names: of the parameters.
        got: the parameters that the step made.
        function: of lists of gradients and parameters, in full; the new parameters by optax.
        gradients: those of the step.
        params: the parameters before.
    """

    names: list[str]
    got: list[Any]
    function: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    gradients: list[Any]
    params: list[Any]


def check_update(update: Update) -> list[Check]:
    """The new parameters against optax on one device, with the same gradients.

    Adam divides a gradient near zero by its own size, so that new parameters of two right gradients
    may differ by twice the learning rate. Of the same gradients they differ by roundings only.
    """
    device = jax.local_devices()[0]
    grads, params = (
        [jax.device_put(np.asarray(x), device) for x in tree]
        for tree in (update.gradients, update.params)
    )
    want = on_host(jax.jit(update.function)(grads, params))
    sampled = jax.jit(
        lambda grads, params, seed: moved(update.function, (grads, params), seed, False)
    )
    drawn = []
    with jax.numpy_dtype_promotion("standard"):
        for seed in range(1, NUM_SAMPLES + 1):
            made = on_host(sampled(grads, params, jnp.uint32(seed)))
            drawn.append([measured(x, y) for x, y in zip(made, want, strict=True)])
    samples = Samples(np.array(drawn, np.float64).reshape(NUM_SAMPLES, len(want), 3))
    return [
        checked(name, "update", x, y, samples.bounds(i))
        for i, (name, x, y) in enumerate(zip(update.names, update.got, want, strict=True))
    ]
