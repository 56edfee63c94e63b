"""Translate the `config.json` of a decoder to the fields of `DecoderConfig`, by its family's table.

Files of transformers 4 and 5 differ in where they keep rotation and the number of experts: both are
read.
"""

from pathlib import Path
from typing import Any

from .._checked_json import JsonKeys as Content
from ._activations import read_activation
from ._config_json import check_only, config_keys, family_of
from ._config_rope import read_rope
from ._family import DEFAULTS, Family, Fields
from ._layer_norm_families import LAYER_NORM_FAMILIES
from ._rms_norm_families import RMS_NORM_FAMILIES

DECODER_FAMILIES: dict[str, Family] = LAYER_NORM_FAMILIES | RMS_NORM_FAMILIES


def decoder_fields(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of `DecoderConfig` that a `config.json` describes.

    Args:
        content: the content of the file.
        path: where it is, for messages.

    Raises:
        ValueError: see `DecoderConfig.from_json`.
    """
    family = family_of(content, path, DECODER_FAMILIES, "decoders")
    keys = config_keys(
        content,
        path,
        defaults={**DEFAULTS, **family.defaults},
        kinds=family.kinds,
    )
    keys.require(*family.sizes.values())
    _check_meaning(keys, family)
    fields: dict[str, Any] = {ours: keys[key] for ours, key in family.sizes.items()}
    fields |= {ours: keys[key] for ours, key in family.names.items()}
    fields |= family.fixed
    fields["activation"] = read_activation(keys, family.activation, "decoder")
    fields |= family.heads(keys, family.sizes)
    layers = fields["num_layers"]
    fields["sliding_layers"] = family.windows(keys, layers)
    fields["sliding_window"] = keys["sliding_window"] if fields["sliding_layers"] else None
    if family.experts is not None:
        fields["experts"] = family.experts(keys, layers)
    if family.has_rope:
        fields |= read_rope(
            keys,
            head_size=_rotated_size(fields),
            base_key=family.base_key,
            sliding_base_key=family.sliding_base_key,
            part_key=family.part_key,
        )
    return fields | family.more(keys, fields)


def _rotated_size(fields: Fields) -> int:
    """Size of a head, without what latent attention never rotates."""
    latent = fields.get("latent")
    return fields["head_size"] - (0 if latent is None else latent.plain_size)


def _check_meaning(keys: Content, family: Family) -> None:
    for key, only in family.required.items():
        check_only(keys, key, only, "decoder")
    if keys.get("quantization_config") is not None:
        raise keys.error(
            "quantization_config",
            "says that its weights are codes of numbers",
            remedy="Choose the checkpoint that was not quantised.",
        )
