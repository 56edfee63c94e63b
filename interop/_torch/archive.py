"""Locate the entries of a zip archive that `torch.save` wrote, and check that it is undamaged.

The archive ends with a directory of its entries; each entry is a local header, followed by its
bytes. Python's `zipfile` trusts the directory, so an offset that is wrong by a few bytes would give
wrong numbers. Here every local header must be where the directory says and carry the same name, and
the entries must fill the file from its first byte to the directory without gap or overlap. What
PyTorch itself requires (a version, one folder that holds all entries) is required too.
"""

import io
import struct
import zipfile
import zlib
from pathlib import Path

from jaxzero._regular_file import open_regular
from jaxzero._text import escaped, shown
from jaxzero.interop._tensors import kind_of_archive, kind_of_file

_LOCAL = struct.Struct("<4s5H3L2H")  # header of an entry, before its name
_END = struct.Struct("<4s4H2LH")  # end of the directory, without a comment
_NAMES_ARE_UTF8, _HAS_DESCRIPTOR, _IS_FOLDER = 0x800, 0x8, 0x10
# What follows the bytes of an entry: its checksum and sizes, of 4 or 8 bytes, with or without a
# signature.
_DESCRIPTOR_BYTES = (16, 24, 12, 20)
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")  # gives the place of `_END_64`, which it follows
# For each field of `_END`, the value that says that only `_END_64` has the number; None for fields
# that are in `_END` alone.
_IN_64 = (None, None, None, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, None)
_ENTRY_BYTES, _ENTRY_LENGTHS = 46, 28  # of a directory entry: size, and where its lengths are
_VERSIONS = range(1, 11)  # those of PyTorch's own reader


class ByteRange(io.RawIOBase):
    """A byte range of a file, which can be read like a file of its own (as `zipfile` needs)."""

    def __init__(self, file: Path, start: int, length: int):
        self._file = open_regular(file)  # closed with the range
        self._start, self._length, self._position = start, length, 0

    def close(self) -> None:
        self._file.close()
        super().close()

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


