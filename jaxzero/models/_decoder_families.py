"""How each family of decoders writes its `config.json`, as tables.

A `Family` lists which key holds which field of `DecoderConfig`, what a key means where the file is
silent, which parts the family always has, and which keys may have no other value. What needs more
than a name (rotation, windows, experts) is read by a function that the families share. Files of
transformers 4 and 5 differ in where they keep rotation and the number of experts: both are read.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._checked_json import JsonKeys as Content
from .._checked_json import Kind, shown
from ._config_json import CHOOSE_ANOTHER, check_only, config_keys
from ._config_parts import (
    mixtral_experts,
    no_window,
    qwen3_experts,
    read_rope,
    window_alternating,
    window_but_every_nth,
    window_everywhere,
    window_if_used,
    window_late,
)
from ._experts_config import ExpertsConfig

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_SIZES = {
    "vocabulary_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_length": "max_position_embeddings",
}
_PARTS = {
    "norm_epsilon": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
    "attention_dropout": "attention_dropout",
    "initializer_range": "initializer_range",
}
_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
}
_ATTENTION_BIAS = {
    "query_key_value_bias": "attention_bias",
    "attention_output_bias": "attention_bias",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one `model_type` is written, and what all models of it have in common."""

    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)  # our field: its value
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # our field: their key
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)  # their key: its value
    sizes: dict[str, str] = dataclasses.field(default_factory=lambda: _SIZES)
    required: dict[str, Any] = dataclasses.field(default_factory=dict)  # their key: only value
    kinds: dict[str, Kind] = dataclasses.field(default_factory=dict)  # where `KEYS` differs
    activation: str = "hidden_act"
    windows: Callable[[Content, int], tuple[int, ...]] = no_window
    experts: Callable[[Content, int], ExpertsConfig | None] | None = None
    has_rope: bool = True
    sliding_rope_key: str | None = None  # of the base of layers with a window, if they differ
    partial_rotation: bool = False
    is_gemma: bool = False  # embeddings and queries have scales of their own


_GEMMA = Family(
    fixed={"norm": "rms_plus_one", "norm_placement": "both"},
    names=_PARTS
    | _ATTENTION_BIAS
    | {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"},
    defaults={
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    required={"use_bidirectional_attention": False},
    activation="hidden_activation",
    is_gemma=True,
)

DECODER_FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        fixed={
            "norm": "layer",
            "gated_mlp": False,
            "query_key_value_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
        },
        sizes={
            "vocabulary_size": "vocab_size",
            "hidden_size": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "max_length": "n_positions",
        },
        names={
            "norm_epsilon": "layer_norm_epsilon",
            "tied_head": "tie_word_embeddings",
            "initializer_range": "initializer_range",
            "embedding_dropout": "embd_pdrop",
            "attention_dropout": "attn_pdrop",
            "residual_dropout": "resid_pdrop",
        },
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "resid_pdrop": 0.1,
        },
        required={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        activation="activation_function",
        has_rope=False,
    ),
    "llama": Family(names=_PARTS | _ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}),
    "mistral": Family(
        names=_PARTS,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        windows=window_everywhere,
    ),
    "qwen2": Family(
        fixed={"query_key_value_bias": True},
        names=_PARTS,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
        windows=window_late,
    ),
    "qwen3": Family(
        fixed={"query_key_norm": "head"},
        names=_PARTS | _ATTENTION_BIAS,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
        windows=window_late,
    ),
    "gemma2": dataclasses.replace(
        _GEMMA,
        defaults=_GEMMA.defaults
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        windows=window_alternating,
    ),
    "gemma3_text": dataclasses.replace(
        _GEMMA,
        fixed=_GEMMA.fixed | {"query_key_norm": "head"},
        # The attention of Gemma 3 has no cap, whatever the key holds.
        names={ours: key for ours, key in _GEMMA.names.items() if ours != "attention_softcap"},
        defaults=_GEMMA.defaults | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        windows=window_but_every_nth,
        sliding_rope_key="rope_local_base_freq",
    ),
    "phi3": Family(
        names=_PARTS | {"residual_dropout": "resid_pdrop"},
        defaults={
            "rms_norm_eps": 1e-5,
            "resid_pdrop": 0.0,
            "original_max_position_embeddings": 4096,
        },
        windows=window_everywhere,
        partial_rotation=True,
    ),
    "olmo2": Family(
        fixed={"norm_placement": "after", "query_key_norm": "projection"},
        names=_PARTS | _ATTENTION_BIAS,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "mixtral": Family(
        names=_PARTS,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        required={"router_jitter_noise": 0.0},
        windows=window_everywhere,
        experts=mixtral_experts,
    ),
    "qwen3_moe": Family(
        fixed={"query_key_norm": "head"},
        names=_PARTS | _ATTENTION_BIAS,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096},
        windows=window_if_used,
        experts=qwen3_experts,
    ),
}


