"""The perceptron of a decoder layer, plain or gated (https://arxiv.org/abs/2002.05202).

    plain: down(f(up(x)))        gated: down(f(gate(x)) up(x))

Dimensions: b batch, t tokens, d hidden.
"""

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from ._attention import make_linear
from ._decoder_config import DecoderConfig

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class Mlp(nnx.Module):
    """Projection to `wide` numbers, activation and projection back, applied to each token."""

    def __init__(self, config: DecoderConfig, wide: int, *, rngs: nnx.Rngs):
        hidden, bias = config.hidden_size, config.mlp_bias
        self.activation = config.activation
        self.gate = make_linear(config, hidden, wide, bias, rngs) if config.gated_mlp else None
        self.up = make_linear(config, hidden, wide, bias, rngs)
        self.down = make_linear(config, wide, hidden, bias, rngs)

    def __call__(self, x_btd: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        bend = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.down(bend(self.up(x_btd)))
        return self.down(bend(self.gate(x_btd)) * self.up(x_btd))
