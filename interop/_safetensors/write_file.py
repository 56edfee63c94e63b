"""Writing a safetensors file tensor by tensor.

The library (https://github.com/huggingface/safetensors) writes a file from tensors that are all in
memory at once. Here the header goes first, since shapes and dtypes are known, and each tensor
follows when it has been read: memory holds one of them. The bytes are those of the library.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from jaxzero.interop._tensors import LazyTensor

from .header import file_order, header_of

_CHUNK_BYTES = 4 * 2**20  # of a tensor whose memory order is not the file's, copied into order


class SafetensorsWriter:
    """A safetensors file that is filled tensor by tensor, in `file_order`. A context manager.

    Leaving flushes the file to disk.

    Args:
        path: made, or written over.
        tensors: what the file is to hold. Only shapes and dtypes are looked at.
    """

    def __init__(self, path: Path, tensors: Mapping[str, LazyTensor]):
        ordered = {name: tensors[name] for name in file_order(tensors)}
        self._left = [(name, tensor.shape, tensor.dtype) for name, tensor in ordered.items()]
        self._path = path
        self._header = header_of(ordered)

    def __enter__(self) -> "SafetensorsWriter":
        self._file = open(self._path, "wb")
        self._file.write(self._header)
        return self

    def write(self, name: str, array: np.ndarray) -> None:
        """Add the next tensor."""
        expected = self._left.pop(0)
        assert (name, array.shape, array.dtype) == expected, (name, array.shape, expected)
        for chunk in _chunks(array):
            self._file.write(chunk)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._file:
            if error is None:
                assert not self._left, f"not written: {self._left}"
                self._file.flush()
                os.fsync(self._file.fileno())


def _chunks(array: np.ndarray):
    # As integers: numpy copies types that are not its own (bfloat16) one by one.
    raw = array.view(np.dtype(f"u{array.dtype.itemsize}"))
    if raw.ndim == 0 or raw.flags.c_contiguous:
        yield np.ascontiguousarray(raw).data
        return
    rows = max(1, _CHUNK_BYTES // max(1, raw[:1].nbytes))
    for start in range(0, len(raw), rows):
        yield np.ascontiguousarray(raw[start : start + rows]).data
