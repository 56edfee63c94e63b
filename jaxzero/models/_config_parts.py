"""Read the structured parts of a decoder's `config.json`: heads, and which layers have a window."""

from collections.abc import Iterable, Mapping
from typing import Any

from .._checked_json import JsonKeys as Content
from .._checked_json import shown
from ._config_json import CHOOSE_ANOTHER
from ._latent_config import LatentConfig


def ordinary_heads(keys: Content, sizes: Mapping[str, str]) -> dict[str, Any]:
    """The fields `head_size` and `num_key_value_heads`; `sizes` are the names of other keys."""
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
    """The same without grouped queries, for families that know neither of the two keys."""
    num_heads, hidden_size = keys[sizes["num_heads"]], keys[sizes["hidden_size"]]
    if hidden_size % num_heads:
        raise keys.error(
            sizes["hidden_size"],
            f"must be a multiple of `{sizes['num_heads']}`; got {hidden_size} and {num_heads}",
        )
    return {"head_size": hidden_size // num_heads, "num_key_value_heads": num_heads}


def latent_heads(keys: Content, sizes: Mapping[str, str]) -> dict[str, Any]:
    """The fields of latent attention, in which all heads have keys of their own."""
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
    """No layer has a sliding window."""
    return ()


def window_everywhere(content: Content, num_layers: int) -> tuple[int, ...]:
    """All layers have a sliding window, if its size is given."""
    return tuple(range(num_layers)) if content.get("sliding_window") else ()


def window_if_used(content: Content, num_layers: int) -> tuple[int, ...]:
    """All layers have a sliding window, if `use_sliding_window` is set."""
    return window_everywhere(content, num_layers) if content.get("use_sliding_window") else ()


def window_late(content: Content, num_layers: int) -> tuple[int, ...]:
    """Later layers have a sliding window, if `use_sliding_window` is set."""
    late = range(content.get("max_window_layers", 28), num_layers)
    return _window_by_type(content, num_layers, late) if content.get("use_sliding_window") else ()


def window_alternating(content: Content, num_layers: int) -> tuple[int, ...]:
    """The first and every second layer after it have a sliding window."""
    return _window_by_type(content, num_layers, range(0, num_layers, 2))


def window_but_every_nth(content: Content, num_layers: int) -> tuple[int, ...]:
    """All layers except every nth have a sliding window."""
    n = content.get("sliding_window_pattern", content.get("_sliding_window_pattern", 6))
    return _window_by_type(content, num_layers, [i for i in range(num_layers) if (i + 1) % n])


def window_unrotated(content: Content, num_layers: int) -> tuple[int, ...]:
    """Layers without rotation have a sliding window, if `use_sliding_window` is set."""
    if content.get("use_sliding_window"):
        return _window_by_type(content, num_layers, unrotated_layers(content, num_layers))
    if "sliding_attention" in (content.get("layer_types") or ()):
        raise content.error("layer_types", "has windows, but `use_sliding_window` is false")
    return ()


def unrotated_layers(content: Content, num_layers: int) -> tuple[int, ...]:
    """Layers without rotation: those marked 0, or every nth."""
    marks = content.get("no_rope_layers")
    if marks is None:
        every = content.get("no_rope_layer_interval", 4)
        return tuple(range(every - 1, num_layers, every))
    if len(marks) < num_layers:
        raise content.error("no_rope_layers", f"has {len(marks)} entries for {num_layers} layers")
    return tuple(i for i in range(num_layers) if not marks[i])


def _window_by_type(
    content: Content, num_layers: int, unless_said: Iterable[int]
) -> tuple[int, ...]:
    if not content.get("sliding_window"):
        return ()
    types = content.get("layer_types")
    if types is None:
        return tuple(unless_said)
    if len(types) != num_layers:
        raise content.error("layer_types", f"has {len(types)} entries for {num_layers} layers")
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise content.error(
            "layer_types",
            f"holds {shown(unknown[0])}; the decoder computes 'full_attention' and "
            "'sliding_attention'",
            remedy=CHOOSE_ANOTHER,
        )
    return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
