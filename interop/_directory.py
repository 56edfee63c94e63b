"""A model in a Hugging Face directory: its weights read and written by rules, the rest carried."""

import fnmatch
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxzero.interop._atomic import new_directory
from jaxzero.interop._convert import to_ours, to_theirs
from jaxzero.interop._file_tensor import tensors_in
from jaxzero.interop._rules import Rule
from jaxzero.interop._tensor import ArrayTensor, LazyTensor
from jaxzero.interop._tree import named_leaves

# What makes a directory usable besides its weights. Files, or folders with files.
_CARRIED_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling",
)


def lazy_params(
    abstract: Any,
    rules: Iterable[Rule],
    held: Mapping[str, LazyTensor],
    directory: Path,
    *,
    ignore: Iterable[str],
    remedy: str,
    dtype: np.typing.DTypeLike | None,
) -> Any:
    """The tree `abstract` of shapes, with tensors of a checkpoint for leaves. Nothing is read.

    Args:
        abstract: the parameters that the model has.
        rules: the table.
        held: the tensors of the checkpoint.
        directory: where they lie, for messages.
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
        held,
        where=f"in {str(directory)!r}",
        ignore=ignore,
        remedy=remedy,
    )
    if dtype is not None:
        loaded = {path: tensor.astype(dtype) for path, tensor in loaded.items()}
    return named.rebuild(loaded)


def is_stacked(params: Any) -> bool:
    """Whether a tree has its layers in one stack, to be scanned, and not in a list."""
    return not any(re.match(r"layers\.\d+\.", path) for path in named_leaves(params).leaves)


def export_directory(
    params: Any,
    abstract: Any,
    rules: Iterable[Rule],
    directory: Path | str,
    *,
    source: Path | str,
    carried: Iterable[str] = (),
) -> Path:
    """Write parameters under the names that `rules` give them; the directory appears whole.

    Args:
        params: full arrays.
        abstract: the tree that `params` must be, of shapes.
        rules: the table.
        directory: where to write.
        source: whose `config.json` and tokenizer files are carried along.
        carried: names of tensors that are copied from `source`, with `*` for any text.

    Raises:
        ValueError: `params` is another tree than `abstract`, or `directory` is `source`.
    """
    directory, source = Path(directory), Path(source)
    if directory.resolve() == source.resolve():
        raise ValueError(
            f"`directory` and `source` are both {str(source)!r}. Export to another directory, so "
            "that the checkpoint that was loaded stays as it is."
        )
    tensors = _to_tensors(params, abstract, rules)
    dtype = next(iter(tensors.values())).dtype.name
    held = tensors_in(source)
    tensors |= {
        name: held[name].read()
        for name in held
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in carried)
    }
    with new_directory(directory) as folder:
        _write_config(source, folder, dtype)
        for name in _CARRIED_FILES:
            _copy(source / name, folder / name)
        # Sorted, so that equal parameters make equal files; metadata as transformers writes it.
        save_file(dict(sorted(tensors.items())), folder / "model.safetensors", {"format": "pt"})
    return directory


def _to_tensors(params: Any, abstract: Any, rules: Iterable[Rule]) -> dict[str, np.ndarray]:
    wanted, given = named_leaves(abstract).leaves, named_leaves(params).leaves
    if given.keys() != wanted.keys():
        differing = sorted(given.keys() ^ wanted.keys())
        raise ValueError(
            f"`params` is not the parameter tree of `source`: {differing[0]!r} is in only one of "
            f"them ({len(differing)} such paths). Pass the tree that was loaded from it, with "
            "arrays for leaves."
        )
    for path, value in given.items():
        if value.shape != wanted[path].shape:
            raise ValueError(
                f"`params` has shape {value.shape} at {path!r}, the model has "
                f"{wanted[path].shape}. Sharded leaves may be padded: pass `zero.unshard(params)`."
            )
    ours = {path: ArrayTensor(np.asarray(value), path) for path, value in given.items()}
    # safetensors writes memory as it lies, so a transposed view must be copied into order.
    return {
        name: np.ascontiguousarray(tensor.read()) for name, tensor in to_theirs(rules, ours).items()
    }


def _write_config(source: Path, folder: Path, dtype: str) -> None:
    content = json.loads((source / "config.json").read_text())
    content |= {key: dtype for key in ("dtype", "torch_dtype") if key in content}  # new name, old
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.is_file():
        shutil.copyfile(source, target)
