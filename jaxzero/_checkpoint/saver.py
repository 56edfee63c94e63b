"""Save checkpoints asynchronously and atomically, from one process or several.

    main thread   create a temporary folder         process 0
                  copy shards to host memory        each process; then the state may change
    background    write shards and digest files     each process
                  exchange success or errors        all processes
                  merge, write digests, rename      process 0
                  exchange success or errors        all processes
                  delete old checkpoints            process 0

Orbax writes and merges the arrays. Its `CheckpointManager` is not used, since it synchronizes by
device collectives, which deadlock if a process is lost, and has no digests.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import shutil
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from .._processes import all_succeed
from .digests import FileRecord, record_files, write_records
from .directory import keep_newest, list_steps, make_temporary, new_name, publish

STATE, EXTRA = "state", "extra"


class Content(NamedTuple):
    """The content of a checkpoint to save: arrays on devices, and two JSON values."""

    arrays: Mapping[str, Any]  # by path, without padding
    extra: str  # JSON
    description: Mapping[str, Any]  # content of `jaxzero.json`


class Saver:
    """Saves checkpoints to a directory, one at a time, and keeps the newest `keep` of them.

    `seconds` is the timeout of a save, and of waiting for other processes.
    """

    def __init__(self, directory: Path, *, keep: int, seconds: float):
        self._directory, self._keep, self._seconds = directory, keep, seconds
        self._step, self._name = 0, ""
        self._pending: concurrent.futures.Future[OSError | None] | None = None

    def wait(self) -> None:
        """Wait until the save that was started is on disk.

        Raises:
            RuntimeError: saving failed, on this process or another.
        """
        pending = self._pending
        if pending is None:
            return
        concurrent.futures.wait([pending])  # after Ctrl-C here, the next call still waits
        self._pending = None
        try:
            unremoved = pending.result()
        except Exception as error:
            raise self._not_saved(error) from error
        if unremoved is not None:
            warnings.warn(
                f"The checkpoint of step {self._step} is saved, but one older than the newest "
                f"{self._keep} cannot be removed from {str(self._directory)!r} ({unremoved}). "
                "Removal is retried after the next save; remove it by hand, or the disk fills.",
                stacklevel=3,
            )

    def begin(self, step: int, own: Mapping[str, str]) -> Path | None:
        """Begin a save in a temporary folder, which process 0 creates. Collective.

        `own` has the digests of the process-local arrays by path, which all processes must share.

        Returns:
            The folder; None if a checkpoint of this step exists.

        Raises:
            RuntimeError: the directory cannot be written to, or a process does not take part.
            ValueError: the step or a digest differs between processes.
        """
        self._step, self._name = step, new_name()
        folder = None
        try:
            with all_succeed(f"{self._name}-begin", self._seconds) as facts:
                if jax.process_index() == 0 and step not in list_steps(self._directory):
                    folder = make_temporary(self._directory, step)
                facts |= {"folder": folder and folder.name, "step": step, "own": own}
            _check_same(facts.of_all)
        except Exception as raised:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(raised, ValueError):
                raise
            raise self._not_saved(raised) from raised
        made = facts.of_all[0]["folder"]
        return None if made is None else self._directory / made

    def write(self, folder: Path, content: Content) -> None:
        """Start writing in the background; return when the arrays are copied to the host."""
        copied = threading.Event()
        executor = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending = executor.submit(self._save, folder, content, copied)
        executor.shutdown(wait=False)  # its thread ends with the save
        copied.wait()

    def _save(self, folder: Path, content: Content, copied: threading.Event) -> OSError | None:
        """Copy to the host, set `copied`, and write the checkpoint; raise if a process fails.

        Returns:
            The error of deleting old checkpoints, if any: the new checkpoint is complete then.
        """
        is_first = jax.process_index() == 0
        try:
            with all_succeed(f"{self._name}-written", self._seconds) as facts:
                try:
                    facts["records"] = self._write(folder, content.arrays, copied)
                finally:
                    copied.set()  # `write` waits for it, also if the copy fails
            with all_succeed(f"{self._name}-done", self._seconds):
                if is_first:
                    self._complete(folder, content, facts.of_all)
        finally:
            if is_first:
                shutil.rmtree(folder, ignore_errors=True)  # if it was not renamed
        try:
            if is_first:
                keep_newest(self._directory, self._keep, self._step)
        except OSError as unremoved:  # the new checkpoint is complete, so this is not a failure
            return unremoved
        return None

    def _write(
        self, folder: Path, arrays: Mapping[str, Any], copied: threading.Event
    ) -> dict[str, FileRecord]:
        """Write this process's part of the arrays, and record its files."""
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{str(folder)!r}, which process 0 created, is not visible here. Save to a "
                "directory on a file system that all processes share."
            )
        state, args = epath.Path(folder / STATE), ocp.args.StandardSave(dict(arrays))
        with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
            writing = asyncio.run(handler.async_save(state, args=args))
            copied.set()
            for future in writing or []:
                future.result(timeout=self._seconds)
        return record_files(folder, f"{STATE}/ocdbt.process_{jax.process_index()}/**/*")

    def _complete(
        self, folder: Path, content: Content, reports: Sequence[Mapping[str, Any]]
    ) -> None:
        """Merge the processes' files, write digests, and rename the folder to its final name.

        `reports` has a dict for each process, with the `FileRecord`s of its files by path.
        """
        with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
            handler.finalize(epath.Path(folder / STATE))
        (folder / EXTRA).mkdir()
        (folder / EXTRA / "metadata").write_text(content.extra)
        records = _collect(folder, reports)
        records |= record_files(folder, known=records)
        write_records(folder, content.description, records)
        publish(folder, self._step)

    def _not_saved(self, error: Exception) -> RuntimeError:
        try:
            there = f"The directory still has the steps {list_steps(self._directory)}."
        except OSError as unseen:
            there = f"The directory cannot be listed either ({unseen})."
        return RuntimeError(
            f"The checkpoint of step {self._step} could not be saved in {str(self._directory)!r} "
            f"({type(error).__name__}: {error}). {there} Remove the cause (is the disk full?), and "
            "save again."
        )


def _collect(folder: Path, reports: Sequence[Mapping[str, Any]]) -> dict[str, FileRecord]:
    """Merge the file records in the reports of all processes; raise if a file is missing here."""
    records = {}
    for number, report in enumerate(reports):
        for path, record in report["records"].items():
            records[path] = FileRecord(*record)
            if not (folder / path).is_file():
                raise FileNotFoundError(
                    f"{path}, which process {number} wrote, is not visible here. Save to a "
                    "directory on a file system that all processes share."
                )
    return records


def _check_same(reports: Sequence[Mapping[str, Any]]) -> None:
    steps = [report["step"] for report in reports]
    if len(set(steps)) > 1:
        raise ValueError(f"`step` must be the same on all processes; got {steps}.")
    each = [report["own"] for report in reports]
    names = set().union(*each)
    different = sorted(name for name in names if len({own.get(name) for own in each}) > 1)
    if different:
        raise ValueError(
            f"The leaf `{different[0]}` is local to each process and its values differ, but a "
            "checkpoint stores only one. Make it equal on all processes, or a global array."
        )
