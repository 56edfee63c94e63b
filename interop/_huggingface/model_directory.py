"""A model of ours in a Hugging Face directory: its parameters by rules, in and out."""

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxzero.interop._load import tensors_from
from jaxzero.interop._rules import Rule, to_ours
from jaxzero.interop._safetensors import save_tensors
from jaxzero.interop._tensors import Checkpoint, named_leaves


def load_params(
    abstract: Any,
    rules: Iterable[Rule],
    checkpoint: Checkpoint,
    *,
    ignore: Iterable[str],
    remedy: str,
    dtype: np.typing.DTypeLike | None,
) -> Any:
    """The tree `abstract` of shapes, with lazy tensors of a checkpoint for leaves.

    Args:
        abstract: the parameters that the model has.
        rules: the table of its family.
        checkpoint: that holds them.
        ignore: names of tensors that are no parameters, with `*` for any text.
        remedy: what to do about missing and unknown tensors, for messages.
        dtype: of the parameters; as in the checkpoint if None.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape than the model's.
    """
    named = named_leaves(abstract)
    loaded = to_ours(
        rules,
        {path: leaf.shape for path, leaf in named.leaves.items()},
        checkpoint,
        where=f"in {str(checkpoint.path)!r}",
        ignore=ignore,
        remedy=remedy,
    )
    if dtype is not None:
        loaded = {path: tensor.astype(dtype) for path, tensor in loaded.items()}
    return named.rebuild(loaded)


def save_params(
    params: Any,
    abstract: Any,
    rules: Iterable[Rule],
    directory: Path | str,
    *,
    source: Checkpoint,
    carried: Iterable[str],
) -> Path:
    """The inverse of `load_params`, with the rest of the directory `source`.

    Args:
        params: whole arrays, or those of `zero.shard`.
        abstract: the parameters that the model has.
        rules: the table of its family.
        directory: where to write.
        source: the checkpoint that was loaded.
        carried: names of tensors that are copied from it, with `*` for any text.

    Raises:
        ValueError: `params` is another tree than `abstract`, or `directory` is `source`.
    """
    tensors = tensors_from(params, rules, like=abstract)
    for name, held in source.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in carried):
            tensors[name] = held
    return save_tensors(tensors, directory, source=source.path)


def is_stacked(params: Any) -> bool:
    """Whether a tree has its layers in one stack, to be scanned, and not in a list."""
    return not any(re.match(r"layers\.\d+\.", path) for path in named_leaves(params).leaves)
