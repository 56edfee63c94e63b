"""Write a checkpoint: safetensors files of bounded size, their index, config and tokenizer.

The safetensors library (https://github.com/huggingface/safetensors) needs all tensors of a file in
memory at once. Here process 0 creates the files with their headers and sizes, from shapes and
dtypes. Then every process writes the boxes of tensors that its devices hold to their places in all
files, so no process holds more than its shards and one tensor, and nothing is sent. A tensor that
every process holds in full is written by one of them, in turn. The files are identical to those
that the library writes.

A box that does not span the last dimension is written as many short runs of bytes. Two processes
may write to the same block of a file, but never to the same byte.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from jaxzero._processes import all_write, new_directory
from jaxzero._raw import raw
from jaxzero.interop._tensors import Box, LazyTensor, as_lazy, box_shape, runs, whole_box

from .carry import CARRIED, carried_from
from .header import check_writable, file_order, header_of
from .read import INDEX, SINGLE

_CHUNK_BYTES = 4 * 2**20  # a tensor is copied and written in chunks of this size
# Patterns of the files of an earlier checkpoint, which a new one replaces.
_OWN = ("*.safetensors", INDEX, "config.json", *CARRIED)


def create_file(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Create a file with its header and its final size; the data are zeros until written."""
    header = header_of(_ordered(tensors))
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors.values()))


def write_boxes(
    path: Path, tensors: Mapping[str, LazyTensor], boxes: Mapping[str, list[Box]]
) -> None:
    """Write boxes of tensors into a file of `create_file`, without flushing it to disk.

    Args:
        path: the file, created with the same `tensors`.
        tensors: all tensors of the file, by name.
        boxes: name -> the boxes to write, of every tensor.
    """
    ordered = _ordered(tensors)
    start = len(header_of(ordered))
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for name, tensor in ordered.items():
            for box in boxes[name]:
                inside = tuple(slice(*bounds) for bounds in box)
                # Not named: a name would keep the array while the next one is read.
                write_box(descriptor, start, tensor.shape, box, tensor.borrow(inside))
            start += tensor.nbytes
    finally:
        os.close(descriptor)


def _ordered(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    return {name: tensors[name] for name in file_order(tensors)}


def write_box(
    descriptor: int, start: int, shape: tuple[int, ...], box: Box, array: np.ndarray
) -> None:
    """Write a box of a tensor to an open file.

    Args:
        descriptor: the file.
        start: offset of the tensor's first byte in the file.
        shape: shape of the tensor.
        box: where `array` lies in the tensor.
        array: the elements of the box.
    """
    for chunk, part in _chunks(box, array):
        flat = np.ascontiguousarray(part).reshape(-1).data.cast("B")
        firsts, length = runs(shape, chunk)
        length *= part.itemsize
        positions = (start + firsts * part.itemsize).tolist()
        # The loop does little but the call: a slice of a transposed matrix is a run for each row.
        for done, position in zip(range(0, len(flat), length), positions, strict=True):
            run = flat[done : done + length]
            written = os.pwrite(descriptor, run, position)
            while written < length:  # cut short, for example when the disk is nearly full
                written += os.pwrite(descriptor, run[written:], position + written)


def _chunks(box: Box, array: np.ndarray) -> Iterator[tuple[Box, np.ndarray]]:
    """Divide a box and its elements along the first dimension into pieces of bounded size."""
    values = raw(array)
    if not box:
        yield box, values
        return
    (begin, end), *rest = box
    rows = max(1, _CHUNK_BYTES // max(1, values[:1].nbytes))
    for start, stop in itertools.pairwise([*range(begin, end, rows), end]):
        yield ((start, stop), *rest), values[start - begin : stop - begin]


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
    (`jax.distributed`) all must call this with the same tensors, on a file system that they share;
    each writes what its devices hold into all files.

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
        OSError: a file cannot be written, or the file system loses what several processes write to
            one file.
    """
    directory = Path(directory)
    if max_shard_bytes < 1:
        raise ValueError(f"`max_shard_bytes` must be at least 1; got {max_shard_bytes}.")
    if not tensors:
        raise ValueError("`tensors` must hold at least one tensor; got none.")
    tensors = {name: as_lazy(tensor, name, "in `tensors`") for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        check_writable(name, tensor)
    if source is not None and directory.resolve() == Path(source).resolve():
        raise ValueError(
            f"`directory` and `source` are both {str(source)!r}. Write to another directory, so "
            "that the checkpoint that was loaded is kept."
        )
    files = _divide(tensors, max_shard_bytes)
    carried = None
    with all_write(directory):  # so that an error of process 0 stops the others too
        if source is not None and jax.process_index() == 0:
            carried = carried_from(Path(source))
    with new_directory(directory, replaces=_OWN) as folder:
        with all_write(directory):
            if jax.process_index() == 0:
                for file, held in files.items():
                    create_file(folder / file, held)
        # All have written before one of them flushes, so that no block goes to the disk twice.
        with all_write(directory) as told:
            told["bytes"] = _write_files(folder, files)
        _check_whole(sum(each["bytes"] for each in told.of_all), tensors)
        if jax.process_index() == 0:
            _write_index(folder, files)
            if carried is not None:
                carried.write(folder, tensors)
    return directory


def _divide(tensors: Mapping[str, LazyTensor], max_bytes: int) -> dict[str, dict[str, LazyTensor]]:
    """Distribute tensors over files in the order of names, filling each file up to `max_bytes`.

    Returns:
        Name of a file -> its tensors by name.
    """
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


def _write_files(folder: Path, files: dict[str, dict[str, LazyTensor]]) -> int:
    """Write the parts of all tensors that this process holds; return their size in bytes."""
    num_bytes = 0
    turn = itertools.cycle(range(jax.process_count()))
    for file, tensors in files.items():
        boxes = {name: _boxes_to_write(tensor, next(turn)) for name, tensor in tensors.items()}
        if any(boxes.values()):
            own = {name: tensor.own() for name, tensor in tensors.items()}
            write_boxes(folder / file, own, boxes)
            for name, held in boxes.items():
                elements = sum(math.prod(box_shape(box)) for box in held)
                num_bytes += elements * tensors[name].dtype.itemsize
    return num_bytes


def _check_whole(num_bytes: int, tensors: Mapping[str, LazyTensor]) -> None:
    wanted = sum(tensor.nbytes for tensor in tensors.values())
    if num_bytes < wanted:
        raise ValueError(
            f"The processes hold {num_bytes} bytes of `tensors`, which have {wanted}. Each element "
            "must be on a device of some process: pass the same arrays on every process."
        )


def _boxes_to_write(tensor: LazyTensor, turn: int) -> list[Box]:
    """List the parts of a tensor that this process writes.

    Of a tensor that is split over processes, these are the shards of this process. Any other tensor
    is written whole by process `turn`, and the list is empty on all other processes.
    """
    if tensor.collective:
        return tensor.own_boxes()
    is_mine = jax.process_index() == turn and tensor.size
    return [whole_box(tensor.shape)] if is_mine else []


def _write_index(folder: Path, files: dict[str, dict[str, LazyTensor]]) -> None:
    if len(files) == 1:
        return
    held = {name: (file, tensor) for file, part in files.items() for name, tensor in part.items()}
    content = {
        "metadata": {"total_size": sum(tensor.nbytes for _, tensor in held.values())},
        "weight_map": {name: held[name][0] for name in sorted(held)},
    }
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")
