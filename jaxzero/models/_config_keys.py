"""Define what each key of a `config.json` may hold, for all families.

A key means the same in every family that reads it, so its type and range are written once, here. A
family says which keys it reads, and which values they have if a file leaves them out. If a key has
another range in a family, the family says so in its `kinds`. Keys of nested objects
(`rope_scaling`) are listed too.

Ranges exclude values that no model has: a width of 0, an `eps` above 1, or so many layers that they
would fill the memory before their number is compared with the tensors.
"""

from .._checked_json import ANYTHING, FLAG, OBJECT, TEXT, Kind, integer, list_of, number, optional

COUNT = integer(1)
INDEX = integer(0)
LAYERS = integer(1, 10_000)
POSITIVE = number(1e-30, 1e30)  # stays positive and finite when it is rounded to float32
DROPOUT = number(0, below=1)
EPSILON = number(0, 1)
_FACTORS = list_of(POSITIVE)
_PIXELS = integer(1, 65_536)
_BOTH = list_of(_PIXELS, length=2)
# Height and width, or one integer for both; read as a pair.
_PAIR = Kind(
    f"{_PIXELS.text}, or {_BOTH.text}",
    lambda value: _PIXELS.accepts(value) or _BOTH.accepts(value),
    lambda value: (value, value) if _PIXELS.accepts(value) else _BOTH.convert(value),
)

KEYS: dict[str, Kind] = {
    "model_type": TEXT,
    # Sizes.
    "vocab_size": COUNT,
    "hidden_size": COUNT,
    "n_embd": COUNT,
    "dim": COUNT,
    "intermediate_size": COUNT,
    "moe_intermediate_size": COUNT,
    "n_inner": optional(COUNT),
    "num_channels": integer(1, 10_000),
    "num_labels": COUNT,
    "id2label": optional(OBJECT),
    "image_size": _PAIR,
    "patch_size": _PAIR,
    "hidden_dim": COUNT,
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_attention_heads": COUNT,
    "n_head": COUNT,
    "n_heads": COUNT,
    "num_key_value_heads": optional(COUNT),
    "head_dim": optional(COUNT),
    "max_position_embeddings": COUNT,
    "n_positions": COUNT,
    "type_vocab_size": INDEX,
    "pad_token_id": INDEX,
    # Parts of layers.
    "architectures": optional(list_of(TEXT)),
    "qkv_bias": FLAG,
    "norm_bias": FLAG,
    "norm_eps": EPSILON,
    "hidden_act": TEXT,
    "hidden_activation": TEXT,
    "activation_function": TEXT,
    "activation": TEXT,
    "rms_norm_eps": EPSILON,
    "layer_norm_eps": EPSILON,
    "layer_norm_epsilon": EPSILON,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "tie_word_embeddings": FLAG,
    "initializer_range": number(0, 1),
    "query_pre_attn_scalar": POSITIVE,
    "attn_logit_softcapping": optional(POSITIVE),
    "final_logit_softcapping": optional(POSITIVE),
    "norm_epsilon": EPSILON,
    "use_bias": FLAG,
    "use_qkv_bias": FLAG,
    "qk_layernorm": FLAG,
    "use_qk_norm": FLAG,
    "use_parallel_residual": FLAG,
    "embedding_multiplier": POSITIVE,
    "attention_multiplier": POSITIVE,
    "residual_multiplier": POSITIVE,
    "logits_scaling": POSITIVE,
    "logit_scale": POSITIVE,
    # Dropout rates.
    "attention_dropout": DROPOUT,
    "attn_pdrop": DROPOUT,
    "embd_pdrop": DROPOUT,
    "resid_pdrop": DROPOUT,
    "hidden_dropout_prob": DROPOUT,
    "attention_probs_dropout_prob": DROPOUT,
    "dropout": DROPOUT,
    "hidden_dropout": DROPOUT,
    "embedding_dropout": DROPOUT,
    "residual_dropout": DROPOUT,
    "mlp_dropout": DROPOUT,
    # Windows.
    "local_attention": INDEX,
    "global_attn_every_n_layers": COUNT,
    "sliding_window": optional(COUNT),
    "use_sliding_window": FLAG,
    "max_window_layers": INDEX,
    "sliding_window_pattern": COUNT,
    "_sliding_window_pattern": COUNT,
    "layer_types": optional(list_of(TEXT)),
    # Experts.
    "num_local_experts": integer(0, 100_000),
    "num_experts": integer(0, 100_000),
    "num_experts_per_tok": COUNT,
    "decoder_sparse_step": COUNT,
    "mlp_only_layers": optional(list_of(INDEX)),
    "norm_topk_prob": FLAG,
    "n_routed_experts": integer(1, 100_000),
    "n_shared_experts": COUNT,
    "first_k_dense_replace": INDEX,
    "n_group": COUNT,
    "topk_group": COUNT,
    "routed_scaling_factor": POSITIVE,
    "swiglu_alpha": number(-1e30, 1e30),
    "swiglu_limit": POSITIVE,
    # Latent attention.
    "q_lora_rank": optional(COUNT),
    "kv_lora_rank": COUNT,
    "qk_nope_head_dim": COUNT,
    "qk_rope_head_dim": COUNT,
    "v_head_dim": COUNT,
    "rope_interleave": FLAG,
    # Rotation, also inside `rope_scaling` and `rope_parameters`.
    "rope_theta": POSITIVE,
    "rope_local_base_freq": POSITIVE,
    "rotary_emb_base": POSITIVE,
    "rotary_pct": number(above=0, most=1),
    "no_rope_layers": optional(list_of(integer(0, 1))),
    "no_rope_layer_interval": COUNT,
    "global_rope_theta": POSITIVE,
    "local_rope_theta": POSITIVE,
    "partial_rotary_factor": optional(number(above=0, most=1)),
    "rope_type": optional(TEXT),
    "type": optional(TEXT),
    "factor": optional(POSITIVE),
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "original_max_position_embeddings": optional(COUNT),
    "beta_fast": optional(POSITIVE),
    "beta_slow": optional(POSITIVE),
    "mscale": optional(number(0, 1e30)),
    "mscale_all_dim": optional(number(0, 1e30)),
    "truncate": FLAG,
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
    "attention_factor": optional(POSITIVE),
    # Keys that are read only to refuse values that our models do not compute.
    "quantization_config": ANYTHING,
    "position_embedding_type": ANYTHING,
    "is_decoder": ANYTHING,
    "use_bidirectional_attention": ANYTHING,
    "scale_attn_weights": ANYTHING,
    "scale_attn_by_inverse_layer_idx": ANYTHING,
    "add_cross_attention": ANYTHING,
    "router_jitter_noise": ANYTHING,
    "scoring_func": ANYTHING,
    "topk_method": ANYTHING,
    "moe_layer_freq": ANYTHING,
}
