"""Read the structured parts of a decoder's `config.json`: windows, experts, rotation.

Files of transformers 4 and 5 differ: 4 has `rope_theta` beside `rope_scaling`, 5 has both in
`rope_parameters`, for each kind of layer where they differ; 4 writes `num_experts` where 5 writes
`num_local_experts`. Both are read.
"""

import math
from collections.abc import Iterable

from .._checked_json import JsonKeys as Content
from .._checked_json import shown
from ._config_json import CHOOSE_ANOTHER
from ._experts_config import ExpertsConfig
from ._rope import Rope
from ._rope_scaling import LinearScaling, Llama3Scaling, LongScaling, Scaling


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


def mixtral_experts(content: Content, num_layers: int) -> ExpertsConfig:
    """Experts in every layer, of width `intermediate_size`."""
    content.require("num_local_experts", "num_experts_per_tok")
    _check_chosen(content, "num_local_experts")
    return ExpertsConfig(
        num_experts=content["num_local_experts"],
        num_experts_per_token=content["num_experts_per_tok"],
        intermediate_size=content["intermediate_size"],
        normalize=True,
    )


def qwen3_experts(content: Content, num_layers: int) -> ExpertsConfig | None:
    """Experts in every nth layer except those listed, with a separate width."""
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


def _check_chosen(content: Content, count: str) -> None:
    if not content["num_experts_per_tok"] <= content[count]:
        raise content.error(
            "num_experts_per_tok",
            f"is {content['num_experts_per_tok']}, but `{count}` is {content[count]}",
        )


def read_rope(
    content: Content, *, head_size: int, sliding_key: str | None, partial: bool
) -> dict[str, Rope]:
    """The fields `rope` and, for families that have it, `sliding_rope` of `DecoderConfig`.

    Args:
        content: the file, with `rope_theta` where it is silent.
        head_size: size of a head, all of which is rotated, or a part.
        sliding_key: where transformers 4 kept the base of layers with a window; None if all layers
            rotate alike.
        partial: whether `partial_rotary_factor` means something in this family.
    """
    scaling, given = content.section("rope_scaling"), content.section("rope_parameters")
    if sliding_key is None:
        given = scaling or given  # where a file has both, as transformers 5
        return {"rope": _rope(given, content["rope_theta"], content, head_size, partial)}
    if not content.get("sliding_window"):
        raise content.error(
            "sliding_window",
            "is null, but some layers rotate as those with a window do, which the decoder does "
            "not compute",
            remedy=CHOOSE_ANOTHER,
        )
    # Nested by kind of layer, or as transformers 4 wrote it: a scaling of the others alone.
    full, sliding = given.section("full_attention"), given.section("sliding_attention")
    if not full and not sliding:
        full = given
    bases = content["rope_theta"], content[sliding_key]
    return {
        "rope": _rope(scaling.over(full), bases[0], content, head_size, partial),
        "sliding_rope": _rope(sliding, bases[1], content, head_size, partial),
    }


def _rope(given: Content, base: float, content: Content, head_size: int, partial: bool) -> Rope:
    part = given.get("partial_rotary_factor", content.get("partial_rotary_factor")) or 1.0
    if part != 1 and not partial:
        raise content.error(
            "partial_rotary_factor",
            f"is {part}, which {content['model_type']!r} models do not use here",
            remedy=CHOOSE_ANOTHER,
        )
    rotary_size = int(head_size * part)
    if rotary_size < 2 or rotary_size % 2:
        raise content.error(
            "partial_rotary_factor" if part != 1 else "head_dim",
            f"makes {rotary_size} of the {head_size} numbers of a head rotate; it must be an even "
            "number of at least 2, as they rotate in pairs",
        )
    return Rope(
        rotary_size=rotary_size,
        base=given.get("rope_theta", base),
        scaling=_scaling(given, content, rotary_size // 2),
    )


def _scaling(given: Content, content: Content, num_pairs: int) -> Scaling | None:
    kind = given.get("rope_type") or given.get("type") or "default"
    if content["model_type"] == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # names of its first releases
    needed = {
        "default": (),
        "linear": ("factor",),
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
    # Beside the scaling (Phi-3), in it (Llama), or nowhere.
    key = "original_max_position_embeddings"
    trained = content.get(key, given.get(key, content["max_position_embeddings"]))
    if kind == "linear":
        return LinearScaling(factor=given["factor"])
    if kind == "llama3":
        return _llama3(given, trained)
    if kind == "longrope":
        return _longrope(given, content, trained, num_pairs)
    return None


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
