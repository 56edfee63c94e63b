"""The families of decoders with RMSNorm, as tables: Llama and those after it."""

import dataclasses
from typing import Any

from .._checked_json import JsonKeys as Content
from ._config_experts import deepseek_experts, gpt_oss_experts, mixtral_experts, qwen3_experts
from ._config_keys import COUNT
from ._config_parts import (
    latent_heads,
    unrotated_layers,
    window_alternating,
    window_but_every_nth,
    window_everywhere,
    window_if_used,
    window_late,
    window_unrotated,
)
from ._config_rope import yarn_magnitude
from ._family import ATTENTION_BIAS, KEY_VALUE_HEADS, PARTS, Family, Fields


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
    """Yarn changes the scale of attention too, where `mscale_all_dim` says so."""
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
