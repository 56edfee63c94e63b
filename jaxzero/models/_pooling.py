"""Pool token vectors to one unit vector per text, as sentence-transformers does.

mean_pool(x, mask) = sum_t mask_t x_t / max(sum_t mask_t, 1)
normalize(v) = v / max(|v|, 1e-12)
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._wide import widened

_SMALLEST_NORM = 1e-12


def mean_pool(hidden: Float[Array, "b t d"], mask: Bool[Array, "b t"]) -> Float[Array, "b d"]:
    """Average the vectors of the tokens that are not padding, in float32 or wider.

    A row that is all padding gives zeros, not NaN: batches are filled up with such rows.
    """
    hidden = hidden.astype(widened(hidden.dtype))
    weights = mask.astype(hidden.dtype)
    total = jnp.einsum("btd,bt->bd", hidden, weights)
    return total / jnp.maximum(weights.sum(axis=1, keepdims=True), 1)


def normalize(vectors: Float[Array, "b d"]) -> Float[Array, "b d"]:
    """Scale each vector to length 1; the zero vector stays zero, with a finite gradient."""
    squared = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
    return vectors / jnp.sqrt(jnp.maximum(squared, _SMALLEST_NORM**2))
