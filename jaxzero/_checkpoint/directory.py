"""The directory of a run's checkpoints: one folder per step, created and deleted atomically.

    40/                 a complete checkpoint
    .40.1c9fe2a0.tmp    a checkpoint that is being written, or whose process died meanwhile
    .20.77d0b3e1.old    a checkpoint that is being deleted
    30.damaged          a checkpoint that was found damaged and renamed

A folder gets its final name by a rename, which is atomic, so an incomplete checkpoint never has
the name of a complete one. Only one run at a time may write to a directory.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import uuid
from pathlib import Path

from .._processes import flush, flush_tree

_LEFTOVER = re.compile(r"\.\d+\.[0-9a-f]{8}\.(tmp|old)")
_DAMAGED = re.compile(r"\d+\.damaged(\.\d+)?")


def list_steps(directory: Path) -> list[int]:
    """List the steps of all checkpoints, in ascending order."""
    if not is_folder(directory):
        return []
    return sorted(int(path.name) for path in directory.iterdir() if _is_checkpoint(path))


def list_damaged(directory: Path) -> list[str]:
    """List the names of the checkpoints that were renamed because they are damaged."""
    names = [path.name for path in directory.iterdir()] if is_folder(directory) else []
    return sorted(name for name in names if _DAMAGED.fullmatch(name))


def _is_checkpoint(path: Path) -> bool:
    return path.name.isdecimal() and is_folder(path)


def is_folder(path: Path) -> bool:
    """Return True if `path` is a folder. I/O errors are raised; `Path.is_dir` would hide them."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def make_temporary(directory: Path, step: int) -> Path:
    """Create a folder to write a checkpoint in, and remove leftovers of interrupted runs."""
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    folder = _hidden(directory, step, "tmp")
    folder.mkdir()
    return folder


def publish(folder: Path, step: int) -> None:
    """Flush a complete folder to disk and rename it to its step."""
    flush_tree(folder)
    os.rename(folder, folder.with_name(str(step)))
    flush(folder.parent)


def keep_newest(directory: Path, count: int, saved: int) -> None:
    """Delete all checkpoints except that of step `saved` and the `count - 1` newest others.

    Raises:
        OSError: a checkpoint could not be deleted; all others have been.
    """
    others = [step for step in list_steps(directory) if step != saved]
    errors = []
    for step in others[: max(len(others) - count + 1, 0)]:
        try:
            _delete(directory, step)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def drop_after(directory: Path, step: int) -> None:
    """Delete all checkpoints of later steps."""
    for later in list_steps(directory):
        if later > step:
            _delete(directory, later)


def _delete(directory: Path, step: int) -> None:
    doomed = _hidden(directory, step, "old")
    os.rename(directory / str(step), doomed)  # first, so that a partial one is never read
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(folder: Path) -> Path | None:
    """Rename a damaged checkpoint and return its new path; None if renaming failed."""
    number, target = 1, folder.with_name(f"{folder.name}.damaged")
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}.damaged.{number}")
    try:
        os.rename(folder, target)
    except OSError:
        return None
    return target


def _hidden(directory: Path, step: int, ending: str) -> Path:
    return directory / f".{step}.{uuid.uuid4().hex[:8]}.{ending}"
