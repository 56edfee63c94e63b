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
_COUNTED = {"i": "layer", "e": "expert"}  # other variables count heads
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
    kinds = _kinds(rules)
    found = _found(kinds, checkpoint)
    content, path = read_config(directory)
    for what, count in counts.items():
        if not any(what in each for each in kinds.values()):
            continue  # all experts of a layer are one tensor, whose shape is compared later
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


def _kinds(rules: Iterable[Rule]) -> dict[str, list[str]]:
    """By the name of a tensor without its numbers: what each number counts."""
    kinds: dict[str, list[str]] = {}
    for rule in rules:
        if "layers." in rule.ours[0]:
            for theirs in rule.theirs:
                variables = _VARIABLE.findall(theirs)
                kinds[_VARIABLE.sub("{}", theirs)] = [_COUNTED.get(name, "") for name in variables]
    return kinds


def _found(kinds: dict[str, list[str]], names: Iterable[str]) -> dict[str, int]:
    """Number of layers and experts of which there are tensors."""
    found: dict[str, set[str]] = {}
    for name in names:
        each = kinds.get(_NUMBER.sub("{}", name), ())
        for what, number in zip(each, _NUMBER.findall(name), strict=False):
            found.setdefault(what, set()).add(number)
    return {what: len(numbers) for what, numbers in found.items()}
