"""RMSNorm (https://arxiv.org/abs/1910.07467) and LayerNorm (https://arxiv.org/abs/1607.06450).

    RMSNorm:    y = scale x / sqrt(mean(x^2) + epsilon)
    LayerNorm:  y = scale (x - mean(x)) / sqrt(var(x) + epsilon) + bias

Gemma stores `scale - 1`, so that decay of weights pulls the scale towards 1. The modules here
compute in float32 for any compute dtype.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ._decoder_config import DecoderConfig
from ._wide import widened


class RMSNorm(nnx.Module):
    """Bring the last dimension to root mean square 1, then scale each number of it."""

    def __init__(self, size: int, *, epsilon: float, offset: float = 0.0):
        self.epsilon = epsilon
        self.offset = offset  # added to the stored scale
        self.scale = nnx.Param(jnp.full(size, 1 - offset, jnp.float32))

    def __call__(self, x: Float[Array, "*dims d"]) -> Float[Array, "*dims d"]:
        wide = x.astype(widened(x.dtype))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = self.scale[...].astype(wide.dtype) + self.offset
        scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
        return (wide * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(x.dtype)


class ScaledLayerNorm(nnx.Module):
    """LayerNorm without a bias, of the last dimension of vectors or of heads.

    Args:
        shape: of the scale: `(size,)`, or `(heads, size)` if each head has a scale of its own.
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
    """A LayerNorm of vectors of `size` numbers, which returns `compute_dtype`."""
    # The fast variance, E[x^2] - E[x]^2, loses digits that a float32 comparison would miss.
    return nnx.LayerNorm(
        size,
        epsilon=epsilon,
        use_fast_variance=False,
        use_bias=bias,
        dtype=jnp.dtype(compute_dtype),
        rngs=rngs,
    )


def make_norm(config: DecoderConfig, size: int, rngs: nnx.Rngs) -> nnx.Module:
    """The norm that `config` asks for, of vectors of `size` numbers."""
    if config.norm == "layer":
        return make_layer_norm(
            size, epsilon=config.norm_epsilon, compute_dtype=config.compute_dtype, rngs=rngs
        )
    if config.norm == "layer_without_bias":
        return ScaledLayerNorm(size, epsilon=config.norm_epsilon)
    return RMSNorm(
        size, epsilon=config.norm_epsilon, offset=1.0 if config.norm == "rms_plus_one" else 0.0
    )
