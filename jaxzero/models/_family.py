"""Describe how a family of models writes its `config.json`, as a row of a table.

A `ConfigTable` lists which key holds which field of a config, the value of a key that a file leaves
out, which fields have the same value in all models of the family, and which keys may have one value
only. Parts that more than one key describes (rotation, windows, experts) are read by functions that
families share.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from .._checked_json import JsonKeys as Content
from .._checked_json import Kind
from ._config_json import check_only, config_keys, read_activation
from ._config_keys import COUNT
from ._config_parts import no_window, ordinary_heads
from ._part_configs import ExpertsConfig

Fields = Mapping[str, Any]  # of a config

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
# For families whose `num_key_value_heads` may not be null, which elsewhere means as many heads as
# `num_attention_heads`.
KEY_VALUE_HEADS = {"num_key_value_heads": COUNT}


def nothing_more(content: Content, fields: Fields) -> dict[str, Any]:
    """Return no fields: `ConfigTable.more` of a family that computes no further fields."""
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigTable:
    """A table of how one `model_type` writes its `config.json`, and what its models share."""

    usual: ClassVar[dict[str, Any]] = {}  # defaults of all families

    fixed: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # our field: its value in the family
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # our field: key of the file
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)  # key: value if left out
    sizes: dict[str, str] = dataclasses.field(default_factory=lambda: SIZES)  # field: required key
    required: dict[str, Any] = dataclasses.field(default_factory=dict)  # key: the only value
    kinds: dict[str, Kind] = dataclasses.field(default_factory=dict)  # key: kind, unlike `KEYS`
    activation: str = "hidden_act"  # key of the activation function
    more: Callable[[Content, Fields], dict[str, Any]] = nothing_more  # fields that are computed

    def read(
        self, content: Mapping[str, Any], path: Path, model: str
    ) -> tuple[Content, dict[str, Any]]:
        """Wrap a `config.json`, and return the fields of the config that the table describes.

        Args:
            content: the content of the file.
            path: where it is, for messages.
            model: the model that is described, for messages: "decoder", "encoder", or a name.

        Returns:
            The keys of the file, checked when they are read; and field -> value.

        Raises:
            ValueError: a size is missing, or a key has a value that the model does not compute.
        """
        keys = config_keys(
            content, path, defaults={**self.usual, **self.defaults}, kinds=self.kinds
        )
        for key, only in self.required.items():
            check_only(keys, key, only, model)
        keys.require(*self.sizes.values())
        fields: dict[str, Any] = {ours: keys[key] for ours, key in self.sizes.items()}
        fields |= {ours: keys[key] for ours, key in self.names.items()}
        fields |= self.fixed
        fields["activation"] = read_activation(keys, self.activation, model)
        return keys, fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family(ConfigTable):
    """The table of one `model_type` of decoders, with functions of `_config_parts` for parts."""

    usual = DEFAULTS

    windows: Callable[[Content, int], tuple[int, ...]] = no_window  # indices of their layers
    experts: Callable[[Content, int], ExpertsConfig | None] | None = None
    heads: Callable[[Content, Mapping[str, str]], dict[str, Any]] = ordinary_heads
    has_rope: bool = True
    base_key: str = "rope_theta"  # key of the base of rotary frequencies
    sliding_base_key: str | None = None  # key of the base for layers with a window
    part_key: str | None = None  # key of the fraction of a head that is rotated, if not all is
