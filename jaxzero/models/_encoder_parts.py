"""Parts that encoders share: config fields, attention, perceptrons, layers and pooling."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from .._checked_json import JsonKeys
from .._sums import widened
from ._attention import Window, attend
from ._experts import ACTIVATIONS
from ._layers import Remat
from ._part_configs import check_choices, check_dropout, check_positive
from ._parts import dropout, make_layer_norm, split_key
from ._rope import Turns, rotate

_SMALLEST_NORM = 1e-12  # as in `torch.nn.functional.normalize`


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderBase:
    """The fields that configs of encoders share: sizes of the layers, and how they are computed.

    Parameters keep the dtype they are loaded in; `compute_dtype` is what they and the activations
    are cast to inside a layer. Softmax and normalisation statistics stay in float32.

    Args:
        hidden_size, intermediate_size, num_layers, num_heads: the model's sizes.
        activation: activation function of the perceptron, or of its gate.
        layer_norm_epsilon: added under the square root.
        attention_dropout: rate of the probabilities of attention; like all rates it is used when
            the encoder is called with a `dropout_key`.
        compute_dtype: dtype in which layers compute.
        scan_layers: hold the layers as one stack and scan it; False for a list of them.
        remat: what layers keep for the backward pass: everything ("none"), only what enters them
            ("full"), or what the policy of that name in `jax.checkpoint_policies` keeps.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "gelu"
    layer_norm_epsilon: float = 1e-12
    attention_dropout: float = 0.0
    compute_dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    scan_layers: bool = False
    remat: Remat = "none"

    def __post_init__(self):
        check_positive(self, or_zero=self._may_be_zero())
        check_choices(self)
        check_dropout(self)
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"`hidden_size` must be a multiple of `num_heads`; got {self.hidden_size} and "
                f"{self.num_heads}. Every head takes an equal slice of the hidden vector."
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    def _may_be_zero(self) -> tuple[str, ...]:
        """Return the names of the integer fields that may be 0."""
        return ()


def check_heads(keys: JsonKeys, size: str, heads: str) -> None:
    """Raise `ValueError` unless the heads divide the hidden size, and fit any `head_dim`.

    Args:
        keys: the `config.json`.
        size: key of the hidden size.
        heads: key of the number of heads.
    """
    if keys[size] % keys[heads]:
        raise keys.error(
            size, f"must be a multiple of `{heads}`; got {keys[size]} and {keys[heads]}"
        )
    head_size = keys[size] // keys[heads]
    if keys.get("head_dim") not in (None, head_size):
        raise keys.error(
            "head_dim", f"is {keys['head_dim']}, but the heads have {head_size} numbers each"
        )


class SelfAttention(nnx.Module):
    """Multi-head attention of all tokens to all tokens that are not padding."""

    def __init__(
        self,
        config: EncoderBase,
        *,
        bias: bool = True,
        output_bias: bool = True,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.query, self.key, self.value = (
            linear(config, config.hidden_size, config.hidden_size, rngs, bias=bias)
            for _ in range(3)
        )
        self.output = linear(config, config.hidden_size, config.hidden_size, rngs, bias=output_bias)

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        mask: Bool[Array, "b t"] | None,
        *,
        window: Window = None,
        turns: Turns | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "b t d"]:
        """Mix the tokens by attention, and project the result back to the hidden size.

        Args:
            x_btd: input of the layer.
            mask: True for tokens, False for padding; None if there is no padding.
            window: a token sees the tokens fewer than `window` positions away, on both sides; None
                for all.
            turns: rotary embedding of queries and keys, as cosines and sines; None for none.
            dropout_key: for dropout of the probabilities.
        """
        query_bthk, key_bthk, value_bthk = (
            project(x_btd).reshape(*x_btd.shape[:2], self.config.num_heads, self.config.head_size)
            for project in (self.query, self.key, self.value)
        )
        if turns is not None:
            query_bthk, key_bthk = rotate(query_bthk, turns), rotate(key_bthk, turns)
        mixed_bthk = attend(
            query_bthk,
            key_bthk,
            value_bthk,
            mask,
            is_causal=False,
            window=window,
            dropout_rate=self.config.attention_dropout,
            dropout_key=dropout_key,
        )
        return self.output(mixed_bthk.reshape(x_btd.shape))


