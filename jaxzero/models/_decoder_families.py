"""The tables of the families of decoders: families with RMSNorm, and families with LayerNorm.

The `defaults` of a `Family`, for keys that a file leaves out, are those of the family's config
class in transformers.
"""

import dataclasses
from typing import Any

from .._checked_json import JsonKeys as Content
from ._config_json import CHOOSE_ANOTHER
from ._config_keys import COUNT
from ._config_parts import (
    deepseek_experts,
    gpt_oss_experts,
    heads_of_hidden,
    latent_heads,
    mixtral_experts,
    qwen3_experts,
    unrotated_layers,
    window_alternating,
    window_but_every_nth,
    window_everywhere,
    window_if_used,
    window_late,
    window_unrotated,
    yarn_magnitude,
)
from ._family import ATTENTION_BIAS, KEY_VALUE_HEADS, PARTS, Family, Fields

_PARTS = PARTS | {"norm_epsilon": "layer_norm_eps"}


def _gemma_scales(content: Content, fields: Fields) -> dict[str, Any]:
    return {
        "embedding_scale": fields["hidden_size"] ** 0.5,
        "attention_scale": content["query_pre_attn_scalar"] ** -0.5,
    }


def _gemma1_parts(content: Content, fields: Fields) -> dict[str, Any]:
    # Its first files say "gelu" and mean the approximation.
    activation = "gelu_tanh" if content["hidden_act"] == "gelu" else fields["activation"]
    return {"activation": activation, "embedding_scale": fields["hidden_size"] ** 0.5}


def _granite_scale(content: Content, fields: Fields) -> dict[str, Any]:
    return {"logit_scale": 1 / content["logits_scaling"]}


def _smollm3_rotation(content: Content, fields: Fields) -> dict[str, Any]:
    return {"unrotated_layers": unrotated_layers(content, fields["num_layers"])}


def _deepseek_rotation(content: Content, fields: Fields) -> dict[str, Any]:
    """Return the fields `rope` and, if Yarn changes it, `attention_scale` of DeepSeek's models.

    Yarn changes `attention_scale` if the file has `mscale_all_dim`.
    """
    rope = fields["rope"]
    if content["rope_interleave"]:
        rope = dataclasses.replace(rope, pairs="neighbours")
    given = content.section("rope_scaling") or content.section("rope_parameters")
    weight = given.get("mscale_all_dim")
    if rope.scaling is None or not weight:
        return {"rope": rope}
    given.require("factor")
    magnitude = yarn_magnitude(given["factor"], weight)
    return {"rope": rope, "attention_scale": fields["head_size"] ** -0.5 * magnitude**2}


_GEMMA = Family(
    fixed={"norm": "rms_plus_one", "norm_placement": "both"},
    names=PARTS
    | ATTENTION_BIAS
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
    kinds=KEY_VALUE_HEADS | {"head_dim": COUNT},
    activation="hidden_activation",
    more=_gemma_scales,
)

RMS_NORM_FAMILIES: dict[str, Family] = {
    "llama": Family(names=PARTS | ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}),
    "mistral": Family(
        names=PARTS,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        kinds=KEY_VALUE_HEADS,
        windows=window_everywhere,
    ),
    "qwen2": Family(
        fixed={"query_key_value_bias": True},
        names=PARTS,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
        windows=window_late,
    ),
    "qwen3": Family(
        fixed={"query_key_norm": "head"},
        names=PARTS | ATTENTION_BIAS,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
        kinds={"head_dim": COUNT},
        windows=window_late,
    ),
    "smollm3": Family(
        names=PARTS | ATTENTION_BIAS | {"mlp_bias": "mlp_bias"},
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
        windows=window_unrotated,
        more=_smollm3_rotation,
    ),
    "granite": Family(
        names=PARTS
        | ATTENTION_BIAS
        | {
            "mlp_bias": "mlp_bias",
            "embedding_scale": "embedding_multiplier",
            "attention_scale": "attention_multiplier",
            "residual_scale": "residual_multiplier",
        },
        defaults={
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        more=_granite_scale,
    ),
    "gemma": Family(
        fixed={"norm": "rms_plus_one"},
        names=PARTS | ATTENTION_BIAS,
        defaults={
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "head_dim": 256,
            "num_key_value_heads": 16,
        },
        required={"use_bidirectional_attention": False},
        kinds=KEY_VALUE_HEADS | {"head_dim": COUNT},
        more=_gemma1_parts,
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
        sliding_base_key="rope_local_base_freq",
    ),
    "phi3": Family(
        names=PARTS | {"residual_dropout": "resid_pdrop"},
        defaults={
            "rms_norm_eps": 1e-5,
            "resid_pdrop": 0.0,
            "original_max_position_embeddings": 4096,
        },
        windows=window_everywhere,
        part_key="partial_rotary_factor",
    ),
    "olmo2": Family(
        fixed={"norm_placement": "after", "query_key_norm": "projection"},
        names=PARTS | ATTENTION_BIAS,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "mixtral": Family(
        names=PARTS,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        required={"router_jitter_noise": 0.0},
        kinds=KEY_VALUE_HEADS,
        windows=window_everywhere,
        experts=mixtral_experts,
    ),
    "qwen3_moe": Family(
        fixed={"query_key_norm": "head"},
        names=PARTS | ATTENTION_BIAS,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096},
        kinds=KEY_VALUE_HEADS,
        windows=window_if_used,
        experts=qwen3_experts,
    ),
    "gpt_oss": Family(
        fixed={"attention_sinks": True},
        names=PARTS | ATTENTION_BIAS,
        defaults={
            "rms_norm_eps": 1e-5,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "attention_bias": True,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        kinds=KEY_VALUE_HEADS | {"head_dim": COUNT},
        windows=window_alternating,
        experts=gpt_oss_experts,
    ),
    "deepseek_v3": Family(
        names=PARTS | ATTENTION_BIAS,
        defaults={
            "q_lora_rank": 1536,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "rope_interleave": True,
        },
        required={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        heads=latent_heads,
        experts=deepseek_experts,
        more=_deepseek_rotation,
    ),
}


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
        required={"hidden_dropout": 0.0},  # StableLM has it on the perceptron alone
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
