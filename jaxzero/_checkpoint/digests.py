"""Detect damaged checkpoints by the size and the SHA-256 digest of every file.

`jaxzero.json` describes the checkpoint and lists its files with their sizes. `SHA256SUMS` holds
the digests of those files and of `jaxzero.json` in the format of `sha256sum`, so that users can
run `sha256sum --check SHA256SUMS`. Both must list the same files, which also detects a list that
was truncated at the end of a line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .._regular_file import IrregularFile, open_regular, read_regular, regular_size

DESCRIPTION, SUMS = "jaxzero.json", "SHA256SUMS"

_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
MAX_TEXT_BYTES = 2**26  # of a file that is read at once: digests, description, `extra`, metadata
MAX_ITEM_BYTES = 16  # of an element of any dtype
_MAX_NAMED = 3  # files that a message names
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # the file does not exist


class DamagedCheckpoint(UserWarning):
    """The warning that a checkpoint differs from its digests, and that an older one is used."""


class FileRecord(NamedTuple):
    """Size and digest of a file."""

    size: int  # in bytes
    digest: str  # SHA-256, hexadecimal


def record_files(
    folder: Path, pattern: str = "**/*", *, known: Container[str] = ()
) -> dict[str, FileRecord]:
    """Compute size and digest of the files in `folder` that match `pattern`, except `known`.

    Returns:
        Relative path -> record.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.glob(pattern))}
    return {
        name: FileRecord(path.stat().st_size, digest(path))
        for name, path in paths.items()
        if path.is_file() and name not in known
    }


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_records(
    folder: Path, description: Mapping[str, Any], records: Mapping[str, FileRecord]
) -> None:
    """Write the description of the checkpoint, and the sizes and digests of its files."""
    files = {path: records[path].size for path in sorted(records)}
    text = json.dumps({**description, "files": files}, indent=1) + "\n"
    (folder / DESCRIPTION).write_text(text)
    digests = {path: record.digest for path, record in records.items()}
    digests[DESCRIPTION] = digest(folder / DESCRIPTION)
    lines = (f"{digests[path]}  {path}\n" for path in sorted(digests))
    (folder / SUMS).write_text("".join(lines))


def find_damage(folder: Path, *, number: int = 0, count: int = 1) -> str | None:
    """Compare files of a checkpoint with their recorded sizes and digests.

    Of `count` processes, process `number` compares its share of the files.

    Returns:
        A description of the files that differ; None if all agree.

    Raises:
        OSError: a file cannot be read; this is not evidence of damage.
    """
    try:
        digests = _read_sums(folder)
        _compare(folder, DESCRIPTION, None, digests.get(DESCRIPTION))
        sizes = _read_sizes(folder)
    except _Damage as damage:
        return str(damage)
    if sizes.keys() != digests.keys() - {DESCRIPTION}:
        return f"{SUMS} does not list the files that {DESCRIPTION} does"
    largest_first, wrong = sorted(sizes, key=lambda path: (-sizes[path], path)), []
    for path in largest_first[number::count]:
        try:
            _compare(folder, path, sizes[path], digests[path])
        except _Damage as damage:
            wrong.append(str(damage))
    more = f", and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
    return "; ".join(wrong[:_MAX_NAMED]) + more if wrong else None


def read_description(folder: Path) -> dict[str, Any]:
    """Read `jaxzero.json` in the folder of a checkpoint."""
    return json.loads(read_regular(folder / DESCRIPTION, MAX_TEXT_BYTES))


def _read_sizes(folder: Path) -> dict[str, int]:
    """Read the size of each file from `jaxzero.json`.

    If the files are together far larger than the leaves can need, that is damage too: otherwise a
    restore would spend hours on the digest of a file that cannot belong to the checkpoint.
    """
    try:
        with _opening(folder, DESCRIPTION):
            description = read_description(folder)
        sizes, leaves = description["files"], description["leaves"]
        bound = max_bytes_of(sum(_leaf_bytes(text) for text in leaves.values()), len(leaves))
        total = sum(sizes.values())
        outside = [name for name in sizes if ".." in Path(name).parts or Path(name).is_absolute()]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _Damage(
            f"{DESCRIPTION} is no description of a checkpoint ({type(error).__name__}: {error})"
        ) from error
    if outside or any(type(size) is not int or size < 0 for size in sizes.values()):
        raise _Damage(
            f"{DESCRIPTION} lists files outside of the folder, or sizes that are no numbers"
        )
    if total > bound:
        raise _Damage(
            f"{DESCRIPTION} lists {total} bytes, and its leaves have at most {bound} on disk"
        )
    return sizes


def max_bytes_of(leaves_bytes: int, num_leaves: int) -> int:
    """Return an upper bound of a checkpoint's bytes on disk, from its leaves' bytes in memory."""
    return 2 * leaves_bytes + 2**20 * num_leaves + 4 * MAX_TEXT_BYTES


def _leaf_bytes(text: str) -> int:
    """Return the bytes of a leaf that is described as "float32[3,5]", or somewhat more."""
    dims = text.removesuffix("]").partition("[")[2]
    return MAX_ITEM_BYTES * math.prod(int(dim) for dim in dims.split(",") if dim)


def _read_sums(folder: Path) -> dict[str, str]:
    """Read the digest of each file from `SHA256SUMS`."""
    try:
        with _opening(folder, SUMS):
            lines = read_regular(folder / SUMS, MAX_TEXT_BYTES).decode().splitlines()
    except UnicodeDecodeError as error:
        raise _Damage(f"{SUMS} is no text ({error})") from error
    digests = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise _Damage(f"{SUMS} has no digest and file in line {number}")
        digests[match[2]] = match[1]
    return digests


def _compare(folder: Path, name: str, size: int | None, wanted: str | None) -> None:
    """Raise `_Damage` unless a file has the recorded `size`, and `wanted` as its digest.

    `size` is None for the description, since this file itself holds the sizes of the other files.
    """
    path = folder / name
    with _opening(folder, name):
        num_bytes = regular_size(path)
        if size is None and num_bytes > MAX_TEXT_BYTES:
            raise _Damage(f"{name} has {num_bytes} bytes, and at most {MAX_TEXT_BYTES} are read")
        if size is not None and num_bytes != size:
            raise _Damage(f"{name} has {num_bytes} bytes, and had {size} when it was written")
        if digest(path) != wanted:
            raise _Damage(f"{name} holds other bytes than when it was written (SHA-256)")


class _Damage(Exception):
    """Raised if a checkpoint is damaged; the message says which file, and what is wrong with it."""


@contextlib.contextmanager
def _opening(folder: Path, name: str) -> Iterator[None]:
    """Raise `_Damage` if a file is missing or irregular; let other errors name the file."""
    try:
        yield
    except MISSING as error:
        raise _Damage(f"{name} is missing") from error
    except IrregularFile as error:
        raise _Damage(str(error)) from error
    except OSError as error:
        raise OSError(
            f"{str(folder / name)!r} cannot be read ({error.strerror or error}), so the checkpoint "
            "cannot be verified, and nothing was renamed. Remove the cause (permissions, the "
            "network, the disk), and start again."
        ) from error
