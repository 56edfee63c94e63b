"""Locate the parts of a file that PyTorch wrote before 1.6, and check that it is complete.

Such a file begins with five pickles: a magic number, a version, a description of the machine, the
object, and the keys of its storages. The storages follow in the order of the keys. Each is the
number of its elements, in 8 bytes, and then the elements, little-endian on every machine.

The file does not say how many bytes an element has: only the object does. So the object is read
twice: first for the dtypes of its storages, which give their places, then for its tensors.
"""

import mmap
import pickletools
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxzero._regular_file import open_regular
from jaxzero._text import escaped, shown

from .unpickle import unpickle

# `MAGIC_NUMBER` and `PROTOCOL_VERSION` of torch/serialization.py.
_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
HEAD_BYTES = 32  # in which the magic number is
_MAX_PICKLE_BYTES = 2**30  # of all pickles together
_COUNT = struct.Struct("<q")


def is_legacy(head: bytes) -> bool:
    """Return whether a file that begins with `head` is of the form before PyTorch 1.6."""
    return head.startswith(b"\x80") and _MAGIC.to_bytes(10, "little") in head[:HEAD_BYTES]


class LegacyFile:
    """A reader of a file that PyTorch before 1.6 wrote; the file is checked when it is opened.

    It locates the elements of each tensor in the file. It has the methods of an `Archive`, so that
    both forms of files are read by the same code.

    Args:
        file: the file.
        start: offset in the file, in bytes, of the first of the five pickles.
        length: bytes from `start` to the end of the last storage.
        where: name of the file, for messages.
        records: full names of classes that a pickle may name; they are not imported.

    Raises:
        ValueError: the file is damaged, or was written on a big-endian machine.
    """

    pid_items = 6  # items of the tuple that describes a storage (its persistent id)

    def __init__(
        self, file: Path, start: int, length: int, where: str, records: Collection[str]
    ) -> None:
        self.file, self.where = file, where
        with open_regular(file) as opened:
            pickles, end = self._pickles(opened.fileno(), start, length)
            *head, self._object, keys = pickles
            self._check_head([unpickle(each, where) for each in head])
            self._storages: dict[str, tuple[int, int]] = {}  # key -> (elements, bytes of each)
            unpickle(self._object, where, storage=self._note, tensor=_no_tensor, records=records)
            keys = unpickle(keys, where)
            if type(keys) is not list or not all(type(key) is str for key in keys):
                raise self._broken(f"the keys of its storages are {shown(keys)}")
            self._places: dict[str, tuple[int, int]] = {}
            for key in keys:
                opened.seek(end)
                end = self._place(key, opened.read(_COUNT.size), end + _COUNT.size)
        if end != start + length or self._storages.keys() != self._places.keys():
            raise self._broken(
                f"{len(self._places)} of its {len(self._storages)} storages are there, up to byte "
                f"{end} of {start + length}"
            )

    def read(self, entry: str) -> bytes:
        """Return the bytes of the pickled object, the fourth pickle of the file.

        `entry` must be "data.pkl", the name of this pickle in an `Archive`.
        """
        assert entry == "data.pkl", entry
        return self._object

    def place(self, entry: str) -> tuple[int, int]:
        """Return the offset in the file and the size, in bytes, of the storage "data/<key>"."""
        return self._places[entry.removeprefix("data/")]

    def _pickles(self, descriptor: int, start: int, length: int) -> tuple[list[bytes], int]:
        most = start + min(length, _MAX_PICKLE_BYTES)
        with mmap.mmap(descriptor, most, access=mmap.ACCESS_READ) as mapped:
            mapped.seek(start)
            pickles = []
            for _ in range(5):
                begin = mapped.tell()
                try:
                    for _ in pickletools.genops(mapped):  # pyright: ignore[reportArgumentType]
                        pass
                except ValueError as error:
                    raise self._broken(escaped(error)) from error
                pickles.append(mapped[begin : mapped.tell()])
            return pickles, mapped.tell()

    def _check_head(self, head: list[Any]) -> None:
        magic, version, machine = head
        if (magic, version) != (_MAGIC, _VERSION) or type(machine) is not dict:
            raise self._broken(f"its version is {shown(version)}, where {_VERSION} is the last")
        if machine.get("little_endian") is not True:
            raise ValueError(
                f"{self.where} was written on a big-endian machine. Load and save it with PyTorch "
                "on a little-endian one."
            )

    def _note(self, pid: tuple) -> Any:
        """Record the number of elements and the dtype of a storage, while the object is first read.

        `pid` is the persistent id by which the object refers to the storage.
        """
        if pid[0] == "module":
            return pid[1]
        _, of, key, _, count, _ = pid  # `_Reader` checks them
        self._storages[key] = count, of.dtype.itemsize
        return None

    def _place(self, key: str, head: bytes, begin: int) -> int:
        """Record where the storage `key` begins, and return where it ends.

        Args:
            key: key of the storage.
            head: the bytes before its elements, which hold their number.
            begin: offset of its first element in the file.
        """
        count, itemsize = self._storages.get(key, (None, 0))
        (stored,) = _COUNT.unpack(head) if len(head) == _COUNT.size else (None,)
        if key in self._places or type(count) is not int or stored != count or count < 0:
            raise self._broken(
                f"storage {shown(key)} has {shown(count)} elements, and the file {stored} of them"
            )
        self._places[key] = begin, count * itemsize
        return begin + count * itemsize

    def _broken(self, why: str) -> ValueError:
        return ValueError(
            f"{self.where} is not a whole file of `torch.save` ({why}). Copy or download the "
            "checkpoint again."
        )


def _no_tensor(*_: Any) -> None:
    return None
