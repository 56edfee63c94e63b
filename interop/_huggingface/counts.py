"""Compare the number of layers and experts in `config.json` with the names of the tensors.

Building a model takes time and memory for each layer, and naming its tensors for each expert. So a
wrong count is refused before: the names are in the headers of the files.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxzero.interop._rules import Rule
from jaxzero.interop._tensors import Checkpoint
from jaxzero.models import read_config

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # between dots
_VARIABLE = re.compile(r"\{(\w+)\}")


def check_counts(
    rules: Iterable[Rule], checkpoint: Checkpoint, config: Any, directory: Path | str
) -> None:
    """Raise if a checkpoint has tensors of fewer layers or experts than its `config.json` says.

    Call it before the model is built.

    Args:
        rules: rules of the model, for layers in a list or stacked.
        checkpoint: the opened checkpoint.
        config: has `num_layers`, and `experts` if there are any.
        directory: of `config.json`, for messages.

    Raises:
        ValueError: the message names the key and the number of layers or experts in the file.
    """
    experts = getattr(config, "experts", None)
    counts = {"layer": config.num_layers, "expert": experts.num_experts if experts else 0}
    found = _found(rules, checkpoint)
    content, path = read_config(directory)
    for what, count in counts.items():
        # If no name fits a rule, a later message says so; there are still not more than tensors.
        held = found.get(what, 0) or len(checkpoint)
        if count > held:
            key = next((key for key, n in content.items() if what in key and n == count), what)
            tensors = f"tensors of {held} {what}s" if found.get(what) else f"{held} tensors"
            raise ValueError(
                f"`{key}` in {str(path)!r} is {count}, but {str(checkpoint.path)!r} holds "
                f"{tensors}. They belong to different models, or a part of the checkpoint is "
                "missing: copy or download both again."
            )


def _found(rules: Iterable[Rule], names: Iterable[str]) -> dict[str, int]:
    """Number of layers and experts of which there are tensors."""
    counted: dict[str, list[str]] = {}  # name without its numbers -> what each number counts
    for rule in rules:
        if "layers." in rule.ours[0]:
            for theirs in rule.theirs:
                variables = _VARIABLE.findall(theirs)
                kinds = ["layer" if name == "i" else "expert" for name in variables]
                counted[_VARIABLE.sub("{}", theirs)] = kinds
    found: dict[str, set[str]] = {}
    for name in names:
        kinds = counted.get(_NUMBER.sub("{}", name), ())
        for what, number in zip(kinds, _NUMBER.findall(name), strict=False):
            found.setdefault(what, set()).add(number)
    return {what: len(numbers) for what, numbers in found.items()}
