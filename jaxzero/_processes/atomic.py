"""Write a file or a directory atomically; a directory also from several processes.

Content is written under a hidden name beside the target, flushed to disk and renamed. After a crash
the target has the old or the new content, and there may be a leftover with a hidden name. If
several processes write a directory, they fill one folder on a shared file system. Process 0 creates
the folder, and renames it after all have reported success.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

from .._text import first_names, matches
from .coordination import Facts, all_succeed, of_first, process_count, process_index

_NAME = "writing a checkpoint"
_SECONDS = 3600.0  # timeout: processes may take very different times to write their files
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # Python's errors of these name no file
_PROBE = "probe"  # a file with a byte for each process


def hidden(target: Path, ending: str) -> Path:
    """Return a new hidden path beside `target`, such as `.40.1c9fe2a0.tmp`."""
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.{ending}")


def put_in_place(filled: Path, target: Path) -> None:
    """Rename a complete folder to `target`, replacing an old `target`; flush the change."""
    # A rename cannot replace a folder that has content, so the old one is renamed first.
    old = hidden(target, "old") if target.exists() else None
    if old is not None:
        os.rename(target, old)
    try:
        os.rename(filled, target)
    except OSError:
        if old is not None:
            os.rename(old, target)
        raise
    _flush(target.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def remove(folder: Path) -> None:
    """Rename a folder and then delete it, so that other programs see all of it or nothing."""
    doomed = hidden(folder, "old")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def flush_tree(folder: Path) -> None:
    """Wait until a folder, and all files and folders in it, are on disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _flush(Path(parent, name))
        _flush(Path(parent))


def _flush(path: Path) -> None:
    """Wait until a file's contents, or a folder's list of entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_directory(target: Path, *, replaces: Collection[str]) -> Iterator[Path]:
    """Yield a temporary folder to fill, and rename it to `target` on exit. Collective.

    If the body raises on any process, the folder is removed and `target` is unchanged.

    Args:
        target: the directory; symbolic links are followed.
        replaces: patterns (with `*`) for the files that an existing `target` may contain.

    Raises:
        ValueError: `target` is a file or a directory with other files, or a process does not see
            the folder that process 0 created.
        RuntimeError: raised on processes that succeeded if another one failed.
    """
    target = Path(target).resolve()
    filled = target.with_name(of_first(_NAME, hidden(target, "tmp").name, _SECONDS))
    is_first = process_index() == 0
    with contextlib.ExitStack() as stack:
        with all_write(target), _named(target, filled):
            if is_first:
                _check_replaced(target, replaces)
                stack.enter_context(_parents(target))
                stack.callback(shutil.rmtree, filled, ignore_errors=True)
                filled.mkdir()
        if process_count() > 1:
            _probe(filled, target)
        with all_write(target), _named(target, filled):
            yield filled
            flush_tree(filled)
        with all_write(target), _named(target, filled):
            if is_first:
                put_in_place(filled, target)


def all_write(target: Path) -> contextlib.AbstractContextManager[Facts]:
    """Return the context manager `all_succeed` for one step of writing `target`."""
    failed = f"Nothing was written, since writing {str(target)!r} failed on "
    return all_succeed(_NAME, _SECONDS, failed=failed)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write, and rename it to `target` on exit.

    If the body raises, the file is removed and `target` is unchanged.
    """
    filled = hidden(target, "tmp")
    with contextlib.ExitStack() as stack, _named(target, filled):
        stack.enter_context(_parents(target))
        stack.callback(filled.unlink, missing_ok=True)
        yield filled
        _flush(filled)
        os.replace(filled, target)
        _flush(target.parent)


@contextlib.contextmanager
def _parents(target: Path) -> Iterator[None]:
    """Make the folders above `target`; remove those that were made if the body raises."""
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextlib.contextmanager
def _named(target: Path, filled: Path) -> Iterator[None]:
    """Let errors about the temporary path `filled`, or a full disk, name `target` as their file."""
    try:
        yield
    except OSError as error:
        given = error.filename
        if isinstance(given, str | os.PathLike):
            ours = Path(given).is_relative_to(filled)
        else:
            ours = error.errno in _FULL  # reading the source has no such error
        if not ours:
            raise
        raise type(error)(error.errno, error.strerror, str(target)) from error


def _check_replaced(target: Path, replaces: Collection[str]) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{str(target)!r} is a file. Name a directory to write a checkpoint to.")
    others = sorted(x.name for x in target.iterdir() if not matches(x.name, replaces))
    if others:
        raise ValueError(
            f"{str(target)!r} holds {first_names(others)}, which are not part of such a checkpoint "
            "and would be lost, since the whole directory is replaced. Choose another directory."
        )


def _probe(folder: Path, target: Path) -> None:
    """Check that all processes can write to one file in a folder. Collective."""
    path, is_first = folder / _PROBE, process_index() == 0
    with all_write(target):
        if is_first:
            path.write_bytes(bytes(process_count()))
    with all_write(target):
        if not folder.is_dir():
            raise ValueError(
                f"Process {process_index()} does not see {str(folder)!r}, which process 0 created. "
                "Write to a directory on a file system that all processes share."
            )
        _write_probe(path, process_index())
    with all_write(target):
        _check_probe(path)
    with all_write(target):
        if is_first:
            path.unlink()


def _write_probe(path: Path, process: int) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, b"x", process)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_probe(path: Path) -> None:
    """Raise unless a file has kept the byte that each process wrote to it.

    A mounted object store writes a whole file when a process closes it. Then the file holds what
    one process wrote, and the bytes of other processes are lost.
    """
    content = path.read_bytes()
    if content != b"x" * process_count():
        raise OSError(
            f"The file system of {str(path.parent)!r} does not keep what several processes write "
            f"to one file: of {process_count()} bytes from as many processes, "
            f"{content.count(b'x')} are there. Write to a shared POSIX file system, or from one "
            "process."
        )