class Archive:
    """The checked entries of a zip archive that `torch.save` wrote.

    Args:
        file: the file that holds the archive.
        start: offset of the archive in the file, in bytes.
        where: name of the file, for messages.
        opened: the bytes of the archive.

    Raises:
        ValueError: `torch.save` did not write the archive, or it is damaged. Damage may also raise
            any of `NOT_ZIP`.
    """

    pid_items = 5  # items of the tuple that describes a storage (its persistent id)

    def __init__(self, file: Path, start: int, where: str, opened: ByteRange):
        self.file, self.where = file, where
        self._start, self._opened = start, opened
        self._archive = zipfile.ZipFile(opened)
        infos = self._archive.infolist()
        self._prefix = self._prefix_of(infos)
        self.is_program = f"{self._prefix}constants.pkl" in self._archive.namelist()
        self._check_directory(infos)
        self._begins = self._check_entries(sorted(infos, key=lambda info: info.header_offset))
        self._check_versions()

    def __contains__(self, entry: str) -> bool:
        return self._prefix + entry in self._begins

    def read(self, entry: str) -> bytes:
        """Read all bytes of a small entry."""
        self.place(entry)  # raises if it is not there
        return self._archive.read(self._prefix + entry)

    def place(self, entry: str) -> tuple[int, int]:
        """Return the offset of an entry's data in the file, and its size, both in bytes."""
        if entry not in self:
            raise ValueError(
                f"{self.where} lacks `{escaped(entry)}`, which its `data.pkl` refers to."
            )
        name = self._prefix + entry
        return self._start + self._begins[name], self._archive.getinfo(name).file_size

    def _prefix_of(self, infos: list[zipfile.ZipInfo]) -> str:
        names = [info.filename for info in infos]
        if (kind := kind_of_archive(names)) is not None:
            raise ValueError(f"{self.where} {kind}")
        prefix = names[0].partition("/")[0] + "/" if names else ""
        if f"{prefix}data.pkl" not in names:
            raise ValueError(
                f"{self.where} is a zip archive without a `data.pkl`, so `torch.save` did not "
                "write it. Give a file that holds a state dict."
            )
        return prefix

    def _check_end(self, count: int) -> None:
        """Check the records that follow the directory of `count` entries.

        PyTorch may also write these records in the 64-bit form of zip.
        """
        begin, total = self._archive.start_dir, self._opened.seek(0, io.SEEK_END)
        tail = total - _END_64.size - _LOCATOR.size - _END.size
        self._opened.seek(max(tail, 0))
        records = self._opened.read()
        end = len(records) - _END.size
        is_64 = tail > begin and records[_END_64.size :].startswith(b"PK\x06\x07")
        size = (tail if is_64 else total - _END.size) - begin
        expected = (b"PK\x05\x06", 0, 0, count, count, size, begin, 0)
        if is_64:
            # A number may be in the larger record alone.
            fields = _END.unpack_from(records, end)
            expected = tuple(
                most if given == most else number
                for number, given, most in zip(expected, fields, _IN_64, strict=True)
            )
            sign, length, _, _, *numbers = _END_64.unpack_from(records)
            # The length does not count the first 12 bytes, the signature and itself.
            whole = (sign, length) == (b"PK\x06\x06", _END_64.size - 12)
            whole &= numbers == [0, 0, count, count, size, begin]
            whole &= _LOCATOR.unpack_from(records, _END_64.size) == (b"PK\x06\x07", 0, tail, 1)
            if not whole:
                raise zipfile.BadZipFile("the end of its directory contradicts itself")
        if _END.unpack_from(records, end) != expected:
            raise zipfile.BadZipFile(
                f"its last bytes do not describe its directory of {count} entries from byte "
                f"{begin} on"
            )
        self._opened.seek(begin)
        directory, position = self._opened.read(size), 0
        while position <= size - _ENTRY_BYTES:
            lengths = struct.unpack_from("<3H", directory, position + _ENTRY_LENGTHS)
            position += _ENTRY_BYTES + sum(lengths)
        if position != size:
            raise zipfile.BadZipFile("the last entry of its directory extends beyond it")

    def _check_directory(self, infos: list[zipfile.ZipInfo]) -> None:
        self._check_end(len(infos))
        seen: set[str] = set()
        for info in infos:
            name = info.orig_filename
            lower = name.lower()  # PyTorch looks names up without regard to case
            plain = info.flag_bits & _NAMES_ARE_UTF8 or name.isascii()
            inside = info.filename == name and name.startswith(self._prefix) and not info.volume
            if not plain or not inside or lower in seen:
                raise zipfile.BadZipFile(
                    f"entry {shown(name)} is there twice, or outside `{escaped(self._prefix)}`"
                )
            seen.add(lower)
            is_code = self.is_program and name.startswith(f"{self._prefix}code/")
            compressed = info.compress_type != zipfile.ZIP_STORED
            if not is_code and (compressed or info.file_size != info.compress_size):
                raise ValueError(
                    f"{self.where} is a compressed archive, which `torch.save` does not write. "
                    "Unpack it and pack it again without compression (`zip -0`)."
                )

    def _check_entries(self, infos: list[zipfile.ZipInfo]) -> dict[str, int]:
        """Check the local header of each entry, and return the offset of each entry's data."""
        begins: dict[str, int] = {}
        ends = [0]  # where the next entry may begin
        for info in infos:
            if info.header_offset not in ends:
                raise zipfile.BadZipFile(
                    f"entry {shown(info.filename)} begins at byte {info.header_offset}, where the "
                    f"one before it ends at {ends[0]}"
                )
            begins[info.filename] = begin = self._check_local(info)
            end = begin + info.compress_size
            has_descriptor = info.flag_bits & _HAS_DESCRIPTOR
            ends = [end + each for each in _DESCRIPTOR_BYTES] if has_descriptor else [end]
        if self._archive.start_dir not in ends:
            raise zipfile.BadZipFile(
                f"its directory begins at byte {self._archive.start_dir}, where the entries end at "
                f"{ends[0]}"
            )
        return begins

    def _check_local(self, info: zipfile.ZipInfo) -> int:
        self._opened.seek(info.header_offset)
        header = self._opened.read(_LOCAL.size)
        sign, _, flags, method, *_, name_bytes, extra_bytes = _LOCAL.unpack(header)
        encoding = "utf-8" if info.flag_bits & _NAMES_ARE_UTF8 else "cp437"
        name = self._opened.read(name_bytes).decode(encoding)
        strange = info.flag_bits & ~(_NAMES_ARE_UTF8 | _HAS_DESCRIPTOR)
        if (
            sign != b"PK\x03\x04"
            or name != info.orig_filename
            or flags != info.flag_bits
            or method != info.compress_type
            or strange
            or info.external_attr & _IS_FOLDER
        ):
            raise zipfile.BadZipFile(
                f"entry {shown(info.filename)} is not at byte {info.header_offset}, where its "
                f"directory says: there is {shown(sign)} {shown(name)}"
            )
        return info.header_offset + _LOCAL.size + name_bytes + extra_bytes

    def _check_versions(self) -> None:
        version = self.read("version").strip() if "version" in self else b""
        if not version.isdigit() or int(version[:4]) not in _VERSIONS:
            raise ValueError(
                f"{self.where} has the version {shown(version)} of `torch.save`, but must have one "
                f"from {_VERSIONS[0]} to {_VERSIONS[-1]}. Save it again with PyTorch."
            )
        if "byteorder" in self and self.read("byteorder") != b"little":
            raise ValueError(
                f"{self.where} was written on a big-endian machine. Load and save it with PyTorch "
                "on a little-endian one."
            )
        if ".storage_alignment" in self and not self.read(".storage_alignment").isdigit():
            raise zipfile.BadZipFile("its `.storage_alignment` is not a number")
        if ".data/serialization_id" in self:
            self.read(".data/serialization_id").decode()


# `zipfile` raises any of these for archives that are truncated or have inconsistent headers.
NOT_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    RuntimeError,
    UnicodeDecodeError,
    struct.error,
)


def not_an_archive(file: Path, start: int, where: str, error: Exception) -> str:
    """Return the message for a file that could not be opened as an archive because of `error`."""
    with open_regular(file) as opened:
        opened.seek(start)
        begin = opened.read(9)
    if (kind := kind_of_file(file, start)) is not None:
        return f"{where} {kind}"
    if begin[8:] == b"{":  # safetensors: 8 bytes of length, then a header of JSON
        return (
            f"{where} looks like a safetensors file. If it is, rename it so that its name ends in "
            ".safetensors."
        )
    if begin[:4] == b"PK\x03\x04":
        return (
            f"{where} is not a whole file of `torch.save` ({escaped(error)}). Copy or download the "
            "checkpoint again."
        )
    return (
        f"{where} is not a zip archive, which `torch.save` has written since PyTorch 1.6, and not "
        "of the form before that. Copy or download it again, or give another file."
    )