class Perceptron(nnx.Module):
    """Projection, activation and projection back, with dropout of the result."""

    def __init__(self, config: EncoderBase, *, dropout_rate: float, rngs: nnx.Rngs):
        self.activation = config.activation
        self.dropout_rate = dropout_rate
        self.up = linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.down = linear(config, config.intermediate_size, config.hidden_size, rngs)

    def __call__(
        self, x_btd: Float[Array, "b t d"], *, dropout_key: Key[Array, ""] | None = None
    ) -> Float[Array, "b t d"]:
        added = self.down(ACTIVATIONS[self.activation](self.up(x_btd)))
        return dropout(added, self.dropout_rate, dropout_key)


class GatedPerceptron(nnx.Module):
    """A gated perceptron (https://arxiv.org/abs/2002.05202), with dropout before `down`."""

    def __init__(self, config: EncoderBase, *, dropout_rate: float, bias: bool, rngs: nnx.Rngs):
        hidden, wide = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.dropout_rate = dropout_rate
        self.gate = linear(config, hidden, wide, rngs, bias=bias)
        self.up = linear(config, hidden, wide, rngs, bias=bias)
        self.down = linear(config, wide, hidden, rngs, bias=bias)

    def __call__(
        self, x_btd: Float[Array, "b t d"], *, dropout_key: Key[Array, ""] | None = None
    ) -> Float[Array, "b t d"]:
        gated = ACTIVATIONS[self.activation](self.gate(x_btd)) * self.up(x_btd)
        return self.down(dropout(gated, self.dropout_rate, dropout_key))


class PreNormLayer(nnx.Module):
    """One layer whose two halves see a normalised input, each with a residual connection.

        x = x + attention(norm(x))
        x = x + mlp(norm(x))

    Args:
        attention_norm: None if attention sees `x` itself.
        attention: mixes the tokens.
        mlp_norm: norm of what `mlp` sees.
        mlp: a `Perceptron` or `GatedPerceptron`.
        attention_output_dropout: rate of what attention adds.
    """

    def __init__(
        self,
        *,
        attention_norm: nnx.LayerNorm | None,
        attention: SelfAttention,
        mlp_norm: nnx.LayerNorm,
        mlp: Perceptron | GatedPerceptron,
        attention_output_dropout: float,
    ):
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.attention_output_dropout = attention_output_dropout

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        mask: Bool[Array, "b t"] | None,
        *,
        window: Window = None,
        turns: Turns | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "b t d"]:
        """Apply the layer; the arguments are those of `SelfAttention`."""
        probabilities_key, attention_key, mlp_key = split_key(dropout_key, 3)
        seen = x_btd if self.attention_norm is None else self.attention_norm(x_btd)
        added = self.attention(
            seen, mask, window=window, turns=turns, dropout_key=probabilities_key
        )
        x_btd = x_btd + dropout(added, self.attention_output_dropout, attention_key)
        return x_btd + self.mlp(self.mlp_norm(x_btd), dropout_key=mlp_key)


def linear(
    config: EncoderBase, num_in: int, num_out: int, rngs: nnx.Rngs, *, bias: bool = True
) -> nnx.Linear:
    """Make a linear layer that computes in the compute dtype of `config`."""
    return nnx.Linear(
        num_in, num_out, use_bias=bias, dtype=jnp.dtype(config.compute_dtype), rngs=rngs
    )


def layer_norm(config: EncoderBase, rngs: nnx.Rngs, *, bias: bool = True) -> nnx.LayerNorm:
    """Make a LayerNorm of vectors of `hidden_size` numbers."""
    return make_layer_norm(
        config.hidden_size,
        epsilon=config.layer_norm_epsilon,
        compute_dtype=config.compute_dtype,
        bias=bias,
        rngs=rngs,
    )


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
