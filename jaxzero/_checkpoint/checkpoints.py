"""Checkpoints that any mesh can take up again, and that are known to be what was written.

Orbax writes and reads the arrays. The rest is here and in the modules beside: true shapes
(`_checkpoint_layout`), a folder that appears whole or not at all (`_checkpoint_files`,
`_checkpoint_save`), and digests, by which a damaged one is found (`_checkpoint_integrity`).
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from .._zero import Zero
from .agreement import new_name, tell_all
from .description import describe
from .digests import DamagedCheckpoint
from .directory import is_folder, list_steps
from .saver import EXTRA, STATE, Content, Saver
from .selection import NoCheckpoint, choose
from .stored_leaves import (
    Named,
    check_same_leaves,
    digests_of_own,
    named_leaves,
    stored_array,
    target,
    true_array,
    with_arrays,
)


class Restored(NamedTuple):
    """What was read from a checkpoint."""

    step: int
    state: dict[str, Any]  # trees like those that were wanted
    extra: dict[str, Any]  # JSON


class Checkpoints:
    """The checkpoints of one run, in one directory. A context manager.

    Saving is asynchronous: `save` returns when the arrays are safe from being changed, and
    a checkpoint appears under its final name only when it is complete, with a digest of
    every file. `restore` reads nothing that differs from its digest. What is on disk, and what
    happens when, is told in docs/howto/checkpoints.md.

    With several processes each method but `latest_step` is collective, and the directory is
    on a file system that all of them see. One run at a time saves to it; any number read.

    Args:
        directory: made if it is missing.
        zero: what laid out the trees to be saved.
        keep: how many of the newest checkpoints to keep, the one just saved among them.
            Damaged ones do not count.
        timeout: seconds that a save may take, and that processes wait for each other.

    Raises:
        ValueError: `keep` is less than 1, or `timeout` is not positive.

    Attributes:
        Damaged: the category of the warning that a checkpoint is damaged.
    """

    Damaged = DamagedCheckpoint

    def __init__(
        self,
        directory: str | os.PathLike,
        zero: Zero,
        *,
        keep: int = 2,
        timeout: int | float = 1200,
    ):
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1; got {keep}.")
        if not timeout > 0:
            raise ValueError(f"`timeout` must be a positive number of seconds; got {timeout}.")
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._zero, self._seconds = zero, float(timeout)
        self._saver = Saver(self.directory, keep=keep, seconds=self._seconds)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until everything is written.

        Raises:
            RuntimeError: the last checkpoint could not be saved.
        """
        self._saver.wait()

    def latest_step(self) -> int | None:
        """The newest complete checkpoint, or None. Whether it is damaged `restore` finds out.

        It is what this process sees just now. Others may see it later: do not decide by it what
        all must do together, but by `restore_or_none`.
        """
        return max(list_steps(self.directory), default=None)

    def restore_or_none(self, like: Mapping[str, Any]) -> Restored | None:
        """Read the newest checkpoint as `restore` does, or None if there is none yet.

        Whatever else is wrong is raised: a run that starts anew would hide it. So are damaged
        checkpoints where none is whole, at every start until they are moved away.
        """
        try:
            return self.restore(like)
        except NoCheckpoint:  # which the first process has seen, for all
            return None

    def save(
        self, step: int, state: Mapping[str, Any], *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Write a checkpoint.

        Args:
            step: its number; one that exists already is left as it is.
            state: trees by name, such as `{"params": ..., "opt_state": ...}`. An array that
                each process holds for itself must be the same on all.
            extra: what else to keep, as JSON; with several processes, what the first gives.

        Raises:
            RuntimeError: the checkpoint before this could not be saved, and this was not
                begun; or the directory cannot be written to.
            TypeError: `state` is no mapping by name, a leaf is no array, or `extra` no JSON.
            ValueError: `state` is empty, or differs between processes.
        """
        self._saver.wait()
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"`step` must not be negative; got {step}.")
        named = named_leaves(state, self._zero)
        filled = {name: entry for name, entry in named.items() if not entry.is_empty}
        if not filled:
            raise ValueError("`state` holds no numbers: there is nothing to save.")
        text, description = json.dumps(dict(extra or {})), describe(step, named, self._zero)
        folder = self._saver.begin(step, digests_of_own(filled))
        if folder is not None:
            arrays = {name: true_array(entry, self._zero) for name, entry in filled.items()}
            self._saver.write(folder, Content(arrays, text, description))

    def restore(self, like: Mapping[str, Any], *, step: int | None = None) -> Restored:
        """Read a checkpoint into the layout of `like`.

        Every file is compared with its digest first, a share by each process. A checkpoint
        that is damaged is renamed to `STEP.damaged`, with a warning of category `Damaged`
        that says which files are wrong, and the one before it is read.

        Args:
            like: the trees that are wanted, as arrays or from `zero.abstract`. The mesh and
                the number of processes need not be those that saved.
            step: which checkpoint; the newest that is not damaged by default.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it is damaged, and asked for by `step`, or they all are, or were found so
                before; or it holds other leaves, shapes or dtypes than `like`.
            OSError: a file cannot be read. That is no damage, and nothing is renamed.
            RuntimeError: another process could not read, or cannot see what the others see; or
                the checkpoint that was being saved could not be.
            TimeoutError: a process does not come.
        """
        self._saver.wait()  # one that is being saved counts
        named = named_leaves(like, self._zero)
        chosen = choose(self.directory, step, self._seconds)
        folder = self.directory / str(chosen)
        state, extra = self._read_together(folder, named)
        stored = [stored_array(entry, state.get(name), self._zero) for name, entry in named.items()]
        tree = with_arrays(dict(like), stored)
        return Restored(chosen, tree, extra)

    def _read_together(
        self, folder: Path, named: Mapping[str, Named]
    ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """The arrays and `extra`, once all processes have theirs."""
        error, state, extra = None, {}, {}
        try:
            state = self._read(folder, named)
            extra = json.loads((folder / EXTRA / "metadata").read_text())
        except Exception as raised:
            error = _deleted(folder, raised) if _is_gone(folder) else raised
        tell_all(f"{new_name()}-read", self._seconds, error=error)
        return state, extra

    def _read(self, folder: Path, named: Mapping[str, Named]) -> dict[str, jax.Array]:
        path = epath.Path(folder / STATE)
        with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
            saved = {
                name: (tuple(entry.shape), entry.dtype)
                for name, entry in handler.metadata(path).tree.items()
            }
            check_same_leaves(named, saved, folder)
            filled = {name: entry for name, entry in named.items() if not entry.is_empty}
            targets = {name: target(entry, self._zero) for name, entry in filled.items()}
            return handler.restore(path, args=ocp.args.StandardRestore(targets))


def _is_gone(folder: Path) -> bool:
    try:
        return not is_folder(folder)
    except OSError:  # which may be why it could not be read, and proves nothing
        return False


def _deleted(folder: Path, error: Exception) -> FileNotFoundError:
    """A checkpoint that was there when it was chosen."""
    deleted = FileNotFoundError(
        f"The checkpoint {str(folder)!r} was deleted while it was read. A run that saves there "
        "keeps the newest only: restore again, or give that run a larger `keep`."
    )
    deleted.__cause__ = error
    return deleted
