"""Load and save the parameters of a `jaxzero.models` model in a Hugging Face directory."""

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

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
    """Return the tree `abstract` with lazy tensors of a checkpoint as leaves.

    Args:
        abstract: shapes of the model's parameters.
        rules: rules of the model family.
        checkpoint: the opened checkpoint.
        ignore: patterns (with `*`) for names of tensors that are not parameters.
        remedy: advice about missing and unknown tensors, for messages.
        dtype: dtype of the parameters; None keeps that of the checkpoint.

    Raises:
        ValueError: a tensor is missing, unknown or has another shape than the model's.
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
    source: Path | str,
    checkpoint: Checkpoint,
    carried: Iterable[str],
    dtype: np.typing.DTypeLike | Literal["source"] | None,
) -> Path:
    """Write parameters, and copy the config and tokenizer of `source`: inverse of `load_params`.

    Args:
        params: full arrays, or shards from `zero.shard`.
        abstract: shapes of the model's parameters.
        rules: rules of the model family.
        directory: where to write.
        source: the directory that was loaded, or a file in it. DeepSpeed's `checkpoint.path` is
            that of a step in it, which has no config.
        checkpoint: the checkpoint in it.
        carried: patterns (with `*`) for names of tensors that are copied from `checkpoint`, if
            they are not parameters.
        dtype: dtype of the parameters; "source" for that of each tensor in `checkpoint`.

    Raises:
        ValueError: `params` and `abstract` differ, or `directory` is `source`.
    """
    as_there = isinstance(dtype, str) and dtype == "source"
    tensors = tensors_from(params, rules, like=abstract, dtype=checkpoint if as_there else dtype)
    for name, held in checkpoint.items():
        if name not in tensors and any(fnmatch.fnmatchcase(name, pattern) for pattern in carried):
            tensors[name] = held
    source = Path(source)
    return save_tensors(tensors, directory, source=source.parent if source.is_file() else source)


def is_stacked(params: Any) -> bool:
    """Return True if layers are stacked in one array per parameter (for a scan), not in a list."""
    return not any(re.search(r"(^|\.)layers\.\d+\.", path) for path in named_leaves(params).leaves)