def decoder_fields(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of `DecoderConfig` that a `config.json` describes.

    Args:
        content: the content of the file.
        path: where it is, for messages.

    Raises:
        ValueError: see `DecoderConfig.from_json`.
    """
    family = _family_of(content, path)
    keys = config_keys(
        content,
        path,
        defaults={**_DEFAULTS, **family.defaults},
        kinds=family.kinds,
    )
    keys.require(*family.sizes.values())
    _check_meaning(keys, family)
    fields: dict[str, Any] = {ours: keys[key] for ours, key in family.sizes.items()}
    fields |= {ours: keys[key] for ours, key in family.names.items()}
    fields |= family.fixed
    fields["activation"] = _ACTIVATIONS[keys[family.activation]]
    fields |= _heads(keys, family.sizes)
    if family.is_gemma:
        fields["embedding_scale"] = fields["hidden_size"] ** 0.5
        fields["attention_scale"] = keys["query_pre_attn_scalar"] ** -0.5
    if "intermediate_size" not in family.sizes:
        fields["intermediate_size"] = keys.get("n_inner") or 4 * fields["hidden_size"]
    layers = fields["num_layers"]
    fields["sliding_layers"] = family.windows(keys, layers)
    fields["sliding_window"] = keys["sliding_window"] if fields["sliding_layers"] else None
    if family.experts is not None:
        fields["experts"] = family.experts(keys, layers)
    if family.has_rope:
        fields |= read_rope(
            keys,
            head_size=fields["head_size"],
            sliding_key=family.sliding_rope_key,
            partial=family.partial_rotation,
        )
    return fields


def _family_of(content: Mapping[str, Any], path: Path) -> Family:
    name = content.get("model_type")
    if not isinstance(name, str) or name not in DECODER_FAMILIES:
        raise ValueError(
            f"`model_type` in {str(path)!r} is {shown(name)}; decoders are read of the families "
            f"{', '.join(sorted(DECODER_FAMILIES))}. Choose such a checkpoint, or load another "
            "model's weights into a model of your own."
        )
    return DECODER_FAMILIES[name]


def _heads(keys: Content, sizes: Mapping[str, str]) -> dict[str, int]:
    num_heads, hidden_size = keys[sizes["num_heads"]], keys[sizes["hidden_size"]]
    head_size = keys.get("head_dim")
    if head_size is None and hidden_size % num_heads:
        raise keys.error(
            sizes["hidden_size"],
            f"must be a multiple of `{sizes['num_heads']}` where there is no `head_dim`; got "
            f"{hidden_size} and {num_heads}",
        )
    num_keys = keys.get("num_key_value_heads") or num_heads
    if num_heads % num_keys:
        raise keys.error(
            sizes["num_heads"],
            f"must be a multiple of `num_key_value_heads`; got {num_heads} and {num_keys}",
        )
    return {
        "head_size": head_size or hidden_size // num_heads,
        "num_key_value_heads": num_keys,
    }


def _check_meaning(keys: Content, family: Family) -> None:
    for key, only in family.required.items():
        check_only(keys, key, only, "decoder")
    if keys.get("quantization_config") is not None:
        raise keys.error(
            "quantization_config",
            "says that its weights are codes of numbers",
            remedy="Choose the checkpoint that was not quantised.",
        )
    activation = keys[family.activation]
    if activation not in _ACTIVATIONS:
        raise keys.error(
            family.activation,
            f"is {shown(activation)}; the decoder computes {', '.join(_ACTIVATIONS)}",
            remedy=CHOOSE_ANOTHER,
        )
