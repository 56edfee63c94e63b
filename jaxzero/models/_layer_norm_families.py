"""The families of decoders with LayerNorm, as tables: GPT-2, and those with parallel residuals."""

import dataclasses
from typing import Any

from .._checked_json import JsonKeys as Content
from ._config_json import CHOOSE_ANOTHER
from ._config_parts import heads_of_hidden, window_but_every_nth, window_everywhere
from ._family import ATTENTION_BIAS, KEY_VALUE_HEADS, PARTS, Family, Fields

_PARTS = PARTS | {"norm_epsilon": "layer_norm_eps"}


def _gpt2_width(content: Content, fields: Fields) -> dict[str, Any]:
    return {"intermediate_size": content.get("n_inner") or 4 * fields["hidden_size"]}


def _neox_residual(content: Content, fields: Fields) -> dict[str, Any]:
    return {"residual": "parallel" if content["use_parallel_residual"] else "sequential"}


def _stablelm_parts(content: Content, fields: Fields) -> dict[str, Any]:
    is_parallel = content["use_parallel_residual"]
    return {
        "residual": "parallel_shared_norm" if is_parallel else "sequential",
        "query_key_norm": "each_head" if content["qk_layernorm"] else "none",
    }


def _cohere_parts(content: Content, fields: Fields) -> dict[str, Any]:
    return {
        "rope": dataclasses.replace(fields["rope"], pairs="neighbours"),
        "query_key_norm": "each_head" if content["use_qk_norm"] else "none",
    }


def _cohere2_parts(content: Content, fields: Fields) -> dict[str, Any]:
    if content["sliding_window"] is None:
        raise content.error(
            "sliding_window",
            "is null, but the layers that rotate are those with a window",
            remedy=CHOOSE_ANOTHER,
        )
    slide = fields["sliding_layers"]
    return {
        "rope": dataclasses.replace(fields["rope"], pairs="neighbours"),
        "unrotated_layers": tuple(i for i in range(fields["num_layers"]) if i not in slide),
    }


_COHERE = Family(
    fixed={"norm": "layer_without_bias", "residual": "parallel_shared_norm"},
    names=_PARTS | ATTENTION_BIAS | {"logit_scale": "logit_scale"},
    defaults={
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
        "use_qk_norm": False,
        "rope_theta": 5e5,
    },
    more=_cohere_parts,
)

LAYER_NORM_FAMILIES: dict[str, Family] = {
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
        more=_gpt2_width,
    ),
    "gpt_neox": Family(
        fixed={"norm": "layer", "gated_mlp": False, "mlp_bias": True},
        names=_PARTS
        | ATTENTION_BIAS
        | {"embedding_dropout": "hidden_dropout", "residual_dropout": "hidden_dropout"},
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "hidden_dropout": 0.0,
            "attention_bias": True,
            "use_parallel_residual": True,
            "rotary_emb_base": 1e4,
            "rotary_pct": 0.25,
        },
        heads=heads_of_hidden,
        base_key="rotary_emb_base",
        part_key="rotary_pct",
        more=_neox_residual,
    ),
    "stablelm": Family(
        fixed={"norm": "layer"},
        names=_PARTS | {"query_key_value_bias": "use_qkv_bias"},
        defaults={
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "partial_rotary_factor": 0.25,
        },
        required={"hidden_dropout": 0.0},  # of the perceptron alone
        kinds=KEY_VALUE_HEADS,
        part_key="partial_rotary_factor",
        more=_stablelm_parts,
    ),
    "starcoder2": Family(
        fixed={"norm": "layer", "gated_mlp": False},
        names=PARTS
        | {
            "norm_epsilon": "norm_epsilon",
            "query_key_value_bias": "use_bias",
            "attention_output_bias": "use_bias",
            "mlp_bias": "use_bias",
            "embedding_dropout": "embedding_dropout",
            "residual_dropout": "residual_dropout",
        },
        defaults={
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "embedding_dropout": 0.0,
            "residual_dropout": 0.0,
            "initializer_range": 0.018042,
            "tie_word_embeddings": True,
        },
        kinds=KEY_VALUE_HEADS,
        windows=window_everywhere,
    ),
    "cohere": _COHERE,
    "cohere2": dataclasses.replace(
        _COHERE,
        defaults=_COHERE.defaults
        | {"rope_theta": 1e4, "sliding_window": 4096, "sliding_window_pattern": 4},
        windows=window_but_every_nth,
        more=_cohere2_parts,
    ),
}
