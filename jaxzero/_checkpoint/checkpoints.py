"""Save and restore training state: atomic, verified by digests, independent of the mesh.

Orbax writes and reads the arrays. The other modules of this package remove padding
(`stored_leaves`), write folders atomically (`saver`), select one (`directory`), and detect damage
by digests (`digests`).
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._mesh import gloo_workaround
from .._processes import all_succeed
from .._zero import Zero
from .digests import MAX_TEXT_BYTES, DamagedCheckpoint
from .directory import NoCheckpoint, choose, is_folder, list_steps, new_name
from .reading import read_arrays, read_extra
from .saver import Content, Saver
from .stored_leaves import (
    Named,
    check_fits_jax,
    check_room,
    digests_of_own,
    named_leaves,
    stored_array,
    true_array,
    with_arrays,
)

_PACKAGES = ("jaxzero", "jax", "orbax-checkpoint")


class Restored(NamedTuple):
    """A checkpoint that has been read: its step, its trees of arrays, and its `extra` values."""

    step: int
    state: dict[str, Any]  # trees with the structure and shardings of `like`
    extra: dict[str, Any]  # JSON


class Checkpoints:
    """The checkpoints of one run, in one directory. A context manager.

    Saving is asynchronous: `save` returns when the arrays have been copied to the host, and a
    checkpoint gets its final name only when it is complete, with a digest of every file.
    `restore` verifies all digests before it reads. docs/howto/checkpoints.md describes the files
    and the order of operations.

    With several processes every method except `latest_step` is collective, and the directory is
    on a file system that all of them share. One run at a time may save to it; any number may read.

    Args:
        directory: created if it is missing.
        zero: the `Zero` that sharded the trees.
        keep: number of checkpoints to keep, including the one just saved. Damaged ones do not
            count.
        timeout: timeout in seconds of a save, and of waiting for other processes.

    Raises:
        ValueError: `keep` is less than 1, or `timeout` is not positive.

    Attributes:
        Damaged: category of the warning about damaged checkpoints.
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
        """Wait until the last save is complete.

        Raises:
            RuntimeError: the last checkpoint could not be saved.
        """
        self._saver.wait()

    def latest_step(self) -> int | None:
        """Return the step of the newest checkpoint, or None. It is not verified.

        The result is local to this process; others may see a new checkpoint later. For a decision
        that all processes must share, use `restore_or_none`.
        """
        return max(list_steps(self.directory), default=None)

    def restore_or_none(self, like: Mapping[str, Any]) -> Restored | None:
        """Read the newest checkpoint as `restore` does, or None if there is none yet.

        All other problems raise, since starting from scratch would hide them. In particular it
        raises if all checkpoints are damaged, until they are moved away.
        """
        try:
            return self.restore(like)
        except NoCheckpoint:  # decided by process 0, so it is raised on all processes
            return None

    def save(
        self, step: int, state: Mapping[str, Any], *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Write a checkpoint.

        Args:
            step: number of the checkpoint. If there is one of this number, nothing is written.
            state: trees by name, such as `{"params": ..., "opt_state": ...}`. Process-local
                arrays must be equal on all processes.
            extra: other values to save, as JSON; with several processes, those of process 0.

        Raises:
            RuntimeError: the previous save failed, and this one was not started; or the directory
                cannot be written to.
            TypeError: `step` is not an integer, `state` is not a mapping by name, a leaf is not an
                array, or `extra` is not JSON.
            ValueError: `state` is empty, or differs between processes; two leaves have one name;
                a NumPy array of 64 bits holds what JAX would not restore; or `extra` has more than
                64 MiB.
        """
        self._saver.wait()
        if not hasattr(step, "__index__"):
            raise TypeError(f"`step` must be an integer; got {type(step).__name__}.")
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"`step` must not be negative; got {step}.")
        named = named_leaves(state, self._zero)
        filled = {name: entry for name, entry in named.items() if not entry.is_empty}
        check_fits_jax(filled)
        if not filled:
            raise ValueError("`state` has no array with elements: there is nothing to save.")
        text = json.dumps(dict(extra or {}))
        if len(text) > MAX_TEXT_BYTES:
            raise ValueError(
                f"`extra` has {len(text)} bytes as JSON, and at most {MAX_TEXT_BYTES} are read "
                "back. Save arrays in `state`."
            )
        description = describe(step, named, self._zero)
        folder = self._saver.begin(step, digests_of_own(filled))
        if folder is not None:
            arrays = {name: true_array(entry, self._zero) for name, entry in filled.items()}
            self._saver.write(folder, Content(arrays, text, description))

    def restore(
        self,
        like: Mapping[str, Any] | Callable[[dict[str, Any]], Mapping[str, Any]],
        *,
        step: int | None = None,
    ) -> Restored:
        """Read a checkpoint into the structure and shardings of `like`.

        The digests of all files are verified first, a share of the files by each process. A
        damaged checkpoint is renamed to `STEP.damaged`, with a warning of category `Damaged` that
        names the files, and the next older one is read.

        Args:
            like: the trees to read, as arrays or from `zero.abstract`; or a function that returns
                them, given the `extra` of the checkpoint. The mesh and the number of processes may
                differ from those of the run that saved.
            step: step of the checkpoint; by default the newest undamaged one.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            MemoryError: the host lacks memory for the arrays that go to host memory.
            ValueError: the checkpoint requested by `step` is damaged, or all are, now or in an
                earlier attempt; its leaves, shapes or dtypes differ from those of `like`; or files
                that fit their digests cannot be decoded.
            OSError: a file cannot be read. This is not damage, and nothing is renamed.
            RuntimeError: another process could not read, or does not see the directory; or the
                save in progress failed.
            TimeoutError: a process does not take part.
        """
        self._saver.wait()  # a checkpoint that is being saved may be the newest
        if not callable(like):
            named_leaves(like, self._zero)  # raises before anything is read
        chosen = choose(self.directory, step, self._seconds)
        folder = self.directory / str(chosen)
        tree, named, state, extra = self._read_together(folder, like)
        gloo_workaround.connect_groups(self._zero.mesh)
        stored = [stored_array(entry, state.get(name), self._zero) for name, entry in named.items()]
        return Restored(chosen, with_arrays(tree, stored), extra)

    def _read_together(
        self, folder: Path, like: Mapping[str, Any] | Callable[..., Any]
    ) -> tuple[dict[str, Any], dict[str, Named], dict[str, jax.Array], dict[str, Any]]:
        """Read `extra`, then the arrays; raise on all processes if one of them fails. Collective.

        Returns:
            The trees of `like`, their leaves, the arrays that were read, by path, and `extra`.
        """
        with all_succeed(f"{new_name()}-read", self._seconds), _may_be_deleted(folder):
            extra = read_extra(folder)
            tree = dict(like(extra) if callable(like) else like)
            named = named_leaves(tree, self._zero)
            check_room(named, self._zero)
            state = read_arrays(folder, named, self._zero)
        return tree, named, state, extra


@contextlib.contextmanager
def _may_be_deleted(folder: Path) -> Iterator[None]:
    """Turn an error in the body into `FileNotFoundError` if the checkpoint has been deleted."""
    try:
        yield
    except Exception as error:
        is_there = True
        with contextlib.suppress(OSError):  # it cannot be looked at, so it may still be there
            is_there = is_folder(folder)
        if is_there:
            raise
        raise FileNotFoundError(
            f"The checkpoint {str(folder)!r} was deleted while it was read. A run that saves there "
            "keeps the newest only: restore again, or give that run a larger `keep`."
        ) from error


def describe(step: int, named: Mapping[str, Named], zero: Zero) -> dict[str, Any]:
    """Return versions, mesh, configuration and leaves of a checkpoint, as JSON values."""
    return {
        "step": step,
        "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in _PACKAGES},
        "processes": jax.process_count(),
        "mesh": dict(zero.mesh.shape),
        "stage": zero.config.stage,
        "config": str(zero.config),
        "leaves": {
            name: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            for name, (leaf, _) in named.items()
        },
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a source folder, not installed
        return None
