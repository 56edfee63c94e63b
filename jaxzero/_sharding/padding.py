"""Pad an array with zeros to its stored shape, and remove the padding."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .layout import DimSharding


def pad(x: Shaped[Array, ...], layout: DimSharding) -> Shaped[Array, ...]:
    """Append zeros to `layout.dim`, up to its stored size."""
    if not layout.is_padded:
        return x
    widths = [(0, 0)] * x.ndim
    widths[layout.dim] = (0, layout.padded - layout.size)
    return jnp.pad(x, widths)


def unpad(x: Shaped[Array, ...], layout: DimSharding) -> Shaped[Array, ...]:
    """Drop the zeros that `pad` appended."""
    return lax.slice_in_dim(x, 0, layout.size, axis=layout.dim) if layout.is_padded else x
