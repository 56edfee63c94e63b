"""One layer of the decoder, in the two forms that families have.

    sequential:  x = x + s norm(attention(norm(x)));  x = x + s norm(mlp(norm(x)))
    parallel:    x = x + s attention(norm(x)) + s mlp(norm(x))

In the sequential form each norm is there where the config has one. In the parallel form attention
and the perceptron have a norm each, or share one. s is `residual_scale`.

Dimensions: b batch, t tokens, s keys, d hidden.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from ._attention import Attention, Window
from ._cache import Slots
from ._decoder_config import DecoderConfig
from ._dropout import dropout, split_key
from ._experts import Experts
from ._latent_attention import LatentAttention
from ._mlp import Mlp
from ._norms import make_norm
from ._rope import Turns


class Block(nnx.Module):
    """Attention, then a perceptron or experts, each with a residual connection."""

    def __init__(self, config: DecoderConfig, number: int, *, rngs: nnx.Rngs):
        self.config = config
        before = config.norm_placement in ("before", "both")
        after = config.norm_placement in ("after", "both")
        size = config.hidden_size
        self.attention_norm = make_norm(config, size, rngs) if before else None
        self.attention = _make_attention(config, rngs)
        self.attention_post_norm = make_norm(config, size, rngs) if after else None
        self.mlp_norm = make_norm(config, size, rngs) if before else None
        self.mlp = _make_mlp(config, number, rngs)
        self.mlp_post_norm = make_norm(config, size, rngs) if after else None

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        mask: Bool[Array, "b s"] | None,
        *,
        window: Window = None,
        turns: Turns | None = None,
        dropout_key: Key[Array, ""] | None = None,
        slots: Slots | None = None,
    ) -> Float[Array, "b t d"]:
        """Apply the layer; the arguments are those of `Attention`."""
        probabilities_key, attention_key, mlp_key = split_key(dropout_key, 3)
        rate = self.config.residual_dropout
        seen = _normalized(self.attention_norm, x_btd)
        added = self.attention(
            seen, mask, window=window, turns=turns, dropout_key=probabilities_key, slots=slots
        )
        added = _normalized(self.attention_post_norm, dropout(added, rate, attention_key))
        x_btd = x_btd + scaled(added, self.config.residual_scale)
        added = self.mlp(_normalized(self.mlp_norm, x_btd))
        added = _normalized(self.mlp_post_norm, dropout(added, rate, mlp_key))
        return x_btd + scaled(added, self.config.residual_scale)


class ParallelBlock(nnx.Module):
    """Attention and a perceptron of the same input, with one residual connection."""

    def __init__(self, config: DecoderConfig, number: int, *, rngs: nnx.Rngs):
        self.config = config
        size = config.hidden_size
        self.attention_norm = make_norm(config, size, rngs)
        self.attention = _make_attention(config, rngs)
        has_own = config.residual == "parallel"
        self.mlp_norm = make_norm(config, size, rngs) if has_own else None
        self.mlp = _make_mlp(config, number, rngs)

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        mask: Bool[Array, "b s"] | None,
        *,
        window: Window = None,
        turns: Turns | None = None,
        dropout_key: Key[Array, ""] | None = None,
        slots: Slots | None = None,
    ) -> Float[Array, "b t d"]:
        """Apply the layer; the arguments are those of `Attention`."""
        probabilities_key, attention_key, mlp_key = split_key(dropout_key, 3)
        rate = self.config.residual_dropout
        seen = self.attention_norm(x_btd)
        mixed = self.attention(
            seen, mask, window=window, turns=turns, dropout_key=probabilities_key, slots=slots
        )
        wide = self.mlp(seen if self.mlp_norm is None else self.mlp_norm(x_btd))
        added = dropout(mixed, rate, attention_key) + dropout(wide, rate, mlp_key)
        return x_btd + scaled(added, self.config.residual_scale)


def make_block(config: DecoderConfig, number: int, rngs: nnx.Rngs) -> Block | ParallelBlock:
    """Layer `number` in the form that `config` asks for."""
    make = Block if config.residual == "sequential" else ParallelBlock
    return make(config, number, rngs=rngs)


def scaled(x: Float[Array, "*dims"], factor: float) -> Float[Array, "*dims"]:
    """`x` times a factor rounded to its dtype; `x` itself for 1."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def _make_attention(config: DecoderConfig, rngs: nnx.Rngs) -> Any:
    if config.latent is None:
        return Attention(config, rngs=rngs)
    return LatentAttention(config, config.latent, rngs=rngs)


def _make_mlp(config: DecoderConfig, number: int, rngs: nnx.Rngs) -> Any:
    if config.experts is None or number in config.experts.dense_layers:
        return Mlp(config, config.intermediate_size, rngs=rngs)
    return Experts(config, config.experts, rngs=rngs)


def _normalized(norm: Any, x_btd: Array) -> Array:
    return x_btd if norm is None else norm(x_btd)
