"""Open and read files that other programs may have written: only regular files of bounded size.

Opening a named pipe waits for a writer, and reading a device such as /dev/zero never ends.
"""

import errno
import io
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class IrregularFile(ValueError):
    """Raised for a path of a pipe, device or socket, and for a file that is too large to read."""


def regular_size(path: Path) -> int:
    """Return the size in bytes of a regular file, without opening it.

    Raises:
        IrregularFile: the path is that of a pipe, a device or a socket.
        IsADirectoryError: the path is that of a folder.
        OSError: the file is missing, or its folder cannot be searched.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no regular file")
        raise IrregularFile(f"{str(path)!r} is {kind}. Put the regular file back.")
    return status.st_size


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; raise the errors of `regular_size` for anything else."""
    regular_size(path)  # before it is opened, since opening some devices acts on them
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # if it became a pipe since then
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise IrregularFile(f"{str(path)!r} is no regular file. Put the regular file back.")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        IrregularFile: the path is that of a pipe, a device or a socket, or the file has more than
            `max_bytes`.
        OSError: the file is missing or cannot be read, or the path is that of a folder.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1) if _size(file) <= max_bytes else None
        if content is None or len(content) > max_bytes:
            raise IrregularFile(
                f"{str(path)!r} has {_size(file)} bytes, and at most {max_bytes} are read. Put the "
                "file back that was there."
            )
    return content


def _size(file: io.BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size
