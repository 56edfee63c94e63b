"""Configuration of an encoder, as a frozen dataclass that validates itself.

Field names are ours (spelled out, `num_` for counts). One table for each family maps the names of a
Hugging Face `config.json` to them; options that `Encoder` does not support raise an error.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._activations import read_activation
from ._config_json import check_only, config_keys, family_of, make_config, read_config
from ._encoder_base import EncoderBase, check_heads

_BERT_SIZES = {
    "vocabulary_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_length": "max_position_embeddings",
    "num_token_types": "type_vocab_size",
    "layer_norm_epsilon": "layer_norm_eps",
}
_DISTILBERT_SIZES = {
    "vocabulary_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_layers": "n_layers",
    "num_heads": "n_heads",
    "max_length": "max_position_embeddings",
}
# Keys that change what the model computes -> the only supported value, which is also the default.
_BERT_MEANING = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "quantization_config": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(EncoderBase):
    """Sizes of an encoder, and how it is computed.

    The defaults are those of all-MiniLM-L6-v2. Parameters keep the dtype they are loaded in;
    `compute_dtype` is what they and the activations are cast to inside a layer. Softmax and
    normalisation statistics stay in float32.

    Args:
        vocabulary_size, hidden_size, intermediate_size, num_layers, num_heads: the model's sizes.
        max_length: longest text in tokens, including special tokens.
        num_token_types: kinds of sentences that have an embedding; 0 for no such embedding.
        activation: activation function of the perceptron.
        layer_norm_epsilon: added under the square root.
        padding_id: token that has no position (RoBERTa); None if positions count from the first
            token of a row, whatever it is.
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
        """Rows of the table of positions: RoBERTa's first ones stand for padding."""
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
        family = family_of(content, path, _FAMILIES, "encoders")
        return make_config(cls, family.fields(content, path) | changes, path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Family:
    sizes: Mapping[str, str]  # our field: their key
    dropout: Mapping[str, str]  # our field: their key
    meaning: Mapping[str, Any]  # their key: the only value
    activation: str = "hidden_act"  # their key
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # our field: its value
    counts_from_padding: bool = False

    def fields(self, content: Mapping[str, Any], path: Path) -> dict[str, Any]:
        keys = config_keys(content, path)
        keys.require(*self.sizes.values())
        for key, only in self.meaning.items():
            check_only(keys, key, only, "encoder")
        fields = {ours: keys[key] for ours, key in self.sizes.items()}
        fields |= {ours: keys.get(key, 0.1) for ours, key in self.dropout.items()}
        fields |= self.fixed
        fields["activation"] = read_activation(keys, self.activation, "encoder", default="gelu")
        if self.counts_from_padding:
            keys.require("pad_token_id")
            fields["padding_id"] = keys["pad_token_id"]
            fields["max_length"] -= keys["pad_token_id"] + 1
            if fields["max_length"] < 1:
                raise keys.error(
                    "max_position_embeddings",
                    f"is {keys['max_position_embeddings']}, of which `pad_token_id` + 1 = "
                    f"{keys['pad_token_id'] + 1} are no positions; none is left",
                )
        check_heads(keys, self.sizes["hidden_size"], self.sizes["num_heads"])
        return fields


_BERT = _Family(
    sizes=_BERT_SIZES,
    dropout={
        "embedding_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "attention_output_dropout": "hidden_dropout_prob",
        "mlp_dropout": "hidden_dropout_prob",
    },
    meaning=_BERT_MEANING,
)
_ROBERTA = dataclasses.replace(_BERT, counts_from_padding=True)
_FAMILIES: dict[str, _Family] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": _Family(
        sizes=_DISTILBERT_SIZES,
        dropout={
            "embedding_dropout": "dropout",
            "attention_dropout": "attention_dropout",
            "mlp_dropout": "dropout",
        },
        meaning={"quantization_config": None},
        activation="activation",
        fixed={
            "num_token_types": 0,
            "layer_norm_epsilon": 1e-12,
            "attention_output_dropout": 0.0,
        },
    ),
}
