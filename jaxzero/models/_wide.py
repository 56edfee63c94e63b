"""The dtype for statistics, softmax and long sums, where 8 significant bits are too few."""

import jax.numpy as jnp


def widened(dtype: jnp.dtype) -> jnp.dtype:
    """Float32 for 16-bit floats, else `dtype`."""
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype
