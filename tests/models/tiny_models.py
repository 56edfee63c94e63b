"""Random models of many families, small and odd, as transformers makes, runs and saves them.

What needs torch imports it when called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_HIDDEN = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_DECODER = _HIDDEN | _SPECIAL | {"num_key_value_heads": 2}
_GPT2 = _SPECIAL | {"vocab_size": 37, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_GEMMA = _DECODER | {"head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 4}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 6}
_DEEPSEEK = (
    _HIDDEN
    | _SPECIAL
    | {
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "q_lora_rank": 10,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
    }
)
_DISTILBERT = {
    "vocab_size": 37,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 32,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
_FULL_LAST = ["sliding_attention", "full_attention"]
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e3,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}

# name: (`model_type`, its config)
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "llama": ("llama", _DECODER),
    "llama3-tied-1-kv-head": (
        "llama",
        _DECODER
        | {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": _LLAMA3},
    ),
    "mistral-window": ("mistral", _DECODER | {"sliding_window": 4}),
    "qwen2-late-window": (
        "qwen2",
        _DECODER | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", _DECODER | {"head_dim": 12}),
    "gemma2": (
        "gemma2",
        _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0},
    ),
    "gemma3": (
        "gemma3_text",
        _GEMMA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3-partial": (
        "phi3",
        _DECODER
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "olmo2": ("olmo2", _DECODER),
    "mixtral": ("mixtral", _DECODER | {"num_local_experts": 3}),
    "qwen3-moe": ("qwen3_moe", _DECODER | _EXPERTS | {"norm_topk_prob": True}),
    "gpt-oss": (
        "gpt_oss",
        _DECODER
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 4,
            "swiglu_limit": 0.5,
        },
    ),
    "deepseek": ("deepseek_v3", _DEEPSEEK),
    "gemma1": ("gemma", _DECODER | {"head_dim": 12}),
    "granite-yarn": (
        "granite",
        _DECODER
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "rope_parameters": _YARN,
        },
    ),
    "stablelm-heads": ("stablelm", _DECODER | {"qk_layernorm": True, "use_qkv_bias": True}),
    "starcoder2": ("starcoder2", _DECODER),
    "smollm3": (
        "smollm3",
        _DECODER
        | {
            "no_rope_layers": [0, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 3.0},
            "max_position_embeddings": 8,
        },
    ),
    "gpt-neox": ("gpt_neox", _HIDDEN | _SPECIAL | {"num_attention_heads": 2}),
    "cohere": ("cohere", _DECODER | {"use_qk_norm": True}),
    "cohere2": ("cohere2", _DECODER | {"sliding_window": 4, "layer_types": _FULL_LAST}),
}
# Every other one; the first layer of DeepSeek differs from the others.
SCANNED = {name: bool(i % 2) for i, name in enumerate(DECODERS)} | {"deepseek": False}
MORE_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-untied-relu-odd": (
        "gpt2",
        _GPT2
        | {
            "vocab_size": 41,
            "n_embd": 21,
            "n_head": 3,
            "n_inner": 50,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
    ),
    "llama-biases-linear": (
        "llama",
        _DECODER
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 6,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
        },
    ),
    "mistral-no-window": ("mistral", _DECODER | {"sliding_window": None, "head_dim": 10}),
    "qwen2-tied": ("qwen2", _DECODER | {"tie_word_embeddings": True}),
    "qwen3-biases-windows": (
        "qwen3",
        _DECODER
        | {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
        },
    ),
    "gemma2-untied": ("gemma2", _GEMMA | {"tie_word_embeddings": False, "head_dim": 8}),
    "gemma3-capped-linear": (
        "gemma3_text",
        _GEMMA
        | {
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3-long": (
        "phi3",
        _DECODER
        | {
            "original_max_position_embeddings": 10,
            "sliding_window": 6,
            "rope_parameters": _LONG,
        },
    ),
    "phi3-long-but-short-text": (
        "phi3",
        _DECODER | {"original_max_position_embeddings": 20, "rope_parameters": _LONG},
    ),
    "olmo2-1-kv-head": ("olmo2", _DECODER | {"num_key_value_heads": 1, "attention_bias": True}),
    "mixtral-window": ("mixtral", _DECODER | {"num_local_experts": 4, "sliding_window": 3}),
    "qwen3-moe-some-dense": (
        "qwen3_moe",
        _DECODER | _EXPERTS | {"mlp_only_layers": [0], "tie_word_embeddings": True},
    ),
}
MORE_DECODERS |= {
    "gpt-oss-default-rotation": (
        "gpt_oss",
        _DECODER | {"num_local_experts": 5, "tie_word_embeddings": True, "attention_bias": False},
    ),
    "deepseek-yarn-2-shared": (
        "deepseek_v3",
        _DEEPSEEK
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.7,
            "attention_bias": True,
            "rope_interleave": False,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "llama-dynamic-short-text": (
        "llama",
        _DECODER | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 3.0}},
    ),
    "qwen2-yarn": (
        "qwen2",
        _DECODER
        | {"rope_parameters": _YARN | {"truncate": False, "mscale": 2.0, "mscale_all_dim": 0.5}},
    ),
    "granite-biases": (
        "granite",
        _DECODER | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "gemma1-old-gelu": ("gemma", _DECODER | {"hidden_act": "gelu", "attention_bias": True}),
    "stablelm-parallel": (
        "stablelm",
        _DECODER
        | {
            "use_parallel_residual": True,
            "num_key_value_heads": 4,
            "rope_parameters": _YARN | {"partial_rotary_factor": 0.5},
        },
    ),
    "starcoder2-window": (
        "starcoder2",
        _DECODER | {"use_bias": False, "sliding_window": 4, "tie_word_embeddings": False},
    ),
    "smollm3-every-4th": (
        "smollm3",
        _DECODER | {"num_hidden_layers": 4, "mlp_bias": True, "attention_bias": True},
    ),
    "gpt-neox-sequential": (
        "gpt_neox",
        _HIDDEN
        | _SPECIAL
        | {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_fast",
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 1e3,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "cohere-biases": (
        "cohere",
        _DECODER | {"attention_bias": True, "logit_scale": 2.5, "tie_word_embeddings": False},
    ),
    "cohere2-every-4th": ("cohere2", _DECODER | {"sliding_window": 3, "num_hidden_layers": 5}),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "roberta": ("roberta", _HIDDEN | {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("xlm-roberta", _HIDDEN | {"pad_token_id": 0, "type_vocab_size": 2}),
    "bert-gelu-new": ("bert", _HIDDEN | {"pad_token_id": 0, "hidden_act": "gelu_new"}),
    "distilbert": ("distilbert", _DISTILBERT),
    "distilbert-relu": ("distilbert", _DISTILBERT | {"activation": "relu"}),
}


def make(
    model_type: str, config: dict[str, Any], *, causal: bool = True, auto: str | None = None
) -> Any:
    """A random model of transformers: attention as its own formula says, no dropout.

    `auto` is the class that makes it, where it is neither `AutoModelForCausalLM` nor `AutoModel`.
    Every tensor is moved away from what it starts as, so that each norm and bias matters.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # special tokens outside of small vocabularies
    transformers.logging.disable_progress_bar()
    kind = getattr(transformers, auto or ("AutoModelForCausalLM" if causal else "AutoModel"))
    torch.manual_seed(0)
    model = kind.from_config(
        transformers.AutoConfig.for_model(model_type, **config), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in (*model.parameters(), *corrections(model)):
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.1))
    return model.eval()


def corrections(model: Any) -> list[Any]:
    """Tensors that decide which experts are chosen: buffers of a model, saved with it."""
    return [buffer for name, buffer in model.named_buffers() if "correction" in name]


def save(model: Any, directory: Path) -> Path:
    """Write a model with `save_pretrained`."""
    model.save_pretrained(directory)
    return directory


def read(params: Any) -> Any:
    """A tree of lazy tensors as arrays."""
    return jax.tree.map(lambda tensor: jnp.asarray(tensor.read()), params)


def allowed(num_layers: int) -> float:
    """What two orders of summation may differ by, relative to the largest logit.

    A layer sums products about ten times over, at most 48 at a time; rounding errors of a sum grow
    as the root of its length, and norms keep vectors at their size. Far below 1e-4.
    """
    return 10 * num_layers * np.sqrt(48) * np.finfo(np.float32).eps


def outputs(
    model: Any, ids: np.ndarray, mask: np.ndarray, positions: np.ndarray | None = None
) -> Any:
    """What a model of transformers gives for a padded batch."""
    import torch

    given = {} if positions is None else {"position_ids": torch.from_numpy(positions)}
    return model(
        **given,
        input_ids=torch.from_numpy(ids.astype(np.int64)),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
    )


def greedy(
    model: Any, ids: np.ndarray, mask: np.ndarray, num_new: int, **options: Any
) -> np.ndarray:
    """The new tokens of transformers' `generate`."""
    import torch

    settings = {"pad_token_id": 0} | options
    text = model.generate(
        input_ids=torch.from_numpy(ids.astype(np.int64)),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        max_new_tokens=num_new,
        do_sample=False,
        **settings,
    )
    return text[:, ids.shape[1] :].numpy()
