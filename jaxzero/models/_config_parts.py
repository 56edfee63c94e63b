"""Read the structured parts of a decoder's `config.json`: heads, windows, rotation and experts.

The tables of families (`_decoder_families`) name these functions. Functions for heads take `sizes`,
which maps our names of sizes to keys of the file, and return fields of `DecoderConfig`. Functions
for windows return the indices of the layers with a sliding window. The files of
transformers 4 and 5 are read. Version 4 has `rope_theta` beside `rope_scaling`; version 5 has both
in `rope_parameters`, once for each kind of layer if kinds rotate differently. Version 4 writes
`num_experts`, and version 5 `num_local_experts`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from .._checked_json import JsonKeys as Content
from .._checked_json import shown
from ._config_json import CHOOSE_ANOTHER, windowed_layers
from ._part_configs import ClampedGate, ExpertsConfig, GroupRouting, LatentConfig
from ._rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    Scaling,
    YarnScaling,
)


def ordinary_heads(keys: Content, sizes: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields `head_size` and `num_key_value_heads`."""
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


def heads_of_hidden(keys: Content, sizes: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `ordinary_heads`, computed from hidden size and number of heads only."""
    num_heads, hidden_size = keys[sizes["num_heads"]], keys[sizes["hidden_size"]]
    if hidden_size % num_heads:
        raise keys.error(
            sizes["hidden_size"],
            f"must be a multiple of `{sizes['num_heads']}`; got {hidden_size} and {num_heads}",
        )
    return {"head_size": hidden_size // num_heads, "num_key_value_heads": num_heads}


def latent_heads(keys: Content, sizes: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of latent attention, which has as many heads of keys as of queries."""
    keys.require("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    num_heads, plain_size = keys[sizes["num_heads"]], keys["qk_nope_head_dim"]
    num_keys = keys.get("num_key_value_heads") or num_heads
    if num_keys != num_heads:
        raise keys.error("num_key_value_heads", f"is {num_keys}, but there are {num_heads} heads")
    return {
        "head_size": plain_size + keys["qk_rope_head_dim"],
        "num_key_value_heads": num_heads,
        "latent": LatentConfig(
            query_rank=keys["q_lora_rank"],
            key_value_rank=keys["kv_lora_rank"],
            plain_size=plain_size,
            value_size=keys["v_head_dim"],
        ),
    }


def no_window(content: Content, num_layers: int) -> tuple[int, ...]:
    """Give no layer a sliding window: return no indices."""
    return ()


def window_everywhere(content: Content, num_layers: int) -> tuple[int, ...]:
    """Give all layers a sliding window, if the file has a `sliding_window`."""
    return tuple(range(num_layers)) if content.get("sliding_window") else ()


def window_if_used(content: Content, num_layers: int) -> tuple[int, ...]:
    """Give all layers a sliding window, if `sliding_window` and `use_sliding_window` are set."""
    return window_everywhere(content, num_layers) if content.get("use_sliding_window") else ()


def window_late(content: Content, num_layers: int) -> tuple[int, ...]:
    """Give layers from number `max_window_layers` on a window, if `use_sliding_window` is set."""
    late = range(content.get("max_window_layers", 28), num_layers)
    return _window_by_type(content, num_layers, late) if content.get("use_sliding_window") else ()


def window_alternating(content: Content, num_layers: int) -> tuple[int, ...]:
    """Give every second layer a sliding window, beginning with the first layer."""
    return _window_by_type(content, num_layers, range(0, num_layers, 2))


def window_but_every_nth(content: Content, num_layers: int) -> tuple[int, ...]:
    """Give all layers but every nth a sliding window; n is `sliding_window_pattern`."""
    n = content.get("sliding_window_pattern", content.get("_sliding_window_pattern", 6))
    return _window_by_type(content, num_layers, [i for i in range(num_layers) if (i + 1) % n])


def window_unrotated(content: Content, num_layers: int) -> tuple[int, ...]:
    """Give layers without rotation a window, if `use_sliding_window` is set."""
    if content.get("use_sliding_window"):
        return _window_by_type(content, num_layers, unrotated_layers(content, num_layers))
    if "sliding_attention" in (content.get("layer_types") or ()):
        raise content.error("layer_types", "has windows, but `use_sliding_window` is false")
    return ()


def unrotated_layers(content: Content, num_layers: int) -> tuple[int, ...]:
    """Return the indices of layers without rotation: those with 0 in `no_rope_layers`.

    Without this key, every `no_rope_layer_interval`-th layer has no rotation.
    """
    marks = content.get("no_rope_layers")
    if marks is None:
        every = content.get("no_rope_layer_interval", 4)
        return tuple(range(every - 1, num_layers, every))
    if len(marks) < num_layers:
        raise content.error("no_rope_layers", f"has {len(marks)} entries for {num_layers} layers")
    return tuple(i for i in range(num_layers) if not marks[i])


def _window_by_type(content: Content, num_layers: int, default: Iterable[int]) -> tuple[int, ...]:
    """Return the layers that `layer_types` gives a window; without that key, `default`."""
    if not content.get("sliding_window"):
        return ()
    layers = windowed_layers(content, num_layers, "the decoder")
    return tuple(default) if layers is None else layers


def read_rope(
    content: Content,
    *,
    head_size: int,
    base_key: str,
    sliding_base_key: str | None,
    part_key: str | None,
) -> dict[str, Rope]:
    """Return the field `rope` of `DecoderConfig` and, for families that have it, `sliding_rope`.

    Args:
        content: the file, with a default of `base_key`.
        head_size: size of a head, of which all or a part is rotated.
        base_key: key under which transformers 4 wrote the base of the frequencies.
        sliding_base_key: key of transformers 4 for the base in layers with a window, if it differs.
        part_key: key of transformers 4 for the rotated fraction of a head; None: all is rotated.
    """
    scaling, given = content.section("rope_scaling"), content.section("rope_parameters")
    if sliding_base_key is None:
        given = scaling or given  # if a file has both, transformers 5 takes `rope_scaling`
        return {"rope": _rope(given, content[base_key], content, head_size, part_key)}
    if not content.get("sliding_window"):
        raise content.error(
            "sliding_window",
            "is null, but some layers rotate as those with a window do, which the decoder does "
            "not compute",
            remedy=CHOOSE_ANOTHER,
        )
    # `rope_parameters` is nested by kind of layer. A scaling that is not nested, as transformers 4
    # wrote it, is for the layers without a window.
    full, sliding = given.section("full_attention"), given.section("sliding_attention")
    if not full and not sliding:
        full = given
    bases = content[base_key], content[sliding_base_key]
    return {
        "rope": _rope(scaling.over(full), bases[0], content, head_size, part_key),
        "sliding_rope": _rope(sliding, bases[1], content, head_size, part_key),
    }


def _rope(
    given: Content, base: float, content: Content, head_size: int, part_key: str | None
) -> Rope:
    holder, key = given, "partial_rotary_factor"
    if key not in given:
        holder, key = content, part_key or key
    part = holder.get(key) or 1.0
    if part != 1 and part_key is None:
        raise holder.error(
            key,
            f"is {part}, which {content['model_type']!r} models do not use here",
            remedy=CHOOSE_ANOTHER,
        )
    rotary_size = int(head_size * part)
    if rotary_size < 2 or rotary_size % 2:
        raise (holder if part != 1 else content).error(
            key if part != 1 else "head_dim",
            f"makes {rotary_size} of the {head_size} numbers of a head rotate; it must be an even "
            "number of at least 2, as they rotate in pairs",
        )
    base = given.get("rope_theta", base)
    scaling = _scaling(given, content, rotary_size)
    rope = Rope(rotary_size=rotary_size, base=base)
    try:
        return dataclasses.replace(rope, scaling=scaling)
    except ValueError as error:
        key = "rope_type" if given.get("rope_type") else "type"
        what = f"does not fit the rotation: {str(error).rstrip('.')}"
        raise given.error(key, what) from error


def _scaling(given: Content, content: Content, rotary_size: int) -> Scaling | None:
    kind = given.get("rope_type") or given.get("type") or "default"
    if content["model_type"] == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # names of its first releases
    needed = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }
    if kind not in needed:
        raise given.error(
            "rope_type" if given.get("rope_type") else "type",
            f"is {shown(kind)}; the decoder computes {', '.join(needed)}",
            remedy=CHOOSE_ANOTHER,
        )
    given.require(*needed[kind])
    # Phi-3 writes the key beside the scaling, Llama inside of it, and other files not at all.
    key, longest = "original_max_position_embeddings", content["max_position_embeddings"]
    trained = content.get(key, given.get(key, longest))
    if kind == "linear":
        return LinearScaling(factor=given["factor"])
    if kind == "dynamic":
        return DynamicScaling(factor=given["factor"], trained_length=longest)
    if kind == "yarn":
        return _yarn(given, trained)
    if kind == "llama3":
        return _llama3(given, trained)
    if kind == "longrope":
        return _longrope(given, content, trained, rotary_size // 2)
    return None


def _yarn(given: Content, trained: int) -> YarnScaling:
    fast, slow = given.get("beta_fast") or 32.0, given.get("beta_slow") or 1.0
    if fast < slow:
        raise given.error("beta_fast", f"is {fast}, less than `beta_slow`, {slow}")
    magnitude = given.get("attention_factor")
    if magnitude is None:
        one, all_dims = given.get("mscale"), given.get("mscale_all_dim")
        magnitude = yarn_magnitude(given["factor"], one if one and all_dims else 1.0)
        magnitude /= yarn_magnitude(given["factor"], all_dims) if one and all_dims else 1.0
    return YarnScaling(
        factor=given["factor"],
        trained_length=trained,
        fast_turns=fast,
        slow_turns=slow,
        magnitude=magnitude,
        whole_pairs=given.get("truncate", True),
    )


def yarn_magnitude(factor: float, weight: float) -> float:
    """Return Yarn's factor of sines and cosines, if texts are `factor` times as long as trained."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(given: Content, trained: int) -> Llama3Scaling:
    slow, fast = given["low_freq_factor"], given["high_freq_factor"]
    if slow >= fast:
        raise given.error("low_freq_factor", f"is {slow}, not below `high_freq_factor`, {fast}")
    return Llama3Scaling(
        factor=given["factor"], slow_turns=slow, fast_turns=fast, trained_length=trained
    )


def _longrope(given: Content, content: Content, trained: int, num_pairs: int) -> LongScaling:
    for key in ("short_factor", "long_factor"):
        if len(given[key]) != num_pairs:
            raise given.error(
                key, f"has {len(given[key])} entries for {num_pairs} rotated pairs of a head"
            )
    return LongScaling(
        short=given["short_factor"],
        long=given["long_factor"],
        trained_length=trained,
        magnitude=_magnitude(given, content, trained),
    )


def _magnitude(given: Content, content: Content, trained: int) -> float:
    factor = given.get("attention_factor")
    if factor is not None:
        return factor
    stretch = given.get("factor") or content["max_position_embeddings"] / trained
    if stretch <= 1:
        return 1.0
    if trained < 2:
        raise content.error("original_max_position_embeddings", "must be at least 2; got 1")
    return math.sqrt(1 + math.log(stretch) / math.log(trained))


def mixtral_experts(content: Content, num_layers: int) -> ExpertsConfig:
    """Return the config of experts of width `intermediate_size` in every layer."""
    content.require("num_local_experts", "num_experts_per_tok")
    _check_chosen(content, "num_local_experts")
    return ExpertsConfig(
        num_experts=content["num_local_experts"],
        num_experts_per_token=content["num_experts_per_tok"],
        intermediate_size=content["intermediate_size"],
        normalize=True,
    )


def qwen3_experts(content: Content, num_layers: int) -> ExpertsConfig | None:
    """Return the config of experts in every `decoder_sparse_step`-th layer.

    Layers in `mlp_only_layers` have no experts. None: no layer has experts.
    """
    count = "num_local_experts" if "num_local_experts" in content else "num_experts"
    content.require(count, "num_experts_per_tok", "moe_intermediate_size")
    every = content.get("decoder_sparse_step", 1)
    named = content.get("mlp_only_layers") or ()
    dense = [i for i in range(num_layers) if (i + 1) % every or i in named]
    if content[count] == 0 or len(dense) == num_layers:
        return None
    _check_chosen(content, count)
    return ExpertsConfig(
        num_experts=content[count],
        num_experts_per_token=content["num_experts_per_tok"],
        intermediate_size=content["moe_intermediate_size"],
        normalize=content.get("norm_topk_prob", False),
        dense_layers=tuple(dense),
    )


def gpt_oss_experts(content: Content, num_layers: int) -> ExpertsConfig:
    """Return the config of experts with biases and a clamped gate in every layer."""
    content.require("num_local_experts", "num_experts_per_tok")
    _check_chosen(content, "num_local_experts")
    return ExpertsConfig(
        num_experts=content["num_local_experts"],
        num_experts_per_token=content["num_experts_per_tok"],
        intermediate_size=content["intermediate_size"],
        bias=True,
        clamped_gate=ClampedGate(
            limit=content.get("swiglu_limit", 7.0), slope=content.get("swiglu_alpha", 1.702)
        ),
    )


def deepseek_experts(content: Content, num_layers: int) -> ExpertsConfig | None:
    """Return the config of grouped experts; the first `first_k_dense_replace` layers have none."""
    count, num_dense = "n_routed_experts", content["first_k_dense_replace"]
    content.require(count, "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
    if num_dense >= num_layers:
        return None
    _check_chosen(content, count)
    num, num_groups, num_chosen = content[count], content["n_group"], content["topk_group"]
    if num % num_groups or num < 2 * num_groups:
        raise content.error(
            "n_group", f"is {num_groups}, but `{count}` is {num}; groups hold as many, at least 2"
        )
    if num_chosen > num_groups:
        raise content.error("topk_group", f"is {num_chosen}, but `n_group` is {num_groups}")
    if content["num_experts_per_tok"] > num // num_groups * num_chosen:
        raise content.error(
            "num_experts_per_tok",
            f"is {content['num_experts_per_tok']}, but `topk_group` groups hold "
            f"{num // num_groups * num_chosen} experts",
        )
    return ExpertsConfig(
        num_experts=num,
        num_experts_per_token=content["num_experts_per_tok"],
        intermediate_size=content["moe_intermediate_size"],
        normalize=content.get("norm_topk_prob", True),
        dense_layers=tuple(range(num_dense)),
        routing=GroupRouting(
            num_groups=num_groups,
            num_chosen_groups=num_chosen,
            scale=content["routed_scaling_factor"],
        ),
        shared_size=content["n_shared_experts"] * content["moe_intermediate_size"],
    )


def _check_chosen(content: Content, count: str) -> None:
    if not content["num_experts_per_tok"] <= content[count]:
        raise content.error(
            "num_experts_per_tok",
            f"is {content['num_experts_per_tok']}, but `{count}` is {content[count]}",
        )
