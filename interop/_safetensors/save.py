"""Write a checkpoint: safetensors files of bounded size, their index, config and tokenizer.

Files are assigned to processes in turn. All processes gather a tensor that is sharded over several
of them right before one of them writes it. So no process holds more than its shards and one
tensor, and saving sends as much over the network as gathering the weights for one forward pass.
The alternative, every process writing its own byte ranges into shared files, sends nothing; but a
slice of a transposed matrix is many short ranges, and shared file systems lock or cache whole
pages, which is slow at best.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from jaxzero.interop._tensors import LazyTensor

from .atomic import new_directory
from .carry import CARRIED, carried_from
from .header import check_writable, file_order
from .processes import all_succeed
from .which_files import INDEX, SINGLE
from .write_file import SafetensorsWriter

# Patterns of the files of an earlier checkpoint, which a new one replaces.
_OWN = ("*.safetensors", INDEX, "config.json", *CARRIED)


def save_tensors(
    tensors: Mapping[str, LazyTensor],
    directory: Path | str,
    *,
    max_shard_bytes: int = 5 * 10**9,
    source: Path | str | None = None,
) -> Path:
    """Write a checkpoint of safetensors files, which transformers and torch load. Collective.

    The write is atomic, whichever process fails: the directory is written under a temporary name
    beside `directory`, flushed to disk and renamed. An existing checkpoint is replaced in the same
    way; a directory with any other files is left unchanged, with an error. With several processes
    (`jax.distributed`) all must call this with the same names in the same order, on a shared file
    system; each writes some of the files.

    Args:
        tensors: tensors by name, as from `tensors_from`. Equal tensors give equal files.
        directory: where to write.
        max_shard_bytes: size limit of a file, in bytes of tensors. A larger tensor gets a file of
            its own.
        source: a directory whose `config.json` and tokenizer files are copied; `dtype` in the
            config is set to the dtype of most floating-point elements. Symbolic links must lead to
            files inside the directory, or to the blobs of the Hugging Face cache that it is in.

    Returns:
        `directory`.

    Raises:
        ValueError: there are no tensors, the format does not support a dtype, `directory` is
            `source`, a file, or a directory that holds other files than a checkpoint's; or a file
            to copy is a broken link, leads out of `source`, or is no regular file.
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
            "that the checkpoint that was loaded is kept."
        )
    files = _divide(tensors, max_shard_bytes)
    carried = None
    with all_succeed(f"Writing {str(directory)!r}"):
        if source is not None and jax.process_index() == 0:
            carried = carried_from(Path(source))
    with new_directory(directory, replaces=_OWN) as folder:
        _write_files(folder, files)
        if jax.process_index() == 0:
            _write_index(folder, files)
            if carried is not None:
                carried.write(folder, tensors)
    return directory


def _divide(tensors: Mapping[str, LazyTensor], max_bytes: int) -> dict[str, dict[str, LazyTensor]]:
    """Distribute tensors over files in the order of names, filling each file up to the limit."""
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
    # A process that fails still joins the remaining collectives and raises afterwards; otherwise
    # the other processes would deadlock.
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
