"""Dropout as a pure function of a key; without a key, as in evaluation, it is off.

dropout(x) = x / (1 - rate) with probability 1 - rate, else 0
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def dropout(
    x: Float[Array, "*dims"], rate: float, key: Key[Array, ""] | None
) -> Float[Array, "*dims"]:
    """Zero each number with probability `rate` and scale the rest, so that the mean stays.

    Nothing happens without a key, or at rate 0.
    """
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def split_key(key: Key[Array, ""] | None, num: int) -> list[Key[Array, ""] | None]:
    """Split a key into `num` independent keys; return `num` times None for None."""
    return [None] * num if key is None else list(jax.random.split(key, num))
