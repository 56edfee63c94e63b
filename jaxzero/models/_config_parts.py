"""Read the structured parts of a decoder's `config.json`: windows, experts, rotation.

Files of transformers 4 and 5 differ: 4 has `rope_theta` beside `rope_scaling`, 5 has both in
`rope_parameters`, for each kind of layer where they differ; 4 writes `num_experts` where 5 writes
`num_local_experts`. Both are read.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ._config_json import check_present
from ._experts_config import ExpertsConfig
from ._rope import Rope
from ._rope_scaling import LinearScaling, Llama3Scaling, LongScaling, Scaling

Content = Mapping[str, Any]


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
        raise ValueError(
            f"`layer_types` in `config.json` has {len(types)} entries for {num_layers} layers. "
            "Copy or download the checkpoint again."
        )
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ValueError(
            f"`layer_types` in `config.json` holds {unknown[0]!r}; the decoder computes "
            "'full_attention' and 'sliding_attention'. Choose another checkpoint."
        )
    return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")


def mixtral_experts(content: Content, num_layers: int, path: Path) -> ExpertsConfig:
    """Experts in every layer, of width `intermediate_size`."""
    check_present(content, {"num_local_experts", "num_experts_per_tok"}, path)
    return ExpertsConfig(
        num_experts=content["num_local_experts"],
        num_experts_per_token=content["num_experts_per_tok"],
        intermediate_size=content["intermediate_size"],
        normalize=True,
    )


def qwen3_experts(content: Content, num_layers: int, path: Path) -> ExpertsConfig | None:
    """Experts in every nth layer except those listed, with a separate width."""
    count = "num_local_experts" if "num_local_experts" in content else "num_experts"
    check_present(content, {count, "num_experts_per_tok", "moe_intermediate_size"}, path)
    every = content.get("decoder_sparse_step", 1)
    named = content.get("mlp_only_layers") or ()
    dense = [i for i in range(num_layers) if (i + 1) % every or i in named]
    if content[count] == 0 or len(dense) == num_layers:
        return None
    return ExpertsConfig(
        num_experts=content[count],
        num_experts_per_token=content["num_experts_per_tok"],
        intermediate_size=content["moe_intermediate_size"],
        normalize=content.get("norm_topk_prob", False),
        dense_layers=tuple(dense),
    )


def read_rope(
    content: Content, path: Path, *, head_size: int, sliding_key: str | None, partial: bool
) -> dict[str, Rope]:
    """The fields `rope` and, for families that have it, `sliding_rope` of `DecoderConfig`.

    Args:
        content: the file, with `rope_theta` where it is silent.
        path: where it is, for messages.
        head_size: size of a head, all of which is rotated, or a part.
        sliding_key: where transformers 4 kept the base of layers with a window; None if all layers
            rotate alike.
        partial: whether `partial_rotary_factor` means something in this family.
    """
    scaling, given = content.get("rope_scaling") or {}, content.get("rope_parameters") or {}
    if sliding_key is None:
        given = scaling or given  # where a file has both, as transformers 5
        return {"rope": _rope(given, content["rope_theta"], content, path, head_size, partial)}
    if not content.get("sliding_window"):
        raise ValueError(
            f"`sliding_window` in {str(path)!r} is null, but some layers rotate as those with a "
            "window do, which the decoder does not compute. Choose another checkpoint."
        )
    # Nested by kind of layer, or as transformers 4 wrote it: a scaling of the others alone.
    full = given.get("full_attention") or ({} if "sliding_attention" in given else given)
    full = {**full, **scaling}
    sliding = given.get("sliding_attention") or {}
    bases = content["rope_theta"], content[sliding_key]
    return {
        "rope": _rope(full, bases[0], content, path, head_size, partial),
        "sliding_rope": _rope(sliding, bases[1], content, path, head_size, partial),
    }


def _rope(
    given: Content, base: Any, content: Content, path: Path, head_size: int, partial: bool
) -> Rope:
    part = given.get("partial_rotary_factor", content.get("partial_rotary_factor")) or 1.0
    if part != 1 and not partial:
        raise ValueError(
            f"`partial_rotary_factor` in {str(path)!r} is {part}, which "
            f"{content['model_type']!r} models do not use here. Choose another checkpoint."
        )
    return Rope(
        rotary_size=int(head_size * part),
        base=float(given.get("rope_theta") or base),
        scaling=_scaling(given, content, path),
    )


def _scaling(given: Content, content: Content, path: Path) -> Scaling | None:
    kind = given.get("rope_type") or given.get("type") or "default"
    if content["model_type"] == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # names of its first releases
    needed = {
        "default": set(),
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
        "longrope": {"short_factor", "long_factor"},
    }
    if kind not in needed:
        raise ValueError(
            f"`rope_type` in {str(path)!r} is {kind!r}; the decoder computes "
            f"{', '.join(needed)}. Choose a checkpoint without this scaling."
        )
    check_present(given, needed[kind], path)
    longest = content["max_position_embeddings"]
    # Beside the scaling (Phi-3), in it (Llama), or nowhere.
    trained = content.get(
        "original_max_position_embeddings", given.get("original_max_position_embeddings", longest)
    )
    if kind == "linear":
        return LinearScaling(factor=float(given["factor"]))
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(given["factor"]),
            slow_turns=float(given["low_freq_factor"]),
            fast_turns=float(given["high_freq_factor"]),
            trained_length=trained,
        )
    if kind == "longrope":
        return LongScaling(
            short=tuple(map(float, given["short_factor"])),
            long=tuple(map(float, given["long_factor"])),
            trained_length=trained,
            magnitude=_magnitude(given, longest / trained, trained),
        )
    return None


def _magnitude(given: Content, stretch: float, trained: int) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    stretch = given.get("factor") or stretch
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(trained))
