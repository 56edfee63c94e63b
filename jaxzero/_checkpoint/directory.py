"""The directory of a run's checkpoints: a folder for each step, which is whole or not there.

    40/                 a checkpoint
    .40.1c9fe2a0.tmp    one that is being written, or was when its process died
    .20.77d0b3e1.old    one that is being deleted
    30.damaged          one that was found damaged and set aside

A folder gets its own name by a rename, which is one step for a file system: there is no moment at
which half a checkpoint bears the name of a whole one. One run at a time writes to a directory.
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
    """The steps of all checkpoints, oldest first."""
    if not is_folder(directory):
        return []
    return sorted(int(path.name) for path in directory.iterdir() if _is_checkpoint(path))


def list_damaged(directory: Path) -> list[str]:
    """The names of the checkpoints that were set aside."""
    names = [path.name for path in directory.iterdir()] if is_folder(directory) else []
    return sorted(name for name in names if _DAMAGED.fullmatch(name))


def _is_checkpoint(path: Path) -> bool:
    return path.name.isdecimal() and is_folder(path)


def is_folder(path: Path) -> bool:
    """Whether there is a folder. Raises what `Path.is_dir` would take for a no, as an I/O error."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def make_temporary(directory: Path, step: int) -> Path:
    """A new folder to write a checkpoint in. What a dead process left of one is removed."""
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    folder = _hidden(directory, step, "tmp")
    folder.mkdir()
    return folder


def publish(folder: Path, step: int) -> None:
    """Give a folder that is complete the name of its step, on disk to the last byte."""
    flush_tree(folder)
    os.rename(folder, folder.with_name(str(step)))
    flush(folder.parent)


def keep_newest(directory: Path, count: int, saved: int) -> None:
    """Delete all checkpoints but `count`: that of step `saved`, and the newest besides.

    Raises:
        OSError: some could not be deleted; the others are.
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
    os.rename(directory / str(step), doomed)  # in one step, so that nobody reads half of it
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(folder: Path) -> Path | None:
    """Rename a damaged checkpoint, and say to what; None: the directory cannot be written to."""
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
