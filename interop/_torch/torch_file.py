"""Read files of `torch.save` lazily, tensor by tensor and without PyTorch.

Such a file is an uncompressed zip archive: `NAME/data.pkl` describes objects, and `NAME/data/KEY`
holds the bytes of a storage, which tensors view with an offset and strides. `unpickle` reads the
description without executing it; for a storage, only the byte range is recorded. Reading a slice
maps the file and copies that slice bit for bit, bfloat16 included.

A distributed checkpoint puts several such archives into one file, so an archive is given by a file
and a byte range.
"""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from jaxzero._regular_file import regular_size
from jaxzero._text import shown
from jaxzero.interop._tensors import MAX_DIMS, FileTensor, span

from .archive import NOT_ZIP, Archive, ByteRange, not_an_archive
from .legacy import HEAD_BYTES, LegacyFile, is_legacy
from .pickle_machine import RecordKind
from .torchscript import script_state_dict
from .unpickle import TorchStorage, unpickle

# A tensor may repeat elements of its storage (`expand`), so a small file can describe more bytes
# than memory holds. All tensors of a file may have this many bytes more than their storages.
_MAX_REPEATED_BYTES = 2**28


def are_sizes(value: Any) -> TypeGuard[tuple[int, ...]]:
    """Return whether a value is a tuple of at most `MAX_DIMS` integers from 0 to 2**63 - 1."""
    return (
        type(value) is tuple
        and len(value) <= MAX_DIMS
        and all(type(size) is int and 0 <= size < 2**63 for size in value)
    )


class _Storage(NamedTuple):
    dtype: np.dtype
    start: int  # offset in the file, in bytes
    size: int  # in bytes


def read_torch_file(
    file: Path,
    *,
    within: tuple[int, int] | None = None,
    name: str = "",
    records: Collection[str] = (),
) -> Any:
    """Read an object that `torch.save` wrote: containers, numbers, strings and `FileTensor`s.

    Args:
        file: the file.
        within: (start, length) in bytes, if the archive is only a part of the file.
        name: name of the tensor, if the archive holds a single one.
        records: full names of classes that a pickle may name; they are not imported.

    Raises:
        ValueError: the file was not written by `torch.save`, is truncated or compressed, or
            refers to code; or it is a pipe or a device.
    """
    size = regular_size(file)
    start, length = within or (0, size)
    where = f"{str(file)!r}" + (f" ({shown(name)})" if name else "")
    if start < 0 or length < 0 or start + length > size:
        raise ValueError(
            f"{where} should hold {length} bytes from {start} on, but has {size} in all. Copy or "
            "download the checkpoint again."
        )
    try:
        with ByteRange(file, start, length) as opened:
            if is_legacy(opened.read(HEAD_BYTES)):
                archive = LegacyFile(file, start, length, where, records)
            else:
                archive = Archive(file, start, where, opened)
            return _Reader(archive, name).read(records)
    except NOT_ZIP as error:
        raise ValueError(not_an_archive(file, start, where, error)) from error


class _Reader:
    """Makes the storages and tensors that the pickle of one archive describes."""

    def __init__(self, archive: Archive | LegacyFile, name: str):
        self._archive, self._name = archive, name
        self._storages: dict[str, tuple[tuple, _Storage]] = {}
        self._repeated_bytes = 0

    def read(self, records: Collection[str]) -> Any:
        """Read the object in the archive; for a program of `torch.jit.save`, its state dict."""
        content = unpickle(
            self._archive.read("data.pkl"),
            self._archive.where,
            storage=self._storage,
            tensor=self._tensor,
            records=records,
        )
        if isinstance(self._archive, Archive) and self._archive.is_program:
            return script_state_dict(content, self._archive)
        return content

    def _storage(self, pid: tuple) -> Any:
        if pid[0] == "module" and type(pid[1]) is RecordKind:  # a class, with its source code
            return pid[1]
        kind, of, key, _, count, *more = pid
        # In legacy files a storage may be a view of another: its own key, first element, and size.
        view = more[0] if more and more[0] is not None else (key, 0, count)
        well_formed = type(kind) is str and kind == "storage" and type(key) is str
        well_formed &= type(of) is TorchStorage and len(pid) == self._archive.pid_items
        well_formed &= type(view) is tuple and len(view) == 3
        if not well_formed or type(view[0]) is not str or not are_sizes((count, *view[1:])):
            raise ValueError(f"a storage described as {shown(pid)}")
        opened = self._storages.get(view[0])
        if opened is not None:
            if opened[0] != (of, key, count, view):
                raise ValueError(f"storage {shown(key)} of two dtypes or sizes")
            return opened[1]
        begin, size = self._archive.place(f"data/{key}")
        itemsize = of.dtype.itemsize
        if count * itemsize > size or view[1] + view[2] > count:
            raise ValueError(
                f"storage {shown(key)} of {shown(count)} x {of.dtype}, which has {size} bytes"
            )
        made = _Storage(of.dtype, begin + view[1] * itemsize, view[2] * itemsize)
        self._storages[view[0]] = (of, key, count, view), made
        return made

    def _tensor(
        self,
        held: Any,
        dtype: np.dtype | None,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> FileTensor:
        if not isinstance(held, _Storage):
            raise ValueError(f"a tensor whose storage is {shown(held)}")
        dtype = held.dtype if dtype is None else dtype
        size = span(shape, strides)
        # numpy limits the product of the dimensions that are not 0.
        too_large = math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63
        if too_large or (size and (offset + size) * dtype.itemsize > held.size):
            raise ValueError(
                f"a tensor of shape {shown(shape)}, strides {shown(strides)} and offset "
                f"{shown(offset)} in a storage of {held.size} bytes"
            )
        self._repeated_bytes += max(0, math.prod(shape) - size) * dtype.itemsize
        if self._repeated_bytes > _MAX_REPEATED_BYTES:
            raise ValueError(
                f"a tensor of shape {shown(shape)} and strides {shown(strides)}, which repeats "
                f"elements of its storage: tensors would take {shown(self._repeated_bytes)} bytes "
                f"more than the file holds, and {_MAX_REPEATED_BYTES} are allowed; save "
                "`tensor.contiguous()`"
            )
        return FileTensor(
            file=self._archive.file,
            name=self._name,
            offset=held.start + offset * dtype.itemsize,
            shape=shape,
            strides=strides,
            dtype=dtype,
        )
