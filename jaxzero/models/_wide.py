"""The dtype of what 8 significant bits are too few for: statistics, softmax, sums of many terms."""

import jax.numpy as jnp


def widened(dtype: jnp.dtype) -> jnp.dtype:
    """Float32 for 16-bit floats, else `dtype`."""
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype
