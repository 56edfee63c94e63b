"""The directory of a run's checkpoints: one folder per step, and which of them to restore.

    40/                 a complete checkpoint
    .40.1c9fe2a0.tmp    a checkpoint that is being written, or whose process died meanwhile
    .20.77d0b3e1.old    a checkpoint that is being deleted
    30.damaged          a checkpoint that was found damaged and renamed

A folder gets its final name by a rename, which is atomic, so an incomplete checkpoint never has
the name of a complete one. Only one run at a time may write to a directory.

The newest checkpoint that matches its digests is restored. Each process verifies a share of the
files, and all processes agree on the result. A damaged checkpoint is renamed instead of deleted:
its step can be saved again, and part of it may be recoverable. If all checkpoints are damaged,
every start fails with an error until the user acts; starting from scratch would hide the loss.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax

from .._processes import all_succeed, flush_tree, hidden, put_in_place, remove
from .digests import DamagedCheckpoint, find_damage

_numbers = itertools.count()
_LEFTOVER = re.compile(r"\.\d+\.[0-9a-f]{8}\.(tmp|old)")
_DAMAGED = re.compile(r"\d+\.damaged(\.\d+)?")


def new_name() -> str:
    """Return a unique name for the next operation; processes must call this in the same order."""
    return f"checkpoint-{next(_numbers)}"


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
    folder = hidden(directory / str(step), "tmp")
    folder.mkdir()
    return folder


def publish(folder: Path, step: int) -> None:
    """Flush a complete folder to disk and rename it to its step."""
    flush_tree(folder)
    put_in_place(folder, folder.with_name(str(step)))


def keep_newest(directory: Path, count: int, saved: int) -> None:
    """Delete all checkpoints except that of step `saved` and the `count - 1` newest others.

    Raises:
        OSError: a checkpoint could not be deleted; all others have been.
    """
    others = [step for step in list_steps(directory) if step != saved]
    errors = []
    for step in others[: max(len(others) - count + 1, 0)]:
        try:
            remove(directory / str(step))
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def drop_after(directory: Path, step: int) -> None:
    """Delete all checkpoints of later steps."""
    for later in list_steps(directory):
        if later > step:
            remove(directory / str(later))


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


class NoCheckpoint(FileNotFoundError):
    """Raised if there is no checkpoint to read, but not if a checkpoint lacks a file."""


def choose(directory: Path, wanted: int | None, seconds: float) -> int:
    """Return the step of the checkpoint to read, after verifying it. Collective.

    Args:
        directory: directory of the checkpoints.
        wanted: a step; None for the newest undamaged one, with a warning for each newer one.
        seconds: timeout of waiting for other processes.

    Raises:
        NoCheckpoint: there is no checkpoint, or none of the step `wanted`.
        ValueError: the requested checkpoint is damaged, or all are, now or in an earlier attempt.
        OSError: this process cannot read a file. Nothing is renamed.
        RuntimeError: another process cannot read a file, or does not see the directory.
    """
    name = new_name()
    damaged, in_place, tried = [], [], set()
    while True:
        # Listed again in each iteration: a running job may delete checkpoints and save others.
        steps, aside = list_together(f"{name}-steps", directory, seconds)
        untried = [step for step in steps if wanted in (None, step) and step not in tried]
        if not untried:
            break
        step = untried[-1]
        tried.add(step)
        folder = directory / str(step)
        is_there, problem = _verify(f"{name}-{step}", folder, seconds)
        if not is_there:
            continue
        if problem is None:
            return step
        with all_succeed(f"{name}-{step}-aside", seconds) as facts:
            moved = set_aside(folder) if jax.process_index() == 0 else None
            facts["renamed"] = moved and moved.name
        renamed = facts.of_all[0]["renamed"]
        if renamed is None:
            in_place.append(folder.name)
        damaged.append(_say_damage(folder, problem, renamed))
        if wanted is not None:
            others = [other for other in steps if other != step]
            raise ValueError(
                f"{damaged[0]} Leave out `step` for the newest undamaged one; there are the steps "
                f"{others}."
            )
        text = f"{damaged[-1]} The next older one is tried."
        warnings.warn(text, DamagedCheckpoint, stacklevel=3)
    if (aside or in_place) and wanted is None:
        raise ValueError("\n".join([say_all_damaged(directory, aside + in_place), *damaged]))
    raise NoCheckpoint(_say_missing(directory, wanted, steps))


def say_all_damaged(directory: Path, names: Sequence[str]) -> str:
    """Format the error for a directory that has only damaged checkpoints."""
    return (
        f"Every checkpoint in {str(directory)!r} is damaged: {', '.join(names)}. Put one back from "
        "a backup, in a folder named by its step, or move these away to start from nothing."
    )


def list_together(name: str, directory: Path, seconds: float) -> tuple[list[int], list[str]]:
    """Return the steps of checkpoints, and the names of damaged ones, as process 0 lists them.

    Collective. On a shared file system other processes may see changes later than process 0.
    """
    with all_succeed(name, seconds) as facts:
        if jax.process_index() == 0:
            facts |= {"steps": list_steps(directory), "aside": list_damaged(directory)}
    return facts.of_all[0]["steps"], facts.of_all[0]["aside"]


def _verify(name: str, folder: Path, seconds: float) -> tuple[bool, str | None]:
    """Return whether a checkpoint exists, and a text on its damage, or None. Collective."""
    with all_succeed(name, seconds) as facts:  # an error is not evidence of damage
        share = {"number": jax.process_index(), "count": jax.process_count()}
        facts["problem"] = find_damage(folder, **share)
        facts["is_there"] = is_folder(folder)
    blind = [number for number, each in enumerate(facts.of_all) if not each["is_there"]]
    if blind:
        with all_succeed(f"{name}-again", seconds) as seen:  # it may have been deleted
            seen["is_there"] = jax.process_index() == 0 and is_folder(folder)
        if not seen.of_all[0]["is_there"]:
            return False, None
        raise RuntimeError(
            f"Process {blind[0]} does not see {str(folder)!r}, which process 0 does. Keep "
            "checkpoints in a directory on a file system that all processes share."
        )
    problems = [each["problem"] for each in facts.of_all if each["problem"] is not None]
    return True, "; ".join(dict.fromkeys(problems)) or None


def _say_damage(folder: Path, problem: str, renamed: str | None) -> str:
    fate = f"renamed to {renamed!r}" if renamed else "left where it is, since it cannot be renamed"
    return (
        f"The checkpoint of step {folder.name} in {str(folder.parent)!r} is damaged: {problem}. It "
        f"was {fate}."
    )


def _say_missing(directory: Path, wanted: int | None, steps: list[int]) -> str:
    what = "" if wanted is None else f"of step {wanted} "
    aside = list_damaged(directory)
    found_damaged = f" Damaged and set aside: {', '.join(aside)}." if aside else ""
    if steps:
        remedy = f"There are those of steps {steps}. Leave out `step` for the newest."
    else:
        remedy = "Check the path; in a run that may be a new one, call `restore_or_none`."
    return f"No checkpoint {what}in {str(directory)!r}.{found_damaged} {remedy}"
