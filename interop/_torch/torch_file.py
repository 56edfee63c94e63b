"""Read files of `torch.save` lazily, tensor by tensor and without PyTorch.

Such a file is an uncompressed zip archive: `NAME/data.pkl` describes objects, and `NAME/data/KEY`
holds the bytes of a storage, which tensors view with an offset and strides. `unpickle` reads the
description without executing it; of a storage only the byte range is recorded. Reading a slice maps
the file and copies that slice bit for bit, bfloat16 included.

Distributed checkpoints put several such archives into one file, so an archive is a byte range.
"""

import dataclasses
import functools
import io
import math
import struct
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxzero.interop._tensors import Box, LazyTensor

from .unpickle import DTYPES, unpickle

_LOCAL_HEADER = 30  # bytes before the name in a zip entry; its last two numbers are lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchTensor(LazyTensor):
    """A tensor in a file that `torch.save` wrote. It holds neither data nor an open file."""

    file: Path
    name: str  # within the file, for messages
    start: int  # offset of the first element in the file, in bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: np.dtype

    @property
    def label(self) -> str:
        """Name and file, for messages."""
        return f"{self.name!r} in {str(self.file)!r}"

    @property
    def _span(self) -> int:
        """Number of elements from the first to the last, including gaps between strides."""
        return _span(self.shape, self.strides)

    def _read_box(self, box: Box) -> np.ndarray:
        mapped = np.memmap(
            self.file, np.uint8, "r", self.start, (self._span * self.dtype.itemsize,)
        )
        elements = mapped.view(np.ndarray).view(self.dtype)
        strides = [stride * self.dtype.itemsize for stride in self.strides]
        whole = np.lib.stride_tricks.as_strided(elements, self.shape, strides, writeable=False)
        return np.array(whole[tuple(slice(*bounds) for bounds in box)])


class _Storage(NamedTuple):
    dtype: np.dtype
    start: int  # offset in the file, in bytes
    size: int  # in bytes


class _Range(io.RawIOBase):
    """A byte range of a file, readable as a file of its own (as `zipfile` needs)."""

    def __init__(self, file: Path, start: int, length: int):
        self._file = open(file, "rb")  # noqa: SIM115 (closed with the range)
        self._start, self._length, self._position = start, length, 0

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"a position of {base + offset}")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._position)
        self._file.seek(self._start + self._position)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data


def read_torch_file(
    file: Path,
    *,
    within: tuple[int, int] | None = None,
    name: str = "",
    records: Collection[str] = (),
) -> Any:
    """Read an object that `torch.save` wrote: containers, numbers, strings and `TorchTensor`s.

    Args:
        file: the file.
        within: (start, length) in bytes, if the archive is only a part of the file.
        name: name of the tensor, if the archive holds a single one.
        records: full names of classes that a pickle may name; they are not imported.

    Raises:
        ValueError: the file was not written by `torch.save`, is truncated or compressed, or
            refers to code.
    """
    size = file.stat().st_size
    start, length = within or (0, size)
    where = f"{str(file)!r}" + (f" ({name!r})" if name else "")
    if start < 0 or length < 0 or start + length > size:
        raise ValueError(
            f"{where} should hold {length} bytes from {start} on, but has {size} in all. Copy or "
            "download the checkpoint again."
        )
    try:
        with _Range(file, start, length) as opened, zipfile.ZipFile(opened) as archive:
            return _read_archive(_Archive(file, start, where, archive), name, records)
    except _NOT_ZIP as error:
        raise ValueError(_not_an_archive(file, start, where, error)) from error


# `zipfile` raises any of these for archives that are truncated or have inconsistent headers.
_NOT_ZIP = (
    zipfile.BadZipFile,
    KeyError,
    NotImplementedError,
    OSError,
    RuntimeError,
    UnicodeDecodeError,
    struct.error,
)


