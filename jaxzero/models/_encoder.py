"""BERT encoders (https://arxiv.org/abs/1810.04805), also RoBERTa and DistilBERT, in Flax NNX.

Each layer is post-normalised, as in the original transformer:

    x = LayerNorm(x + attention(x))
    x = LayerNorm(x + down(f(up(x))))

where f is the `activation` of the config, the exact (erf) GELU in most models. RoBERTa counts
positions from its padding token on, DistilBERT has no token types; MiniLM is a small BERT. There is
no pooler: nothing in `jaxzero` uses its output, and `jaxzero.interop` copies its weights from the
source file when exporting. Modules are independent of devices; `jz.Zero` shards their parameters.
They hold no random state: dropout is on when a call gets a key.

Dimensions: b batch, t tokens, d hidden, h heads, k head size.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from ._dropout import dropout, split_key
from ._encoder_config import EncoderConfig
from ._encoder_parts import SelfAttention, layer_norm, linear
from ._layers import make_layers, run_layers
from ._mlp import ACTIVATIONS
from ._token_ids import as_indices


class Encoder(nnx.Module):
    """Token ids to one hidden vector per token.

    Build it under `nnx.eval_shape` when the parameters come from a checkpoint: then no random
    weights are ever made.

    Example:
        ```python
        graph, params = nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))
        params = zero.shard(interop.load_encoder(directory, dtype="float32").params)
        hidden = nnx.merge(graph, params)(ids, mask)
        ```
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = Embeddings(config, rngs=rngs)
        self.layers = make_layers(
            lambda rngs, _: Layer(config, rngs=rngs),
            config.num_layers,
            kind=lambda _: None,
            scanned=config.scan_layers,
            rngs=rngs,
        )

    def __call__(
        self,
        ids: Int[Array, "b t"],
        mask: Bool[Array, "b t"],
        token_types: Int[Array, "b t"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "b t d"]:
        """Encode a padded batch.

        Args:
            ids: token ids. With one that is not in the vocabulary, such as -1, vectors are NaN.
            mask: True for tokens, False for padding. No token attends to padding, so it does not
                change the vectors of the tokens; the vectors of padding are meaningless.
            token_types: sentence number of each token in a pair; all 0 if left out. Ignored by a
                model without token types.
            dropout_key: turns dropout on, at the rates of the config. Give each device its own
                (`jz.fold_in_device`).

        Raises:
            ValueError: there are more tokens than the model has position embeddings.
        """
        if ids.shape[1] > self.config.max_length:
            raise ValueError(
                f"`ids` holds {ids.shape[1]} tokens per row, the model has positions for "
                f"{self.config.max_length}. Truncate when tokenising."
            )
        embedding_key, layers_key = split_key(dropout_key, 2)
        ids = as_indices(ids, mask, self.config.vocabulary_size)
        x_btd = self.embeddings(ids, token_types)
        x_btd = dropout(x_btd, self.config.embedding_dropout, embedding_key)

        def step(layer: Layer, x_btd: Array, i: int | Array) -> Array:
            key = None if layers_key is None else jax.random.fold_in(layers_key, i)
            return layer(x_btd, mask, dropout_key=key)

        return run_layers(self.layers, step, x_btd, self.config.num_layers, self.config.remat)


class Embeddings(nnx.Module):
    """The normalised sum of a word, a position and a token-type vector."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        def table(num_rows: int) -> nnx.Embed:
            return nnx.Embed(
                num_rows, config.hidden_size, dtype=jnp.dtype(config.compute_dtype), rngs=rngs
            )

        self.padding_id = config.padding_id
        self.word = table(config.vocabulary_size)
        self.position = table(config.num_positions)
        self.token_type = table(config.num_token_types) if config.num_token_types else None
        self.norm = layer_norm(config, rngs)

    def __call__(
        self, ids: Int[Array, "b t"], token_types: Int[Array, "b t"] | None
    ) -> Float[Array, "b t d"]:
        x_btd = self.word(ids) + self.position(self._positions(ids))
        if self.token_type is not None:
            if token_types is None:
                token_types = jnp.zeros((1, 1), ids.dtype)
            x_btd = x_btd + self.token_type(token_types)
        return self.norm(x_btd)

    def _positions(self, ids: Int[Array, "b t"]) -> Int[Array, "_ t"]:
        if self.padding_id is None:
            return jnp.arange(ids.shape[1])[None]
        is_token = (ids != self.padding_id).astype(jnp.int32)
        return jnp.cumsum(is_token, axis=1) * is_token + self.padding_id


class Layer(nnx.Module):
    """Self-attention and a two-layer perceptron, each followed by residual and LayerNorm."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.attention = SelfAttention(config, rngs=rngs)
        self.attention_norm = layer_norm(config, rngs)
        self.up = linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.down = linear(config, config.intermediate_size, config.hidden_size, rngs)
        self.mlp_norm = layer_norm(config, rngs)

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        mask: Bool[Array, "b t"],
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "b t d"]:
        config = self.config
        probabilities_key, attention_key, mlp_key = split_key(dropout_key, 3)
        added = self.attention(x_btd, mask, dropout_key=probabilities_key)
        added = dropout(added, config.attention_output_dropout, attention_key)
        x_btd = self.attention_norm(x_btd + added)
        added = self.down(ACTIVATIONS[config.activation](self.up(x_btd)))
        return self.mlp_norm(x_btd + dropout(added, config.mlp_dropout, mlp_key))
