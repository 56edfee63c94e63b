"""Select the checkpoint to restore: the newest that matches its digests.

Each process verifies a share of the files, and all processes agree on the result. A damaged
checkpoint is renamed instead of deleted: its step can be saved again, and part of it may be
recoverable. If all checkpoints are damaged, every start fails with an error until the user acts;
starting from scratch would hide the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import jax

from .agreement import new_name, tell_all
from .digests import DamagedCheckpoint, find_damage, has_no_records
from .directory import is_folder, list_damaged, list_steps, set_aside


class NoCheckpoint(FileNotFoundError):
    """No checkpoint was found, as opposed to a file that is missing in the selected checkpoint."""


def choose(directory: Path, wanted: int | None, seconds: float) -> int:
    """Return the step of the checkpoint to read, after verifying it. Collective.

    Args:
        directory: directory of the checkpoints.
        wanted: a step; None for the newest undamaged one, with a warning for each newer one.
        seconds: timeout of waiting for other processes.

    Raises:
        NoCheckpoint: there is none.
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
        moved = set_aside(folder) if jax.process_index() == 0 else None
        name_now = moved and moved.name
        renamed = tell_all(f"{name}-{step}-aside", seconds, renamed=name_now)[0]["renamed"]
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
    """Return steps and damaged checkpoints as process 0 lists them. Collective.

    On a shared file system other processes may see changes later.
    """
    steps, aside, error = [], [], None
    if jax.process_index() == 0:
        try:
            steps, aside = list_steps(directory), list_damaged(directory)
        except OSError as raised:
            error = raised
    seen = tell_all(name, seconds, error=error, steps=steps, aside=aside)[0]
    return seen["steps"], seen["aside"]


def _verify(name: str, folder: Path, seconds: float) -> tuple[bool, str | None]:
    """Return if a checkpoint exists, and a description of its damage. Collective."""
    problem, error, is_early, is_there = None, None, False, False
    try:
        is_early = has_no_records(folder)
        if not is_early:
            problem = find_damage(folder, number=jax.process_index(), count=jax.process_count())
        is_there = is_folder(folder)
    except OSError as raised:  # not evidence of damage
        error = raised
    reports = tell_all(name, seconds, error=error, is_there=is_there, problem=problem)
    blind = [number for number, report in enumerate(reports) if not report["is_there"]]
    if blind and not _is_still_there(f"{name}-again", folder, seconds):
        return False, None
    if blind:
        raise RuntimeError(
            f"Process {blind[0]} does not see {str(folder)!r}, which process 0 does. Keep "
            "checkpoints in a directory on a file system that all processes share."
        )
    if is_early:
        warnings.warn(
            f"The checkpoint {str(folder)!r} was written by an earlier jaxzero without digests and "
            "cannot be verified. It is used without verification.",
            UserWarning,
            stacklevel=4,
        )
    problems = [report["problem"] for report in reports if report["problem"] is not None]
    return True, "; ".join(dict.fromkeys(problems)) or None


def _is_still_there(name: str, folder: Path, seconds: float) -> bool:
    """Return if process 0 still sees the folder, which may have been deleted. Collective."""
    error, is_there = None, False
    try:
        is_there = jax.process_index() == 0 and is_folder(folder)
    except OSError as raised:
        error = raised
    return tell_all(name, seconds, error=error, is_there=is_there)[0]["is_there"]


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
    remedy = "Leave out `step` for the newest." if steps else "Is it the directory of another run?"
    return (
        f"No checkpoint {what}in {str(directory)!r}. There are: {steps or 'none'}.{found_damaged} "
        f"{remedy}"
    )
