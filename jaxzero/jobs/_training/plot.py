"""Plot the training curves of a run to `loss.png`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .journal import Row

_SMOOTHING = 10  # steps in the running mean
_CURVES = {
    "accuracy": "right code is nearest in batch",
    "similarity": "cosine to the right code",
    "similarity_others": "cosine to other code",
}


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
