"""Read the structured parts of a decoder's `config.json`: heads, and which layers have a window.

The tables of families name these functions. Functions of heads take a map `sizes` from our names of
sizes to the keys of the file, and return fields of `DecoderConfig`. The others return indices of
layers.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from .._checked_json import JsonKeys as Content
from ._config_json import windowed_layers
from ._latent_config import LatentConfig


def ordinary_heads(keys: Content, sizes: Mapping[str, str]) -> dict[str, Any]:
    """The fields `head_size` and `num_key_value_heads`."""
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
    """The fields of `ordinary_heads`, for families without `head_dim` and `num_key_value_heads`."""
    num_heads, hidden_size = keys[sizes["num_heads"]], keys[sizes["hidden_size"]]
    if hidden_size % num_heads:
        raise keys.error(
            sizes["hidden_size"],
            f"must be a multiple of `{sizes['num_heads']}`; got {hidden_size} and {num_heads}",
        )
    return {"head_size": hidden_size // num_heads, "num_key_value_heads": num_heads}


def latent_heads(keys: Content, sizes: Mapping[str, str]) -> dict[str, Any]:
    """The fields of latent attention, which has as many heads of keys as of queries."""
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
    """Layers from `max_window_layers` on have a sliding window, if `use_sliding_window` is set."""
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
    """Layers without rotation: those marked 0 in `no_rope_layers`, or else every nth."""
    marks = content.get("no_rope_layers")
    if marks is None:
        every = content.get("no_rope_layer_interval", 4)
        return tuple(range(every - 1, num_layers, every))
    if len(marks) < num_layers:
        raise content.error("no_rope_layers", f"has {len(marks)} entries for {num_layers} layers")
    return tuple(i for i in range(num_layers) if not marks[i])


def _window_by_type(content: Content, num_layers: int, default: Iterable[int]) -> tuple[int, ...]:
    """Layers with a window according to `layer_types`; `default` if it is missing."""
    if not content.get("sliding_window"):
        return ()
    layers = windowed_layers(content, num_layers, "the decoder")
    return tuple(default) if layers is None else layers
