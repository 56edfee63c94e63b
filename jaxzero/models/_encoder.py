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

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from .._checked_json import JsonKeys
from ._config_json import family_of, make_config, read_config
from ._encoder_parts import EncoderBase, SelfAttention, check_heads, layer_norm, linear
from ._experts import ACTIVATIONS
from ._family import SIZES, ConfigTable, Fields
from ._layers import make_layers, run_layers
from ._parts import as_indices, dropout, split_key


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(EncoderBase):
    """The config of a BERT encoder: its sizes, and how it is computed.

    The defaults are those of all-MiniLM-L6-v2. Parameters keep the dtype they are loaded in;
    `compute_dtype` is what they and the activations are cast to inside a layer. Softmax and
    normalisation statistics stay in float32.

    Args:
        vocabulary_size, hidden_size, intermediate_size, num_layers, num_heads: the model's sizes.
        max_length: longest text in tokens, including special tokens.
        num_token_types: kinds of sentences that have an embedding; 0 for no such embedding.
        activation: activation function of the perceptron.
        layer_norm_epsilon: added under the square root.
        padding_id: id of the padding token, if positions are counted from it on (RoBERTa); None if
            positions count from the first token of a row, whatever it is.
        embedding_dropout, attention_dropout, attention_output_dropout, mlp_dropout: rates, used
            when the encoder is called with a `dropout_key`.
        compute_dtype: dtype in which layers compute.
        scan_layers: hold the layers as one stack and scan it; False for a list of them.
        remat: what layers keep for the backward pass: everything ("none"), only what enters them
            ("full"), or what the policy of that name in `jax.checkpoint_policies` keeps.
    """

    vocabulary_size: int = 30522
    hidden_size: int = 384
    intermediate_size: int = 1536
    num_layers: int = 6
    num_heads: int = 12
    max_length: int = 512
    num_token_types: int = 2
    padding_id: int | None = None
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    attention_output_dropout: float = 0.1
    mlp_dropout: float = 0.1

    @property
    def num_positions(self) -> int:
        """Rows of the table of positions. RoBERTa's begins with `padding_id + 1` unused rows."""
        return self.max_length + (0 if self.padding_id is None else self.padding_id + 1)

    def _may_be_zero(self) -> tuple[str, ...]:
        return ("num_token_types", "padding_id")

    @classmethod
    def from_json(cls, path: Path | str, **changes: Any) -> "EncoderConfig":
        """Read a Hugging Face `config.json` (or the directory that holds one).

        Args:
            path: the file, or its directory.
            **changes: fields to set differently, e.g. `compute_dtype="bfloat16"`.

        Raises:
            ValueError: the file is missing, lacks a size, or describes a model that `Encoder` does
                not compute (another `model_type`, activation or kind of position embedding).
        """
        content, path = read_config(path)
        table = family_of(content, path, _FAMILIES, "encoders")
        keys, fields = table.read(content, path, "encoder")
        check_heads(keys, table.sizes["hidden_size"], table.sizes["num_heads"])
        return make_config(cls, fields | table.more(keys, fields) | changes, path)


def _positions_after_padding(keys: JsonKeys, fields: Fields) -> dict[str, Any]:
    """Return `padding_id` and `max_length` of RoBERTa, whose table begins with unused rows.

    The unused rows are those up to the row of the padding token.
    """
    keys.require("pad_token_id")
    padding_id = keys["pad_token_id"]
    max_length = fields["max_length"] - padding_id - 1
    if max_length < 1:
        raise keys.error(
            "max_position_embeddings",
            f"is {keys['max_position_embeddings']}, of which `pad_token_id` + 1 = "
            f"{padding_id + 1} are no positions; none is left",
        )
    return {"padding_id": padding_id, "max_length": max_length}


_BERT = ConfigTable(
    sizes=SIZES | {"num_token_types": "type_vocab_size", "layer_norm_epsilon": "layer_norm_eps"},
    names={
        "embedding_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "attention_output_dropout": "hidden_dropout_prob",
        "mlp_dropout": "hidden_dropout_prob",
    },
    defaults={
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    },
    required={
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "quantization_config": None,
    },
)
_ROBERTA = dataclasses.replace(_BERT, more=_positions_after_padding)
_FAMILIES: dict[str, ConfigTable] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": ConfigTable(
        sizes={
            "vocabulary_size": "vocab_size",
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
            "num_layers": "n_layers",
            "num_heads": "n_heads",
            "max_length": "max_position_embeddings",
        },
        names={
            "embedding_dropout": "dropout",
            "attention_dropout": "attention_dropout",
            "mlp_dropout": "dropout",
        },
        defaults={"activation": "gelu", "dropout": 0.1, "attention_dropout": 0.1},
        required={"quantization_config": None},
        activation="activation",
        fixed={
            "num_token_types": 0,
            "layer_norm_epsilon": 1e-12,
            "attention_output_dropout": 0.0,
        },
    ),
}


class Encoder(nnx.Module):
    """An encoder, which maps token ids to one hidden vector per token.

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
    """Computes the normalised sum of a word, a position and a token-type vector for each token."""

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
