"""Parts that all models share: norms, dropout, and token ids as indices of a table.

    RMSNorm (https://arxiv.org/abs/1910.07467):    y = scale x / sqrt(mean(x^2) + epsilon)
    LayerNorm (https://arxiv.org/abs/1607.06450):  y = scale (x - mean(x)) / sqrt(var(x) + epsilon)
                                                       + bias

Gemma stores `scale - 1`, so that weight decay pulls the scale towards 1. The norms compute in
float32 for any compute dtype. Dropout is a pure function of a key; without a key, as in evaluation,
it is off.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from .._sums import widened
from ._decoder_config import DecoderConfig


def dropout(
    x: Float[Array, "*dims"], rate: float, key: Key[Array, ""] | None
) -> Float[Array, "*dims"]:
    """Zero each number with probability `rate`, and scale the others so that the mean is kept.

    Without a key, or at rate 0, `x` is returned unchanged.
    """
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def split_key(key: Key[Array, ""] | None, num: int) -> list[Key[Array, ""] | None]:
    """Split a key into `num` independent keys; for None, return a list of `num` times None."""
    return [None] * num if key is None else list(jax.random.split(key, num))


def as_indices(
    ids: Int[Array, "b t"], mask: Bool[Array, "b t"] | None, vocabulary_size: int
) -> Int[Array, "b t"]:
    """Replace negative ids, which would index a table from its end.

    A negative id of a token becomes `vocabulary_size`. That is an index behind the table, for which
    `nnx.Embed` gives NaN, so that the mistake shows. A negative id of padding becomes 0.

    Args:
        ids: token ids.
        mask: False for padding, whose vectors must not be NaN, since attention multiplies them by
            0. None if there is no padding.
        vocabulary_size: rows of the table.
    """
    if ids.dtype.itemsize < 4:  # it may be too narrow for `vocabulary_size`
        ids = ids.astype(jnp.int32)
    instead = vocabulary_size if mask is None else jnp.where(mask, vocabulary_size, 0)
    return jnp.where(ids < 0, jnp.asarray(instead, ids.dtype), ids)


class RMSNorm(nnx.Module):
    """Scales vectors along the last dim to root mean square 1, then each number by a parameter."""

    def __init__(self, size: int, *, epsilon: float, offset: float = 0.0):
        self.epsilon = epsilon
        self.offset = offset  # added to the stored scale
        self.scale = nnx.Param(jnp.full(size, 1 - offset, jnp.float32))  # the factor 1 at first

    def __call__(self, x: Float[Array, "*dims d"]) -> Float[Array, "*dims d"]:
        wide = x.astype(widened(x.dtype))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = self.scale[...].astype(wide.dtype) + self.offset
        scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
        return (wide * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(x.dtype)


class ScaledLayerNorm(nnx.Module):
    """LayerNorm without a bias, of the last dimension of vectors or of heads.

    Args:
        shape: the scale's shape: `(size,)`, or `(heads, size)` if each head has its own scale.
        epsilon: added under the square root.
    """

    def __init__(self, *shape: int, epsilon: float):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(shape, jnp.float32))

    def __call__(self, x: Float[Array, "*dims d"]) -> Float[Array, "*dims d"]:
        wide = x.astype(widened(x.dtype))
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = self.scale[...].astype(wide.dtype)
        scale = scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
        return (wide * jax.lax.rsqrt(variance + self.epsilon) * scale).astype(x.dtype)


def make_layer_norm(
    size: int, *, epsilon: float, compute_dtype: str, bias: bool = True, rngs: nnx.Rngs
) -> nnx.LayerNorm:
    """Make a LayerNorm of vectors of `size` numbers, which returns `compute_dtype`."""
    # The fast variance, E[x^2] - E[x]^2, cancels where the mean is large: float32 results would
    # differ from those of torch.
    return nnx.LayerNorm(
        size,
        epsilon=epsilon,
        use_fast_variance=False,
        use_bias=bias,
        dtype=jnp.dtype(compute_dtype),
        rngs=rngs,
    )


def make_norm(config: DecoderConfig, size: int, rngs: nnx.Rngs) -> nnx.Module:
    """Make the norm that `config` asks for, of vectors of `size` numbers."""
    if config.norm == "layer":
        return make_layer_norm(
            size, epsilon=config.norm_epsilon, compute_dtype=config.compute_dtype, rngs=rngs
        )
    if config.norm == "layer_without_bias":
        return ScaledLayerNorm(size, epsilon=config.norm_epsilon)
    return RMSNorm(
        size, epsilon=config.norm_epsilon, offset=1.0 if config.norm == "rms_plus_one" else 0.0
    )
