"""Read and validate the `config.json` of a Hugging Face directory."""

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from .._checked_json import JsonKeys, Kind, exactly, read_json, shown
from .._text import to_download
from ._config_keys import KEYS

Config = TypeVar("Config")
Row = TypeVar("Row")

CHOOSE_ANOTHER = "Choose another checkpoint, or write its model beside those of `jaxzero.models`."
_REMEDY = "Correct the file, or copy or download the checkpoint again."
_WEIGHTS = (".safetensors", ".bin", ".index.json")
_ADAPTER = (
    " This one holds an adapter of PEFT, such as LoRA: merge it into its model with "
    "`peft.AutoPeftModelForCausalLM.from_pretrained(directory).merge_and_unload()"
    ".save_pretrained(merged)`, and give `merged`."
)
_OF_DECODERS = (
    " Decoders are read by `jaxzero.interop.load_decoder`, and trained by `jaxzero train`."
)
_MISSING = (
    "Save the checkpoint again with `save_pretrained` of a current transformers release, which "
    "writes every size."
)
# Name of an activation in `config.json`: its key in `ACTIVATIONS`, which has the functions.
_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def read_config(path: Path | str) -> tuple[dict[str, Any], Path]:
    """Read a `config.json`; return its content, with unchecked values, and its path.

    Args:
        path: the file, its directory, or a file of weights (or their index) in that directory.

    Raises:
        TypeError: `path` is not a path.
        ValueError: there is no such file, or it is not a JSON object (see `read_json`).
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"The directory of a model must be a path; got a {type(path).__name__}. Save a model "
            "first, `model.save_pretrained(directory)`, and give its directory."
        )
    path = Path(path)
    if path.is_file() and path.name.endswith(_WEIGHTS):
        path = path.parent
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        adapter = (path.parent / "adapter_config.json").is_file()
        raise ValueError(
            f"There is no `config.json` at {str(path)!r}. Give a directory that "
            f"`save_pretrained` of Hugging Face transformers wrote.{to_download(path)}"
            + (_ADAPTER if adapter else "")
        )
    return read_json(path, remedy=_REMEDY), path


def family_of(
    content: Mapping[str, Any], path: Path, families: Mapping[str, Row], models: str
) -> Row:
    """Return the row of `families` for the `model_type` of a `config.json`.

    Args:
        content: the content of the file.
        path: where it is, for messages.
        families: a table with a row for each `model_type`.
        models: the kind of models in the table, for messages: "encoders" or "decoders".

    Raises:
        ValueError: `model_type` is missing, or not in the table.
    """
    name = content.get("model_type")
    if not isinstance(name, str) or name not in families:
        raise ValueError(
            f"`model_type` in {str(path)!r} is {shown(name)}; {models} are read of the families "
            f"{', '.join(sorted(families))}. Choose such a checkpoint, or load the weights into a "
            "model of your own: `jaxzero.interop.match` proposes the rules (docs/howto/rules.md)."
            + (_OF_DECODERS if models == "encoders" else "")
        )
    return families[name]


def config_keys(
    content: Mapping[str, Any],
    path: Path,
    *,
    defaults: Mapping[str, Any] | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> JsonKeys:
    """Wrap a `config.json` so that its values are checked against `KEYS` when they are read.

    Args:
        content: the content of the file.
        path: where it is, for messages.
        defaults: values of keys that the file does not have.
        kinds: key -> what it may hold, where a family differs from `KEYS`.
    """
    return JsonKeys(
        content,
        {**KEYS, **(kinds or {})},
        where=repr(str(path)),
        defaults=defaults,
        remedy=_REMEDY,
        missing=_MISSING,
    )


def check_only(keys: JsonKeys, key: str, only: Any, model: str) -> None:
    """Raise `ValueError` unless a key has the value `only`, the only one that our model computes.

    A null counts as False or 0. `model` names the model in the message.
    """
    given = keys.get(key, only)
    if not exactly(only).accepts(given):
        raise keys.error(
            key,
            f"must be {shown(only)}; got {shown(given)}. The {model} computes nothing else",
            remedy=CHOOSE_ANOTHER,
        )


def windowed_layers(keys: JsonKeys, num_layers: int, model: str) -> tuple[int, ...] | None:
    """Return the indices of the layers that have a sliding window according to `layer_types`.

    Args:
        keys: the `config.json`.
        num_layers: the number of layers.
        model: the model that computes the layers, for messages.

    Returns:
        The indices in ascending order; None if `layer_types` is missing or null.

    Raises:
        ValueError: `layer_types` has not one entry for each layer, or names an unknown type.
    """
    types = keys.get("layer_types")
    if types is None:
        return None
    if len(types) != num_layers:
        raise keys.error("layer_types", f"has {len(types)} entries for {num_layers} layers")
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise keys.error(
            "layer_types",
            f"holds {shown(unknown[0])}; {model} computes 'full_attention' and 'sliding_attention'",
            remedy=CHOOSE_ANOTHER,
        )
    return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")


def make_config(make: type[Config], fields: Mapping[str, Any], path: Path) -> Config:
    """Make a config of class `make` from fields that were read from `path`.

    Raises:
        TypeError: `fields` names a field that `make` does not have.
        ValueError: the fields contradict each other; the message names the file.
    """
    config: Any = make  # `Config` may be any class, and here is a dataclass
    names = [field.name for field in dataclasses.fields(config)]
    if unknown := sorted(fields.keys() - {*names}):
        near = difflib.get_close_matches(unknown[0], names, 1, cutoff=0.5)
        raise TypeError(
            f"`{unknown[0]}` is no field of `{make.__name__}`"
            + (f"; did you mean `{near[0]}`?" if near else f", which has {', '.join(names)}.")
        )
    try:
        return make(**fields)
    except ValueError as error:
        raise ValueError(f"{error} The values are those of {str(path)!r}.") from error


def read_activation(keys: JsonKeys, key: str, model: str) -> str:
    """Return our name of the activation function that a key of a `config.json` names.

    Args:
        keys: the `config.json`.
        key: the key.
        model: "decoder" or "encoder", for messages.

    Raises:
        ValueError: the model does not have this function, or the value is no text.
    """
    given = keys[key]
    if given not in _NAMES:
        raise keys.error(
            key,
            f"is {shown(given)}; the {model} computes {', '.join(_NAMES)}",
            remedy=CHOOSE_ANOTHER,
        )
    return _NAMES[given]
