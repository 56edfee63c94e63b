"""A family of decoders as a row of a table: how it writes its `config.json`.

A `Family` lists which key holds which field of `DecoderConfig`, what a key means where the file is
silent, which parts the family always has, and which keys may have no other value. What needs more
than a name (rotation, windows, experts) is read by a function that the families share.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .._checked_json import JsonKeys as Content
from .._checked_json import Kind
from ._config_keys import COUNT
from ._config_parts import no_window, ordinary_heads
from ._experts_config import ExpertsConfig

Fields = Mapping[str, Any]  # of `DecoderConfig`

SIZES = {
    "vocabulary_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_length": "max_position_embeddings",
}
PARTS = {
    "norm_epsilon": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
    "attention_dropout": "attention_dropout",
    "initializer_range": "initializer_range",
}
DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
}
ATTENTION_BIAS = {
    "query_key_value_bias": "attention_bias",
    "attention_output_bias": "attention_bias",
}
KEY_VALUE_HEADS = {"num_key_value_heads": COUNT}  # elsewhere null is `num_attention_heads`


def nothing_more(content: Content, fields: Fields) -> dict[str, Any]:
    """The family has no fields that must be computed."""
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one `model_type` is written, and what all models of it have in common."""

    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)  # our field: its value
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # our field: their key
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)  # their key: its value
    sizes: dict[str, str] = dataclasses.field(default_factory=lambda: SIZES)
    required: dict[str, Any] = dataclasses.field(default_factory=dict)  # their key: only value
    kinds: dict[str, Kind] = dataclasses.field(default_factory=dict)  # where `KEYS` differs
    activation: str = "hidden_act"
    windows: Callable[[Content, int], tuple[int, ...]] = no_window
    experts: Callable[[Content, int], ExpertsConfig | None] | None = None
    heads: Callable[[Content, Mapping[str, str]], dict[str, Any]] = ordinary_heads
    has_rope: bool = True
    base_key: str = "rope_theta"
    sliding_base_key: str | None = None  # of the base of layers with a window, if they differ
    part_key: str | None = None  # of the rotated part of a head, if there may be one
    more: Callable[[Content, Fields], dict[str, Any]] = nothing_more  # fields that are computed
