"""RMSNorm (https://arxiv.org/abs/1910.07467), in float32 for any compute dtype.

    y = scale x / sqrt(mean(x^2) + epsilon)

Gemma stores `scale - 1`, so that decay of weights pulls the scale towards 1.
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


def make_norm(config: DecoderConfig, size: int, rngs: nnx.Rngs) -> nnx.Module:
    """The norm that `config` asks for, of vectors of `size` numbers."""
    if config.norm == "layer":
        # The fast variance, E[x^2] - E[x]^2, loses digits that a float32 comparison would miss.
        return nnx.LayerNorm(
            size,
            epsilon=config.norm_epsilon,
            use_fast_variance=False,
            dtype=jnp.dtype(config.compute_dtype),
            rngs=rngs,
        )
    return RMSNorm(
        size, epsilon=config.norm_epsilon, offset=1.0 if config.norm == "rms_plus_one" else 0.0
    )
