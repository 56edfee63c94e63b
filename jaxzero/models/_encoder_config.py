"""Configuration of an encoder, as a frozen dataclass that validates itself.

Field names are ours (spelled out, `num_` for counts). One table for each family maps the names of a
Hugging Face `config.json` to them; options that `Encoder` does not support raise an error.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._config_json import as_float, check_present, read_config
from ._encoder_base import EncoderBase

_BERT_SIZES = {
    "vocab_size": "vocabulary_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_length",
    "type_vocab_size": "num_token_types",
    "layer_norm_eps": "layer_norm_epsilon",
}
_DISTILBERT_SIZES = {
    "vocab_size": "vocabulary_size",
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_layers",
    "n_heads": "num_heads",
    "max_position_embeddings": "max_length",
}
# Keys that change what the model computes -> the only supported value, which is also the default.
_BERT_MEANING = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
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
        name = content.get("model_type")
        if name not in _FAMILIES:
            raise ValueError(
                f"`model_type` in {str(path)!r} is {name!r}; encoders are read of the families "
                f"{', '.join(sorted(_FAMILIES))}. Choose such a checkpoint, or load another "
                "model's weights into a model of your own."
            )
        family = _FAMILIES[name]
        check_present(content, set(family.sizes), path)
        family.check_meaning(content, path)
        fields = {ours: content[key] for key, ours in family.sizes.items()}
        fields |= {ours: as_float(content.get(key, 0.1)) for ours, key in family.dropout.items()}
        fields |= family.fixed
        if family.counts_from_padding:
            check_present(content, {"pad_token_id"}, path)
            fields["padding_id"] = content["pad_token_id"]
            fields["max_length"] -= content["pad_token_id"] + 1
        return cls(**(fields | changes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Family:
    sizes: Mapping[str, str]  # their key: our field
    dropout: Mapping[str, str]  # our field: their key
    meaning: Mapping[str, Any]  # their key: the only value
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # our field: its value
    counts_from_padding: bool = False

    def check_meaning(self, content: dict[str, Any], path: Path) -> None:
        for key, required in self.meaning.items():
            given = content.get(key, required)
            if given != required:
                raise ValueError(
                    f"`{key}` in {str(path)!r} must be {required!r}; got {given!r}. The encoder "
                    "computes nothing else; convert another checkpoint or write its model beside "
                    "`jaxzero.models.Encoder`."
                )


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
        meaning={"activation": "gelu"},
        fixed={
            "num_token_types": 0,
            "layer_norm_epsilon": 1e-12,
            "attention_output_dropout": 0.0,
        },
    ),
}
