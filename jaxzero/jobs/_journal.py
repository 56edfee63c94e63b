"""`metrics.jsonl`: one JSON object per line, appended while the job runs.

Every line has a `kind` ("step", "evaluation" or, after training, "node_bytes") and a `step`; a
resumed run first drops the lines of steps that come after its checkpoint, so the file reads as if
nothing had happened.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._processes import process_index
from ._trackers import Tracker

Row = dict[str, Any]
_SMOOTHING = 10  # steps in the running mean
_CURVES = {
    "accuracy": "right code is nearest in batch",
    "similarity": "cosine to the right code",
    "similarity_others": "cosine to other code",
}


class Journal:
    """The metrics of one run, as rows of a file."""

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()):
        """Open the journal at `path`. If the file exists, new rows are appended to it.

        Every process can read the journal, but only process 0 writes it.

        Args:
            path: the file; missing parent folders are created.
            trackers: each row is also sent to these, such as Weights & Biases.
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
        """All rows of one kind, in the order in which they were written."""
        return [row for row in self._read() if row["kind"] == kind]

    def clear(self) -> None:
        """Delete all rows."""
        if not self._writes:
            return
        self.path.unlink(missing_ok=True)
        for tracker in self._trackers:
            tracker.start(0)

    def drop_after(self, step: int) -> None:
        """Delete the rows of steps after `step`, and all that were written after training."""
        if not self._writes:
            return
        kept = [row for row in self._read() if row["step"] <= step]
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


def plot_run(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Draw loss, in-batch accuracy and similarities over steps, and the batch if it adapts.

    Args:
        rows: the "step" rows of a journal.
        path: the file to write; its suffix selects the format.
        title: title above the plot.
    """
    from matplotlib.figure import Figure  # slow to import, and drawn once: not at module level

    # pyplot would look for a display, and keep global state.
    adapts = bool(rows) and "steps_per_update" in rows[0]
    figure = Figure(figsize=(15 if adapts else 10, 4.4), layout="constrained")
    loss_axes, share_axes, *batch_axes = figure.subplots(1, 3 if adapts else 2)
    rows = [row for row in rows if {"loss", *_CURVES} <= row.keys()]  # others were not finite
    steps = [row["step"] for row in rows]
    losses = [row["loss"] for row in rows]
    loss_axes.plot(steps, losses, color="tab:blue", alpha=0.3, label="each step")
    loss_axes.plot(steps, _running_mean(losses), color="tab:blue", label=f"mean of {_SMOOTHING}")
    loss_axes.set(xlabel="step", ylabel="contrastive loss", ylim=(0, None))
    for name, label in _CURVES.items():
        share_axes.plot(steps, _running_mean([row[name] for row in rows]), label=label)
    share_axes.set(xlabel="step", ylabel=f"mean of {_SMOOTHING} steps", ylim=(0, 1))
    for axes in batch_axes:
        batches = [row["steps_per_update"] for row in rows]
        axes.step(steps, batches, where="post", label="steps in an update")
        axes.set(xlabel="step", ylabel="steps in an update", ylim=(0, None))
    for axes in (loss_axes, share_axes, *batch_axes):
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _running_mean(values: Sequence[float]) -> np.ndarray:
    """For each value, the mean of it and of up to `_SMOOTHING - 1` values before it."""
    total = np.cumsum([0.0, *values])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - _SMOOTHING, 0)
    return (total[end] - total[start]) / (end - start)
