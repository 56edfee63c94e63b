"""A BERT encoder (https://arxiv.org/abs/1810.04805) in Flax NNX.

Each layer is post-normalised, as in the original transformer:

    x = LayerNorm(x + attention(x))
    x = LayerNorm(x + down(gelu(up(x))))

with the exact (erf) GELU. There is no dropout (fine-tuning is short) and no pooler: nothing in
`jaxzero` reads its output, and `jaxzero.interop` carries its weights from the file it read to the
file it writes. Modules know nothing of devices; `jz.Zero` splits whatever parameters they hold.

Dimensions: b batch, t tokens, d hidden, h heads, k head size.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ._encoder_config import EncoderConfig


class Encoder(nnx.Module):
    """Token ids to one hidden vector per token.

    Build it under `nnx.eval_shape` when the parameters come from a checkpoint: then no random
    weights are ever made.

    Example:
        ```python
        graph, params = nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))
        params = zero.shard(interop.load_encoder(directory).params)
        hidden = nnx.merge(graph, params)(ids, mask)
        ```
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = Embeddings(config, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(
        self,
        ids: Int[Array, "b t"],
        mask: Bool[Array, "b t"],
        token_types: Int[Array, "b t"] | None = None,
    ) -> Float[Array, "b t d"]:
        """Encode a padded batch.

        Args:
            ids: token ids.
            mask: True for tokens, False for padding. Padding is attended by nothing, so it does not
                change the vectors of the tokens; its own vectors mean nothing.
            token_types: sentence number of each token in a pair; all 0 if left out.

        Raises:
            ValueError: there are more tokens than the model has position embeddings.
        """
        if ids.shape[1] > self.config.max_length:
            raise ValueError(
                f"`ids` holds {ids.shape[1]} tokens per row, the model has positions for "
                f"{self.config.max_length}. Truncate when tokenising."
            )
        x_btd = self.embeddings(ids, token_types)
        for layer in self.layers:
            x_btd = layer(x_btd, mask)
        return x_btd


class Embeddings(nnx.Module):
    """The normalised sum of a word, a position and a token-type vector."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        def table(num_rows: int) -> nnx.Embed:
            return nnx.Embed(num_rows, config.hidden_size, dtype=_dtype(config), rngs=rngs)

        self.word = table(config.vocabulary_size)
        self.position = table(config.max_length)
        self.token_type = table(config.num_token_types)
        self.norm = _layer_norm(config, rngs)

    def __call__(
        self, ids: Int[Array, "b t"], token_types: Int[Array, "b t"] | None
    ) -> Float[Array, "b t d"]:
        positions = jnp.arange(ids.shape[1])[None]
        if token_types is None:
            token_types = jnp.zeros((1, 1), ids.dtype)
        return self.norm(self.word(ids) + self.position(positions) + self.token_type(token_types))


class Layer(nnx.Module):
    """Self-attention and a two-layer perceptron, each followed by residual and LayerNorm."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.attention = SelfAttention(config, rngs=rngs)
        self.attention_norm = _layer_norm(config, rngs)
        self.up = _linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.down = _linear(config, config.intermediate_size, config.hidden_size, rngs)
        self.mlp_norm = _layer_norm(config, rngs)

    def __call__(
        self, x_btd: Float[Array, "b t d"], mask: Bool[Array, "b t"]
    ) -> Float[Array, "b t d"]:
        x_btd = self.attention_norm(x_btd + self.attention(x_btd, mask))
        hidden = jax.nn.gelu(self.up(x_btd), approximate=False)
        return self.mlp_norm(x_btd + self.down(hidden))


class SelfAttention(nnx.Module):
    """Multi-head attention of all tokens to all tokens that are not padding."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.head_shape = (config.num_heads, config.head_size)
        self.query, self.key, self.value, self.output = (
            _linear(config, config.hidden_size, config.hidden_size, rngs) for _ in range(4)
        )

    def __call__(
        self, x_btd: Float[Array, "b t d"], mask: Bool[Array, "b t"]
    ) -> Float[Array, "b t d"]:
        query_bthk, key_bthk, value_bthk = (
            project(x_btd).reshape(*x_btd.shape[:2], *self.head_shape)
            for project in (self.query, self.key, self.value)
        )
        mixed_bthk = jax.nn.dot_product_attention(
            query_bthk, key_bthk, value_bthk, mask=mask[:, None, None, :]
        )
        return self.output(mixed_bthk.reshape(x_btd.shape))


def _dtype(config: EncoderConfig) -> jnp.dtype:
    return jnp.dtype(config.compute_dtype)


def _linear(config: EncoderConfig, num_in: int, num_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(num_in, num_out, dtype=_dtype(config), rngs=rngs)


def _layer_norm(config: EncoderConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # The fast variance, E[x^2] - E[x]^2, loses digits that a float32 comparison would miss.
    return nnx.LayerNorm(
        config.hidden_size,
        epsilon=config.layer_norm_epsilon,
        use_fast_variance=False,
        dtype=_dtype(config),
        rngs=rngs,
    )
