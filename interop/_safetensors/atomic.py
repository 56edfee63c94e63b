"""A directory or a file that appears whole or not at all; a directory by one process or several.

Write under a temporary name beside the target, flush files and folders to disk, then rename: after
a crash there is either the old directory, or the new one, or a leftover whose name says it is one.
With several processes all fill one folder, on a file system that all of them see; the first of
them makes it and renames it, once all have said that they are done.
"""

import contextlib
import fnmatch
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

import jax

from jaxzero._processes import flush, flush_tree
from jaxzero.interop._tensors import some

from .processes import all_succeed, shared_mark


@contextlib.contextmanager
def new_directory(target: Path, *, replaces: Collection[str]) -> Iterator[Path]:
    """Give a temporary folder to fill; on leaving, it becomes `target`. Collective.

    If the body raises, on any process, the folder is removed and `target` is as it was.

    Args:
        target: the directory. The one that a link leads to, if it is a link.
        replaces: names, with `*` for any text, of what an earlier `target` may hold.

    Raises:
        ValueError: there is a file at `target`, or a directory that holds anything else, or a
            process does not see the folder that the first one made.
        RuntimeError: on a process that succeeded, if another failed.
    """
    target = Path(target).resolve()
    mark = shared_mark()
    filled = target.with_name(f".{target.name}.{mark}.tmp")
    replaced = target.with_name(f".{target.name}.{mark}.old")
    is_first = jax.process_index() == 0
    what = f"Writing {str(target)!r}"
    try:
        with all_succeed(what):
            if is_first:
                _check_replaced(target, replaces)
                target.parent.mkdir(parents=True, exist_ok=True)
                filled.mkdir()
        with all_succeed(what):
            _check_seen(filled)
        with all_succeed(what):
            yield filled
            flush_tree(filled)
        with all_succeed(what):
            if is_first:
                _exchange(filled, target, replaced)
    finally:
        if is_first:
            shutil.rmtree(filled, ignore_errors=True)
    if is_first:
        shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Give the name of a temporary file to write; on leaving, it becomes `target`.

    If the body raises, the file is removed and `target` is as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    filled = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield filled
        flush(filled)
        os.replace(filled, target)
        flush(target.parent)
    finally:
        filled.unlink(missing_ok=True)


def _check_replaced(target: Path, replaces: Collection[str]) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{str(target)!r} is a file. Name a directory to write a checkpoint to.")
    others = sorted(
        path.name
        for path in target.iterdir()
        if not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in replaces)
    )
    if others:
        raise ValueError(
            f"{str(target)!r} holds {some(others)}, which no checkpoint of this form does and "
            "which would be lost: the whole directory is replaced. Name one of its own."
        )


def _check_seen(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(
            f"Process {jax.process_index()} does not see {str(folder)!r}, which process 0 has "
            "made. Write to a directory on a file system that all processes share."
        )


def _exchange(filled: Path, target: Path, replaced: Path) -> None:
    # A rename cannot replace a folder that has content, so the old one steps aside first.
    had_target = target.exists()
    if had_target:
        os.rename(target, replaced)
    try:
        os.rename(filled, target)
    except OSError:
        if had_target:
            os.rename(replaced, target)
        raise
    flush(target.parent)
