"""Read the rotation of queries and keys in a decoder's `config.json`.

Files of transformers 4 and 5 differ: 4 has `rope_theta` beside `rope_scaling`, 5 has both in
`rope_parameters`, for each kind of layer where they differ. Both are read.
"""

import dataclasses
import math

from .._checked_json import JsonKeys as Content
from .._checked_json import shown
from ._config_json import CHOOSE_ANOTHER
from ._rope import Rope
from ._rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Scaling,
    YarnScaling,
)


def read_rope(
    content: Content,
    *,
    head_size: int,
    base_key: str,
    sliding_base_key: str | None,
    part_key: str | None,
) -> dict[str, Rope]:
    """The fields `rope` and, for families that have it, `sliding_rope` of `DecoderConfig`.

    Args:
        content: the file, with a default of `base_key`.
        head_size: size of a head, all of which is rotated, or a part.
        base_key: where transformers 4 kept the base.
        sliding_base_key: where it kept the base of layers with a window; None if all layers rotate
            alike.
        part_key: where it kept the part of a head that is rotated; None if all of it is.
    """
    scaling, given = content.section("rope_scaling"), content.section("rope_parameters")
    if sliding_base_key is None:
        given = scaling or given  # where a file has both, as transformers 5
        return {"rope": _rope(given, content[base_key], content, head_size, part_key)}
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
    # Beside the scaling (Phi-3), in it (Llama), or nowhere.
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
    """What Yarn multiplies sines and cosines by, for a text longer by `factor`."""
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
