"""Write metrics to `metrics.jsonl`, and show them in TensorBoard, Weights & Biases and a picture.

Every line of the file is a JSON object with a `kind` ("step", "evaluation" or, after training,
"node_bytes") and a `step`. A resumed run first drops the lines of steps that come after its
checkpoint, so the file reads as if nothing had happened. A tracker, such as TensorBoard, receives
the values of every row while the job runs, under the same names. When a run is resumed, the tracker
too discards steps that come after the checkpoint.
"""

import dataclasses
import importlib.util
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from rich.console import Console

from .._processes import process_index
from ._settings import Train

Row = dict[str, Any]
_SMOOTHING = 10  # steps in the running mean


@runtime_checkable
class Tracker(Protocol):
    """A service that shows the metrics of steps, such as TensorBoard."""

    def start(self, step: int) -> None:
        """Start a run, or resume it at `step`; discard metrics of this step and later ones."""

    def log(self, step: int, values: Mapping[str, float | int]) -> None:
        """Show the metrics of a step, by name."""

    def close(self) -> None:
        """Write what is pending, and close."""


def make_trackers(settings: Train, console: Console) -> Sequence[Tracker]:
    """Create the trackers that are installed and requested; none except on process 0.

    Raises:
        ValueError: Weights & Biases is requested and not installed.
    """
    run = settings.run
    if jax.process_index() != 0:
        return ()
    trackers: list[Tracker] = []
    if importlib.util.find_spec("tensorboardX") is not None:
        trackers.append(TensorBoard(run.directory / "tensorboard"))
    else:
        console.print(
            r"Nothing for TensorBoard: tensorboardX is missing "
            r'(`pip install "jaxzero\[train]"`)'
        )
    if run.wandb is not None:
        trackers.append(WeightsAndBiases(run.wandb, run.directory, dataclasses.asdict(settings)))
    return trackers


