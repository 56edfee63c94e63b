"""A directory that appears whole or not at all.

Write under a temporary name beside the target, flush files and folders to disk, then rename: after
a crash there is either the old directory, or the new one, or a leftover whose name says it is one.
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; on leaving, it becomes `target`.

    If the body raises, the folder is removed and `target` is as it was.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    filled = target.with_name(f".{target.name}.{mark}.tmp")
    replaced = target.with_name(f".{target.name}.{mark}.old")
    filled.mkdir()
    try:
        yield filled
        _flush(filled)
        _exchange(filled, target, replaced)
    finally:
        shutil.rmtree(filled, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


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
    _flush_one(target.parent)


def _flush(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _flush_one(Path(parent, name))
        _flush_one(Path(parent))


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
