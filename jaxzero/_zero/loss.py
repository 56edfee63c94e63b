"""Split and check what a loss function returns: a loss or `(sum, weight)`, perhaps with `aux`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array


def split_aux(output: Any, has_aux: bool) -> tuple[Any, Any]:
    """Split what the function returned into `(loss, aux)`; `aux` is None without `has_aux`."""
    if not has_aux:
        return output, None
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        raise ValueError(
            "With `has_aux=True` the function must return `(loss, aux)`; got "
            f"{type(output).__name__}."
        )
    return output[0], output[1]


def split_weight(value: Any, weighted: bool) -> tuple[Any, Array | None]:
    """Split a loss into `(sum of losses, sum of weights)`; the second is None without `weighted`.

    The weight gets no gradient: the mean's derivative treats it as constant. For a derivative of
    the mean's derivative see `constant_weight`.
    """
    if not weighted:
        return value, None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(
            "With `weighted=True` the function must return `(sum, weight)` as its loss, such as "
            f"the summed loss and the number of tokens; got {type(value).__name__}."
        )
    total, weight = value[0], jnp.asarray(value[1])
    if weight.shape or jnp.iscomplexobj(weight):
        raise ValueError(
            "With `weighted=True` the weight must be a real scalar; got "
            f"{weight.dtype}{list(weight.shape)}. Sum it over the examples."
        )
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        weight = weight.astype(jnp.float32)
    return total, weight


@jax.custom_jvp
def constant_weight(weight: Array) -> Array:
    """The same weight; a tangent of it raises `NotImplementedError`."""
    return weight


@functools.partial(constant_weight.defjvp, symbolic_zeros=True)
def _refuse_tangents(weights: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Any]:
    if isinstance(tangents[0], SymbolicZero):
        return weights[0], tangents[0]
    raise NotImplementedError(
        "`jax.jvp` differentiates with respect to what the weight of `weighted=True` is computed "
        "from. If it is to be constant there, return it through `jax.lax.stop_gradient`; otherwise "
        "return both sums as `aux`, reduced by 'sum', and divide outside."
    )


def check_loss(value: Any) -> None:
    """Raise `ValueError` unless the loss is a real floating-point scalar."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, float)):
        shown = type(value).__name__
        hint = "If it also returns other things, pass `has_aux=True`."
    elif jnp.shape(value) != ():
        shown = f"{jnp.result_type(value)}{list(jnp.shape(value))}"
        hint = "Take the mean over the examples."
    elif not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        shown = str(jnp.result_type(value))
        hint = "Take the real part, or cast."
    else:
        return
    raise ValueError(f"The loss must be a real floating-point scalar; got {shown}. {hint}")
