"""Translate the `generation_config.json` of a Hugging Face directory to fields of `Sampling`."""

from pathlib import Path
from typing import Any

from .._checked_json import (
    ANYTHING,
    FLAG,
    JsonKeys,
    Kind,
    integer,
    list_of,
    number,
    optional,
    read_json,
)
from .._warnings import warn
from ._config_json import read_config

_REMEDY = "Correct the file, or copy or download the checkpoint again."
_ID, _IDS = integer(-1), list_of(integer(-1))  # in old files -1 stands for none
# One stop token or a list of them; read as a tuple.
_STOPS = Kind(
    "a token id or a list of them",
    lambda value: _ID.accepts(value) or _IDS.accepts(value),
    lambda value: tuple(value) if isinstance(value, list) else (value,),
)
# What changes the text and is not computed here: its value when it does nothing.
_NEUTRAL: dict[str, Any] = {
    "bad_words_ids": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "min_p": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "repetition_penalty": 1,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "typical_p": 1,
}
_KINDS: dict[str, Kind] = {
    "do_sample": optional(FLAG),
    "temperature": optional(number(0)),
    "top_k": optional(integer(0)),
    "top_p": optional(number(0)),
    "eos_token_id": optional(_STOPS),
    "pad_token_id": optional(_ID),
    **dict.fromkeys(_NEUTRAL, ANYTHING),
}


def sampling_fields(directory: Path) -> tuple[dict[str, Any], Path]:
    """The fields of `Sampling` that a directory describes, and the file they are from.

    Raises:
        ValueError: see `Sampling.from_json`.
    """
    path = directory / "generation_config.json"
    if path.exists():
        content = read_json(path, remedy=_REMEDY)
    else:
        content, path = read_config(directory)
        content = {key: content[key] for key in ("eos_token_id", "pad_token_id") if key in content}
    keys = JsonKeys(content, _KINDS, where=repr(str(path)), remedy=_REMEDY, missing=_REMEDY)
    others = [
        key for key, neutral in _NEUTRAL.items() if keys.get(key) not in (None, neutral, [], {})
    ]
    if others:
        warn(
            f"{str(path)!r} sets {', '.join(f'`{key}`' for key in others)}, which jaxzero does not "
            "compute: the text will differ from that of transformers."
        )
    stops = tuple(token for token in keys.get("eos_token_id") or () if token >= 0)
    pads = [token for token in (keys.get("pad_token_id"), *stops, 0) if token not in (None, -1)]
    fields: dict[str, Any] = {"stop_tokens": stops, "pad_token": pads[0]}
    if keys.get("do_sample"):
        top_k = keys.get("top_k", 50)  # the default of transformers; 0 is none
        fields["top_k"] = top_k or None
        for key in ("temperature", "top_p"):
            value = keys.get(key)
            fields[key] = 1.0 if value is None else value
    return fields, path
