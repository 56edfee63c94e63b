"""Writing a checkpoint: safetensors files of bounded size, their index, config and tokenizer.

Every file is written by one process, the files in turn by all processes, and a tensor that lies on
devices of several is gathered by all just before one of them writes it. So no process holds more
than its shards and one tensor, and saving moves over the network what gathering the weights for
one forward pass does. The alternative, every process writing its own byte ranges into shared
files, moves nothing; but a slice of a transposed matrix is many short ranges, and file systems that
several machines share lock, or cache, whole pages: slow at best.
"""

import collections
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxzero.interop._tensors import LazyTensor

from .atomic import new_directory
from .header import check_writable, file_order
from .read import INDEX, SINGLE
from .write_file import SafetensorsWriter

# What makes a directory usable besides its weights: files, or folders with files, by patterns.
_CARRIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "modules.json",
    "preprocessor_config.json",
    "sentence_bert_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "[0-9]_*",  # modules of sentence-transformers, such as 1_Pooling
)
# What an earlier checkpoint consists of, which a new one replaces.
_OWN = ("*.safetensors", INDEX, "config.json", *_CARRIED)


def save_tensors(
    tensors: Mapping[str, LazyTensor],
    directory: Path | str,
    *,
    max_shard_bytes: int = 5 * 10**9,
    source: Path | str | None = None,
) -> Path:
    """Write a checkpoint of safetensors files, which transformers and torch load. Collective.

    The directory appears whole or not at all, whichever process fails: it is written under a
    temporary name beside its place, flushed to disk, and renamed. A checkpoint that was there is
    replaced in the same manner; a directory that holds anything else is left as it is, with an
    error. With several processes (`jax.distributed`) all must call this, with
    the same names in the same order, on a file system that they share; each writes some files.

    Args:
        tensors: by name, such as `tensors_from` gives. Equal tensors make equal files.
        directory: where to write.
        max_shard_bytes: largest file, in bytes of tensors. A larger tensor has a file of its own.
        source: a directory whose `config.json` and tokenizer files are carried along; `dtype` in
            the config becomes what most of the floating-point elements have.

    Returns:
        `directory`.

    Raises:
        ValueError: there are no tensors, one has a dtype that the format has not, or `directory` is
            `source`, a file, or a directory that holds more than a checkpoint.
        RuntimeError: another process failed.
    """
    directory = Path(directory)
    if max_shard_bytes < 1:
        raise ValueError(f"`max_shard_bytes` must be at least 1; got {max_shard_bytes}.")
    if not tensors:
        raise ValueError("`tensors` must hold at least one tensor; got none.")
    for name, tensor in tensors.items():
        check_writable(name, tensor)
    if source is not None and directory.resolve() == Path(source).resolve():
        raise ValueError(
            f"`directory` and `source` are both {str(source)!r}. Write to another directory, so "
            "that the checkpoint that was loaded stays as it is."
        )
    files = _divide(tensors, max_shard_bytes)
    with new_directory(directory, replaces=_OWN) as folder:
        _write_files(folder, files)
        if jax.process_index() == 0:
            _write_index(folder, files)
            if source is not None:
                _carry(Path(source), folder, tensors)
    return directory


def _divide(tensors: Mapping[str, LazyTensor], max_bytes: int) -> dict[str, dict[str, LazyTensor]]:
    """Which file holds what: names in order, into files as full as they may be."""
    parts: list[dict[str, LazyTensor]] = [{}]
    filled = 0
    for name in sorted(tensors):
        if parts[-1] and filled + tensors[name].nbytes > max_bytes:
            parts.append({})
            filled = 0
        parts[-1][name] = tensors[name]
        filled += tensors[name].nbytes
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {
        f"model-{number:05}-of-{len(parts):05}.safetensors": part
        for number, part in enumerate(parts, start=1)
    }


def _write_files(folder: Path, files: dict[str, dict[str, LazyTensor]]) -> None:
    error = None
    for number, (file, tensors) in enumerate(files.items()):
        if error is None and number % jax.process_count() == jax.process_index():
            error = _write_file(folder / file, tensors)
        else:
            _take_part(tensors, file_order(tensors))
    if error is not None:
        raise error


def _write_file(path: Path, tensors: dict[str, LazyTensor]) -> Exception | None:
    # A process that fails still takes part in gathering what others write, and raises afterwards:
    # they would wait for it for ever.
    names = iter(file_order(tensors))
    try:
        with SafetensorsWriter(path, tensors) as writer:
            for name in names:
                writer.write(name, tensors[name].read())
    except Exception as error:
        _take_part(tensors, names)
        return error
    return None


def _take_part(tensors: dict[str, LazyTensor], names: Iterable[str]) -> None:
    for name in names:
        if tensors[name].collective:
            tensors[name].read()


def _write_index(folder: Path, files: dict[str, dict[str, LazyTensor]]) -> None:
    if len(files) == 1:
        return
    held = {name: (file, tensor) for file, part in files.items() for name, tensor in part.items()}
    content = {
        "metadata": {"total_size": sum(tensor.nbytes for _, tensor in held.values())},
        "weight_map": {name: held[name][0] for name in sorted(held)},
    }
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def _carry(source: Path, folder: Path, tensors: Mapping[str, LazyTensor]) -> None:
    config, dtype = source / "config.json", _usual_dtype(tensors)
    if config.is_file():
        content = json.loads(config.read_text())
        if dtype is not None:
            content |= {key: dtype for key in ("dtype", "torch_dtype") if key in content}
        text = json.dumps(content, indent=2, sort_keys=True)
        (folder / "config.json").write_text(text + "\n")
    for path in (path for pattern in _CARRIED for path in source.glob(pattern)):
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)


def _usual_dtype(tensors: Mapping[str, LazyTensor]) -> str | None:
    """What most floating-point elements have."""
    sizes: collections.Counter[str] = collections.Counter()
    for tensor in tensors.values():
        if jnp.issubdtype(tensor.dtype, jnp.floating):
            sizes[tensor.dtype.name] += tensor.size
    return next((dtype for dtype, _ in sizes.most_common(1)), None)
