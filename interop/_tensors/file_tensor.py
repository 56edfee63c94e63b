"""Tensors in files: a slice is read or mapped from the file when it is asked for.

Each slice maps its own byte range, and the map ends with the slice's array. A map of the whole file
would live longer, and mapped pages count as memory of the process.
"""

import dataclasses
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from jaxzero._text import shown

from .boxes import Box, box_shape
from .lazy import LazyTensor

_LEAST_MAPPED = 2**16  # bytes; reading less than this takes no longer than mapping it


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class FileTensor(LazyTensor):
    """A tensor in a file of safetensors or of `torch.save`; it holds neither data nor an open file.

    Indexing reads the bytes of that slice from the file.
    """

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # of its first byte, from the start of the file
    strides: tuple[int, ...] | None = None  # in elements; None for row-major order

    @property
    def label(self) -> str:
        """Name of the tensor and its file, for messages."""
        return f"{shown(self.name)} in {str(self.file)!r}"

    @property
    def place(self) -> tuple:
        """The file, and where in it the data lie; equal for two names of one (tied) tensor."""
        return self.file, self.offset, self.shape, self.strides, self.dtype

    @property
    def is_in_file(self) -> bool:
        """True: `borrow` maps the bytes, or copies so few that a map would take longer."""
        return True

    def _read_box(self, box: Box) -> np.ndarray:
        strides = self.strides
        if strides is None:
            strides = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(self.ndim))
        itemsize, shape = self.dtype.itemsize, box_shape(box)
        first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        size, start = span(shape, strides), self.offset + first * itemsize
        # Touching a page that is mapped beyond the end of a file kills the process (SIGBUS).
        if self.file.stat().st_size < self.offset + span(self.shape, strides) * itemsize:
            raise ValueError(
                f"{str(self.file)!r} ends inside tensor {shown(self.name)}: it was cut off after "
                "it was opened. Copy or download it again."
            )
        in_bytes = [stride * itemsize for stride in strides]
        # Only without gaps: with large strides the span may be much more than the elements.
        if size == math.prod(shape) and size * itemsize < _LEAST_MAPPED:
            with open(self.file, "rb") as file:
                file.seek(start)
                return np.ndarray(
                    shape, self.dtype, np.fromfile(file, self.dtype, size), 0, in_bytes
                )
        return self._mapped(start, size * itemsize, shape, in_bytes)

    def _mapped(self, start: int, length: int, shape: tuple[int, ...], strides: list[int]):
        """Map `length` bytes from byte `start` on, and view an array in them."""
        before = start % mmap.ALLOCATIONGRANULARITY  # a map begins at a multiple of it
        with open(self.file, "rb") as file:
            mapped = mmap.mmap(
                file.fileno(), before + length, offset=start - before, access=mmap.ACCESS_READ
            )
        # Not `as_strided`, which does not know float8_e5m2.
        return np.ndarray(shape, self.dtype, mapped, before, strides)


def called(name: str, tensor: Any) -> Any:
    """Return a `FileTensor` with another name, for messages; return any other tensor unchanged."""
    return dataclasses.replace(tensor, name=name) if isinstance(tensor, FileTensor) else tensor


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements of memory a tensor spans, including the gaps between its elements.

    Args:
        shape: shape of the tensor.
        strides: distance of neighbours along each dimension, in elements.
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