class TensorBoard:
    """Write metrics to TensorBoard's event files, a new file whenever the job starts or resumes.

    `log` returns only when the metrics are on disk: a run that resumes from a checkpoint needs all
    metrics from before it. So `SummaryWriter` is not used, which hands events to a thread, and
    whose `flush` does not wait for that thread.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._writer: Any = None

    def start(self, step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter  # optional, and slow to import

        self.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        # Files are named by the second, and one of the same name would be overwritten.
        suffix = f".{step}.{os.getpid()}"
        self._writer = EventsWriter(str(self._directory / "events"), suffix)
        self._write(step, session_log={"status": "START"})

    def log(self, step: int, values: Mapping[str, float | int]) -> None:
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._write(step, summary=scalar(name, value))

    def _write(self, step: int, **what: Any) -> None:
        from tensorboardX.proto import event_pb2

        event = vars(event_pb2)["Event"]  # protobuf defines it at import, unseen by type checkers
        self._writer.write_event(event(wall_time=time.time(), step=step, **what))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """Log to a run of a Weights & Biases project.

    A file in the job's folder holds the id of the W&B run, so a resumed job continues this run.
    Rows of steps that the job repeats stay: Weights & Biases ignores a step that it already has,
    and a repeated step has the same values, bit for bit.
    """

    def __init__(self, project: str, directory: Path, config: Mapping[str, Any]):
        spec = importlib.util.find_spec("wandb")
        if spec is None or spec.origin is None:  # without: a folder `wandb` with results
            raise ValueError(
                f"`wandb={project!r}` needs the package wandb, which is not installed: "
                "`pip install wandb`. Or leave out `wandb`; metrics.jsonl has the same numbers."
            )
        self._project = project
        self._directory = directory
        self._config = config
        self._run: Any = None

    def start(self, step: int) -> None:
        import wandb  # optional  # pyright: ignore[reportMissingImports]

        self.close()
        path = self._directory / "wandb_id"
        if not (step and path.is_file()):
            path.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            project=self._project,
            name=self._directory.name,
            dir=str(self._directory),
            id=path.read_text(),
            resume="allow",
            config=dict(self._config),
        )

    def log(self, step: int, values: Mapping[str, float | int]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class Journal:
    """The metrics of one run, as rows of its file `metrics.jsonl`."""

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()):
        """Open the journal at `path`. If the file exists, new rows are appended to it.

        Every process can read the journal, but only process 0 writes it.

        Args:
            path: the file; missing parent folders are created.
            trackers: services that get each row too, such as Weights & Biases.
        """
        self.path = path
        self._trackers = trackers
        self._writes = process_index() == 0
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, kind: str, step: int, **values: float | int) -> None:
        """Append a row. If the process dies, the row is complete on disk or absent.

        Raises:
            OSError: the row cannot be written; the message names the file.
        """
        if not self._writes:
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        except OSError as error:
            reason = f"{error.strerror}. Remove the cause, and `resume` from the last checkpoint"
            raise OSError(error.errno, reason, str(self.path)) from error
        for tracker in self._trackers:
            tracker.log(step, values)

    def rows(self, kind: str) -> list[Row]:
        """Return all rows of one kind, in the order in which they were written."""
        return [row for row in self._read() if row["kind"] == kind]

    def clear(self) -> None:
        """Delete all rows."""
        if not self._writes:
            return
        self.path.unlink(missing_ok=True)
        for tracker in self._trackers:
            tracker.start(0)

    def drop_after(self, step: int) -> None:
        """Delete the rows of steps after `step`, and all rows that were written after training."""
        if not self._writes:
            return
        kept = [row for row in self._read() if row["step"] <= step]
        # Step 0 is that of the evaluation before training.
        kept = [row for row in kept if row["kind"] == "step" or row["step"] == 0]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        partial = self.path.with_suffix(".tmp")
        partial.write_text(text)
        partial.replace(self.path)
        for tracker in self._trackers:
            tracker.start(step)
            for row in kept:
                if row["step"] == step:
                    numbers = {name: x for name, x in row.items() if name not in ("kind", "step")}
                    tracker.log(step, numbers)

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers:
            tracker.close()

    def _read(self) -> list[Row]:
        if not self.path.is_file():
            return []
        lines = self.path.read_text().split("\n")[:-1]  # a last line without "\n" is incomplete
        return [self._parsed(number, line) for number, line in enumerate(lines, start=1)]

    def _parsed(self, number: int, line: str) -> Row:
        try:
            return json.loads(line)
        except ValueError:
            raise ValueError(
                f"Line {number} of {str(self.path)!r} is no JSON: {line[:60]!r}. Remove it, or "
                "move the file away to go on without the numbers that it holds."
            ) from None


def plot_run(rows: Sequence[Row], path: Path, *, title: str, curves: Mapping[str, str]) -> None:
    """Draw the loss and other metrics over steps, and the size of the batch if it adapts.

    Args:
        rows: the "step" rows of a journal.
        path: the file to write; its suffix selects the format.
        title: title above the plot.
        curves: the labels of other metrics to draw, by name; their values are from 0 to 1.
    """
    from matplotlib.figure import Figure  # slow to import, and drawn once: not at module level

    # pyplot would look for a display, and keep global state.
    adapts = bool(rows) and "steps_per_update" in rows[0]
    num = 1 + bool(curves) + adapts
    figure = Figure(figsize=(5 * num, 4.4), layout="constrained")
    loss_axes, *others = figure.subplots(1, num, squeeze=False)[0]
    share_axes, batch_axes = others[: bool(curves)], others[bool(curves) :]
    rows = [row for row in rows if {"loss", *curves} <= row.keys()]  # others were not finite
    steps = [row["step"] for row in rows]
    losses = [row["loss"] for row in rows]
    loss_axes.plot(steps, losses, color="tab:blue", alpha=0.3, label="each step")
    loss_axes.plot(steps, _running_mean(losses), color="tab:blue", label=f"mean of {_SMOOTHING}")
    loss_axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    for axes in share_axes:
        for name, label in curves.items():
            axes.plot(steps, _running_mean([row[name] for row in rows]), label=label)
        axes.set(xlabel="step", ylabel=f"mean of {_SMOOTHING} steps", ylim=(0, 1))
    for axes in batch_axes:
        batches = [row["steps_per_update"] for row in rows]
        axes.step(steps, batches, where="post", label="steps in an update")
        axes.set(xlabel="step", ylabel="steps in an update", ylim=(0, None))
    for axes in (loss_axes, *others):
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _running_mean(values: Sequence[float]) -> np.ndarray:
    """Return, for each value, the mean of this value and up to `_SMOOTHING - 1` values before."""
    total = np.cumsum([0.0, *values])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - _SMOOTHING, 0)
    return (total[end] - total[start]) / (end - start)
