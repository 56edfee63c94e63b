"""Write a safetensors file tensor by tensor.

The library (https://github.com/huggingface/safetensors) needs all tensors of a file in memory at
once. Here the header is written first, from shapes and dtypes, followed by each tensor when it has
been read, so memory holds one tensor. The resulting file is identical to that of the library.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from jaxzero.interop._tensors import LazyTensor

from .header import file_order, header_of

_CHUNK_BYTES = 4 * 2**20  # a non-contiguous tensor is copied in chunks of this size


class SafetensorsWriter:
    """A safetensors file that is filled tensor by tensor, in `file_order`. A context manager.

    Leaving flushes the file to disk.

    Args:
        path: file to create or overwrite.
        tensors: all tensors of the file; only their shapes and dtypes are used.
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
    # Viewed as integers: numpy copies foreign types (bfloat16) one element at a time.
    raw = array.view(np.dtype(f"u{array.dtype.itemsize}"))
    if raw.ndim == 0 or raw.flags.c_contiguous:
        yield np.ascontiguousarray(raw).data
        return
    rows = max(1, _CHUNK_BYTES // max(1, raw[:1].nbytes))
    for start in range(0, len(raw), rows):
        yield np.ascontiguousarray(raw[start : start + rows]).data
