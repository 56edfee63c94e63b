"""Ids of tokens as indices into the table of embeddings.

JAX reads a negative index from the end of an array, so that -100, which marks tokens without a
label, would be an ordinary word of a large vocabulary. An index behind the end gives NaN.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def as_indices(
    ids: Int[Array, "b t"], mask: Bool[Array, "b t"] | None, vocabulary_size: int
) -> Int[Array, "b t"]:
    """Replace negative ids, so that tokens with one get vectors of NaN, and padding ordinary ones.

    A token's id becomes `vocabulary_size`, an index behind the table; that of padding becomes 0.

    Args:
        ids: token ids.
        mask: False for padding, which must not be NaN: attention multiplies it by 0. None if there
            is none.
        vocabulary_size: rows of the table.
    """
    if ids.dtype.itemsize < 4:  # it may be too narrow for `vocabulary_size`
        ids = ids.astype(jnp.int32)
    instead = vocabulary_size if mask is None else jnp.where(mask, vocabulary_size, 0)
    return jnp.where(ids < 0, jnp.asarray(instead, ids.dtype), ids)
