"""One layer of the decoder, in either of the two forms that families of models have.

    sequential:  x = x + s norm(attention(norm(x)));  x = x + s norm(mlp(norm(x)))
    parallel:    x = x + s attention(norm(x)) + s mlp(norm(x))

In the sequential form, each of the four norms can be left out by the config. In the parallel form
attention and the perceptron have a norm each, or share one. s is `residual_scale`.

Dimensions: b batch, t tokens, s keys, d hidden.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from ._attention import Attention, Mask, Window
from ._cache import Slots
from ._decoder_config import DecoderConfig
from ._experts import Experts, Mlp, Routers
from ._latent_attention import LatentAttention
from ._parts import dropout, make_norm, split_key
from ._rope import Turns


class Block(nnx.Module):
    """One layer: attention, and a perceptron or experts, in the form that the config asks for."""

    def __init__(self, config: DecoderConfig, number: int, *, rngs: nnx.Rngs):
        self.config = config

        def norm(is_there: bool) -> nnx.Module | None:
            return make_norm(config, config.hidden_size, rngs) if is_there else None

        before = config.norm_placement in ("before", "both")
        after = config.norm_placement in ("after", "both")
        self.attention_norm = norm(before)
        self.attention = _make_attention(config, rngs)
        self.attention_post_norm = norm(after)
        self.mlp_norm = norm(before and config.residual != "parallel_shared_norm")
        self.mlp = _make_mlp(config, number, rngs)
        self.mlp_post_norm = norm(after)

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        mask: Mask,
        *,
        window: Window = None,
        turns: Turns | None = None,
        dropout_key: Key[Array, ""] | None = None,
        slots: Slots | None = None,
        routers: Routers | None = None,
    ) -> Float[Array, "b t d"]:
        """Apply the layer; the arguments are those of `Attention`, plus `routers` of `Experts`."""
        probabilities_key, attention_key, mlp_key = split_key(dropout_key, 3)
        rate, scale = self.config.residual_dropout, self.config.residual_scale
        seen = _normalized(self.attention_norm, x_btd)
        mixed = self.attention(
            seen, mask, window=window, turns=turns, dropout_key=probabilities_key, slots=slots
        )
        if self.config.residual != "sequential":
            of_mlp = seen if self.mlp_norm is None else self.mlp_norm(x_btd)
            of_mlp = self._apply_mlp(of_mlp, routers)
            added = dropout(mixed, rate, attention_key) + dropout(of_mlp, rate, mlp_key)
            return x_btd + scaled(added, scale)
        added = _normalized(self.attention_post_norm, dropout(mixed, rate, attention_key))
        x_btd = x_btd + scaled(added, scale)
        added = self._apply_mlp(_normalized(self.mlp_norm, x_btd), routers)
        added = _normalized(self.mlp_post_norm, dropout(added, rate, mlp_key))
        return x_btd + scaled(added, scale)

    def _apply_mlp(self, x_btd: Float[Array, "b t d"], routers: Routers | None) -> Array:
        if isinstance(self.mlp, Experts):
            return self.mlp(x_btd, routers)
        return self.mlp(x_btd)


def scaled(x: Float[Array, "*dims"], factor: float) -> Float[Array, "*dims"]:
    """Return `x` times `factor`, rounded to the dtype of `x`; return `x` unchanged for factor 1."""
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
