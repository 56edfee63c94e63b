"""Write a safetensors file tensor by tensor, from one process or several.

The library (https://github.com/huggingface/safetensors) needs all tensors of a file in memory at
once. Here one process writes the header and sets the size of the file, from shapes and dtypes. Then
each process writes the boxes of tensors that it holds to their places, so memory holds one tensor,
and nothing is sent. The resulting file is identical to that of the library.

A box that does not span the last dimension is many short runs of bytes. Processes may write to the
same block of a file, never to the same byte.
"""

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxzero._raw import raw
from jaxzero.interop._tensors import Box, LazyTensor, runs

from .header import file_order, header_of

_CHUNK_BYTES = 4 * 2**20  # a tensor is copied and written in chunks of this size


def create_file(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Create a file with its header and its final size; the data are zeros."""
    header = header_of(_ordered(tensors))
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors.values()))


def write_boxes(
    path: Path, tensors: Mapping[str, LazyTensor], boxes: Mapping[str, list[Box]]
) -> None:
    """Write boxes of tensors to a file, without flushing it to disk.

    If there is no such file, it is created with its header, and written from start to end.

    Args:
        path: the file.
        tensors: all tensors of the file, each readable in its boxes.
        boxes: what to write of each tensor.
    """
    ordered = _ordered(tensors)
    header = header_of(ordered)
    exists, start = path.exists(), len(header)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        if not exists:
            _write_all(descriptor, memoryview(header), 0)
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
    """Write a box of a tensor, whose first byte is byte `start` of the file."""
    for chunk, part in _chunks(box, array):
        flat = np.ascontiguousarray(part).reshape(-1).data.cast("B")
        firsts, length = runs(shape, chunk)
        length *= part.itemsize
        positions = (start + firsts * part.itemsize).tolist()
        # Nothing but the call itself: a slice of a transposed matrix is a run for each row.
        for done, position in zip(range(0, len(flat), length), positions, strict=True):
            run = flat[done : done + length]
            written = os.pwrite(descriptor, run, position)
            if written < length:
                _write_all(descriptor, run[written:], position + written)


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    while data:  # a write may be cut short, for example when the disk is nearly full
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def _chunks(box: Box, array: np.ndarray) -> Iterator[tuple[Box, np.ndarray]]:
    """Divide a box along its first dimension."""
    values = raw(array)
    if not box:
        yield box, values
        return
    (begin, end), *rest = box
    rows = max(1, _CHUNK_BYTES // max(1, values[:1].nbytes))
    for start, stop in itertools.pairwise([*range(begin, end, rows), end]):
        yield ((start, stop), *rest), values[start - begin : stop - begin]
