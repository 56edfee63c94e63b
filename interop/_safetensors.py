"""Writing a safetensors file tensor by tensor.

The library (https://github.com/huggingface/safetensors) writes a file from tensors that are all in
memory at once. Here the header goes first, since shapes and dtypes are known, and each tensor
follows when it has been read: memory holds one of them. The bytes are those of the library.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import ml_dtypes
import numpy as np

from jaxzero.interop._tensor import LazyTensor

# Names of the format, in the order in which it knows them: a file holds its tensors from the last
# dtype to the first, so that each begins at a multiple of its element's size. Those that numpy has
# no type for come from ml_dtypes.
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANK = {name: rank for rank, name in enumerate(DTYPES)}
_CHUNK_BYTES = 16 * 2**20  # of a tensor whose memory order is not the file's, copied into order
_ALIGNMENT = 8  # of the first tensor's first byte


def check_dtype(name: str, dtype: np.dtype) -> None:
    """See that the format has a dtype.

    Raises:
        ValueError: it has not; the tensor is named.
    """
    if dtype not in _NAMES:
        raise ValueError(
            f"Tensor {name!r} has dtype {dtype}, which safetensors cannot hold. Cast it to one of "
            f"{', '.join(str(each) for each in _NAMES)}."
        )


class SafetensorsWriter:
    """A safetensors file that is filled tensor by tensor, in its own order. A context manager.

    Leaving flushes the file to disk.

    Args:
        path: made, or written over.
        tensors: what the file is to hold. Only shapes and dtypes are looked at.

    Attributes:
        names: of the tensors, in the order in which `write` wants them.
    """

    def __init__(self, path: Path, tensors: Mapping[str, LazyTensor]):
        self.names = file_order(tensors)
        self._left = [(name, tensors[name].shape, tensors[name].dtype) for name in self.names]
        self._path = path
        self._header = _header([(name, tensors[name]) for name in self.names])

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


def file_order(tensors: Mapping[str, LazyTensor]) -> list[str]:
    """Names of tensors in the order in which a file holds them."""
    return sorted(tensors, key=lambda name: (-_RANK[_NAMES[tensors[name].dtype]], name))


def _header(tensors: list[tuple[str, LazyTensor]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # as transformers writes it
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _chunks(array: np.ndarray):
    # As integers: numpy copies types that are not its own (bfloat16) one by one.
    raw = array.view(np.dtype(f"u{array.dtype.itemsize}"))
    if raw.ndim == 0 or raw.flags.c_contiguous:
        yield np.ascontiguousarray(raw).data
        return
    rows = max(1, _CHUNK_BYTES // max(1, raw[:1].nbytes))
    for start in range(0, len(raw), rows):
        yield np.ascontiguousarray(raw[start : start + rows]).data
