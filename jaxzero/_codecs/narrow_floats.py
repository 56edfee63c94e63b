"""Floats of 8 and 16 bits as unsigned integers of as many bits, and back.

Backends widen narrow floats in transit, and XLA would move a cast across a collective; integers
travel unchanged.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Shaped

_BITS = {8: jnp.uint8, 16: jnp.uint16}


def is_narrow_float(dtype: DTypeLike) -> bool:
    """Whether `dtype` is a float of 8 or 16 bits, which some backends widen on the wire."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2


def bits_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype that `to_bits` gives an array of type `dtype`."""
    return jnp.dtype(_BITS[8 * jnp.dtype(dtype).itemsize] if is_narrow_float(dtype) else dtype)


def to_bits(x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """View a narrow float as unsigned integers, so that no backend widens it in transit."""
    if not is_narrow_float(x.dtype):
        return x
    return lax.bitcast_convert_type(x, bits_dtype(x.dtype))


def from_bits(x: Shaped[Array, ...], dtype: DTypeLike) -> Shaped[Array, ...]:
    """View the integers of `to_bits` as the narrow float `dtype` again; others are unchanged."""
    if not is_narrow_float(dtype) or x.dtype == dtype:
        return x
    return lax.bitcast_convert_type(x, dtype)
