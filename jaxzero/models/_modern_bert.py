"""ModernBERT (https://arxiv.org/abs/2412.13663) in Flax NNX.

    x = norm(word(ids))
    x = x + attention(norm(x))       the first layer has no norm here: x is normalised already
    x = x + down(gelu(gate(norm(x))) up(norm(x)))
    hidden = norm(x)

Positions enter through rotation of queries and keys alone. Every third layer attends to the whole
text; the others see a window around each token, and rotate with a frequency base of their own.
There are no token types and no pooler.

Dimensions: b batch, t tokens, d hidden.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from ._dropout import dropout, split_key
from ._encoder_parts import GatedPerceptron, PreNormLayer, SelfAttention, layer_norm
from ._layers import make_layers, run_layers
from ._modern_bert_config import ModernBertConfig
from ._per_layer import is_among, turns_if, window_if
from ._rope import turns
from ._token_ids import as_indices


class ModernBert(nnx.Module):
    """Token ids to one hidden vector per token.

    Build it under `nnx.eval_shape` when the parameters come from a checkpoint: then no random
    weights are ever made.
    """

    def __init__(self, config: ModernBertConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            config.vocabulary_size,
            config.hidden_size,
            dtype=jnp.dtype(config.compute_dtype),
            rngs=rngs,
        )
        self.embedding_norm = layer_norm(config, rngs, bias=config.norm_bias)
        # The layers of a stack are alike, so a stack begins with the second layer.
        self.first = _layer(config, 0, rngs) if config.scan_layers else None
        self.layers = make_layers(
            lambda rngs, i: _layer(config, i + self._num_before, rngs),
            config.num_layers - self._num_before,
            kind=lambda i: i + self._num_before == 0,
            scanned=config.scan_layers,
            rngs=rngs,
        )
        self.norm = layer_norm(config, rngs, bias=config.norm_bias)

    @property
    def _num_before(self) -> int:
        """Layers before those in `layers`."""
        return 1 if self.config.scan_layers else 0

    def __call__(
        self,
        ids: Int[Array, "b t"],
        mask: Bool[Array, "b t"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "b t d"]:
        """Encode a padded batch.

        Args:
            ids: token ids. Texts longer than `max_length` are computed, as in transformers, but
                the model was not trained on them. With an id that is not in the vocabulary, such
                as -1, vectors are NaN.
            mask: True for tokens, False for padding. No token attends to padding, so it does not
                change the vectors of the tokens; the vectors of padding are meaningless. None if
                there is no padding.
            dropout_key: turns dropout on, at the rates of the config. Give each device its own
                (`jz.fold_in_device`).
        """
        config = self.config
        embedding_key, layers_key = split_key(dropout_key, 2)
        ids = as_indices(ids, mask, config.vocabulary_size)
        x_btd = self.embedding_norm(self.embedding(ids))
        x_btd = dropout(x_btd, config.embedding_dropout, embedding_key)
        positions = jnp.arange(ids.shape[1])[None]
        whole_turns = turns(config.rope, positions)
        local_turns = turns(config.local_rope, positions)

        def step(layer: PreNormLayer, x_btd: Array, i: int | Array) -> Array:
            is_local = is_among(config.local_layers, i, config.num_layers)
            return layer(
                x_btd,
                mask,
                window=window_if(is_local, config.local_window, ids.shape[1]),
                turns=turns_if(is_local, local_turns, whole_turns),
                dropout_key=None if layers_key is None else jax.random.fold_in(layers_key, i),
            )

        def later_step(layer: PreNormLayer, x_btd: Array, i: int | Array) -> Array:
            return step(layer, x_btd, i + self._num_before)

        if self.first is not None:
            x_btd = run_layers(nnx.List([self.first]), step, x_btd, 1, config.remat)
        num_later = config.num_layers - self._num_before
        return self.norm(run_layers(self.layers, later_step, x_btd, num_later, config.remat))


def _layer(config: ModernBertConfig, number: int, rngs: nnx.Rngs) -> PreNormLayer:
    bias = config.norm_bias
    return PreNormLayer(
        attention_norm=None if number == 0 else layer_norm(config, rngs, bias=bias),
        attention=SelfAttention(
            config, bias=config.attention_bias, output_bias=config.attention_bias, rngs=rngs
        ),
        mlp_norm=layer_norm(config, rngs, bias=bias),
        mlp=GatedPerceptron(
            config, dropout_rate=config.mlp_dropout, bias=config.mlp_bias, rngs=rngs
        ),
        # One rate, as in transformers, for the probabilities and for what attention adds.
        attention_output_dropout=config.attention_dropout,
    )
