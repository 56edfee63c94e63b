"""Configuration of a ModernBERT, as a frozen dataclass that validates itself."""

import dataclasses
from pathlib import Path
from typing import Any

from .._checked_json import JsonKeys, shown
from ._activations import read_activation
from ._config_json import (
    CHOOSE_ANOTHER,
    check_only,
    config_keys,
    make_config,
    read_config,
    windowed_layers,
)
from ._encoder_base import EncoderBase, check_heads
from ._rope import Rope

_FIELDS = {
    "vocabulary_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_length": "max_position_embeddings",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "norm_bias": "norm_bias",
    "layer_norm_epsilon": "norm_eps",
    "attention_dropout": "attention_dropout",
    "embedding_dropout": "embedding_dropout",
    "mlp_dropout": "mlp_dropout",
}
_DEFAULTS = {
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "norm_eps": 1e-5,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "mlp_dropout": 0.0,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBertConfig(EncoderBase):
    """Sizes and parts of a ModernBERT, and how it is computed.

    The defaults of the parts are those of ModernBERT-base. Fields that all encoders share are those
    of `EncoderConfig`.

    Args:
        vocabulary_size: rows of the word embeddings.
        max_length: longest text that the model was trained on, in tokens; not a limit.
        rope: rotation of queries and keys in layers that attend to the whole text.
        local_rope: rotation in the layers with a window.
        local_layers: indices of the layers with a window.
        local_window: in these layers a token sees those that are fewer than `local_window`
            positions away, on both sides: half of `local_attention` in `config.json`, and 1.
        attention_bias, mlp_bias, norm_bias: True if these projections and norms have a bias.
        embedding_dropout, mlp_dropout: rates of what enters the first layer, and of what enters the
            last projection of each perceptron. `attention_dropout` is also the rate of what
            attention adds.
        scan_layers: hold the layers but the first as one stack, `layers`, and scan it; the first,
            which has one norm fewer, is `first`. False for a list of all layers.
    """

    vocabulary_size: int
    max_length: int = 8192
    rope: Rope
    local_rope: Rope
    local_layers: tuple[int, ...] = ()
    local_window: int = 65
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    layer_norm_epsilon: float = 1e-5
    embedding_dropout: float = 0.0
    mlp_dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("rope", "local_rope"):
            given = getattr(self, name).rotary_size
            if given != self.head_size:
                raise ValueError(
                    f"`rotary_size` of `{name}` must be {self.head_size}, the width of a head; got "
                    f"{given}. ModernBERT rotates whole heads."
                )
        if self.scan_layers and self.num_layers == 1:
            raise ValueError(
                "`scan_layers` stacks the layers after the first; with `num_layers` 1 "
                "there are none. Set it to False."
            )

    @classmethod
    def from_json(cls, path: Path | str, **changes: Any) -> "ModernBertConfig":
        """Read a Hugging Face `config.json` (or the directory that holds one).

        Files of transformers 4 and 5 are read.

        Args:
            path: the file, or its directory.
            **changes: fields to set differently, e.g. `compute_dtype="bfloat16"`.

        Raises:
            ValueError: the file is missing, lacks a size, or describes a model that `ModernBert`
                does not compute (another `model_type`, activation or scaling of positions).
        """
        content, path = read_config(path)
        keys = config_keys(content, path, defaults=_DEFAULTS)
        for key, only in (("model_type", "modernbert"), ("quantization_config", None)):
            check_only(keys, key, only, "ModernBERT")
        keys.require(*_FIELDS.values())
        check_heads(keys, "hidden_size", "num_attention_heads")
        fields = {ours: keys[key] for ours, key in _FIELDS.items()}
        fields["activation"] = read_activation(keys, "hidden_activation", "ModernBERT")
        fields["rope"] = _read_rope(keys, "full_attention", "global_rope_theta")
        fields["local_rope"] = _read_rope(keys, "sliding_attention", "local_rope_theta")
        fields["local_layers"] = _read_local_layers(keys)
        half = keys["local_attention"] // 2
        if "sliding_window" in keys and keys["sliding_window"] != half:
            raise keys.error(
                "sliding_window",
                f"is {shown(keys['sliding_window'])}, but half of `local_attention` is {half}; "
                "transformers takes the first, and it is `local_attention` that is trained",
            )
        fields["local_window"] = half + 1  # both sides are `local_attention`; a token sees itself
        return make_config(cls, fields | changes, path)


def _read_local_layers(keys: JsonKeys) -> tuple[int, ...]:
    num_layers = keys["num_hidden_layers"]
    layers = windowed_layers(keys, num_layers, "ModernBERT")
    if layers is not None:
        return layers
    every = keys["global_attn_every_n_layers"]
    return tuple(i for i in range(num_layers) if i % every)


def _read_rope(keys: JsonKeys, kind: str, base: str) -> Rope:
    """The rotation of one kind of layer; transformers 4 kept its base as a key of its own."""
    if keys.section("rope_scaling"):
        raise keys.error(
            "rope_scaling", "scales positions, which ModernBERT does not", remedy=CHOOSE_ANOTHER
        )
    both = keys.section("rope_parameters")
    for key in ("rope_theta", "rope_type"):
        if key in both:
            raise both.error(key, "must be given for each kind of layer, in an object of its own")
    given = both.section(kind)
    check_only(given, "rope_type", "default", "ModernBERT")
    head_size = keys["hidden_size"] // keys["num_attention_heads"]
    if head_size % 2:
        raise keys.error(
            "hidden_size",
            f"makes heads of {head_size} numbers; it must be an even number, as they rotate in "
            "pairs",
        )
    return Rope(rotary_size=head_size, base=given.get("rope_theta", keys[base]))