def _not_an_archive(file: Path, start: int, where: str, error: Exception) -> str:
    with file.open("rb") as opened:
        opened.seek(start)
        is_zip = opened.read(4) == b"PK\x03\x04"
    if is_zip:
        return (
            f"{where} is not a whole file of `torch.save` ({error}). Copy or download the "
            "checkpoint again."
        )
    return (
        f"{where} is not a zip archive, which `torch.save` has written since PyTorch 1.6. If it is "
        "older, load it with `torch.load(path, weights_only=True)` and save it again."
    )


class _Archive:
    """Locates the entries of a zip archive in the file."""

    def __init__(self, file: Path, start: int, where: str, archive: zipfile.ZipFile):
        self.file, self.where = file, where
        self._start, self._archive = start, archive
        names = archive.namelist()
        found = [name for name in names if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(found) != 1:
            raise ValueError(
                f"{where} is a zip archive without a `data.pkl`, so `torch.save` did not write it. "
                "Give a file that holds a state dict."
            )
        self._prefix = found[0].removesuffix("data.pkl")
        if "byteorder" in self and self.read("byteorder").strip() == b"big":
            raise ValueError(
                f"{where} was written on a big-endian machine. Load and save it with PyTorch on a "
                "little-endian one."
            )

    def __contains__(self, entry: str) -> bool:
        return self._prefix + entry in self._archive.NameToInfo

    def read(self, entry: str) -> bytes:
        """Read a small entry as a whole."""
        self.place(entry)
        return self._archive.read(self._prefix + entry)

    def place(self, entry: str) -> tuple[int, int]:
        """Return an entry's offset in the file and its size, both in bytes.

        Raises:
            ValueError: the entry does not exist, is compressed, or extends beyond the file.
        """
        if entry not in self:
            raise ValueError(f"{self.where} lacks `{entry}`, which its `data.pkl` refers to.")
        info = self._archive.getinfo(self._prefix + entry)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(
                f"{self.where} is a compressed archive, which `torch.save` does not write. Unpack "
                "it and pack it again without compression (`zip -0`)."
            )
        header = self._start + info.header_offset
        with self.file.open("rb") as opened:
            opened.seek(header)
            lengths = struct.unpack("<HH", opened.read(_LOCAL_HEADER)[-4:])
        begin = header + _LOCAL_HEADER + sum(lengths)
        if header < 0 or begin + info.file_size > self.file.stat().st_size:
            raise ValueError(f"{self.where} is truncated: `{entry}` extends beyond the file.")
        return begin, info.file_size


def _read_archive(archive: _Archive, name: str, records: Collection[str]) -> Any:
    @functools.cache
    def place(key: str) -> tuple[int, int]:
        return archive.place(f"data/{key}")

    def storage(pid: tuple) -> _Storage:
        kind, dtype, key, _, count = pid
        if kind != "storage" or dtype not in DTYPES or type(count) is not int or count < 0:
            raise ValueError(f"a storage described as {pid!r}")
        begin, size = place(key)
        if count * DTYPES[dtype].itemsize > size:
            raise ValueError(f"storage {key!r} of {count} x {dtype}, which has {size} bytes")
        return _Storage(DTYPES[dtype], begin, count * DTYPES[dtype].itemsize)

    def tensor(held: Any, dtype: np.dtype | None, offset: int, shape: tuple, strides: tuple):
        if not isinstance(held, _Storage):
            raise ValueError(f"a tensor whose storage is {held!r}")
        dtype = held.dtype if dtype is None else dtype
        span = _span(shape, strides)
        fits = (offset + max(span, math.prod(shape))) * dtype.itemsize <= held.size
        if span and not fits:
            raise ValueError(
                f"a tensor of shape {shape}, strides {strides} and offset {offset} in a storage of "
                f"{held.size} bytes"
            )
        return TorchTensor(
            file=archive.file,
            name=name,
            start=held.start + offset * dtype.itemsize,
            shape=shape,
            strides=strides,
            dtype=dtype,
        )

    data = archive.read("data.pkl")
    return unpickle(data, archive.where, storage=storage, tensor=tensor, records=records)


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    if 0 in shape:
        return 0
    steps = ((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return 1 + sum(steps)
