"""Send the journal's metrics to TensorBoard and Weights & Biases while the job runs.

The journal is the authoritative record. A tracker receives every row, with the names of the
journal; when a run is resumed, rows of later steps are discarded.
"""

import dataclasses
import importlib.util
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from rich.console import Console

from ._settings import Train


@runtime_checkable
class Tracker(Protocol):
    """A place that shows the metrics of steps, such as TensorBoard."""

    def start(self, step: int) -> None:
        """Start a run, or resume it at `step`; metrics of that and later steps are discarded."""
        ...

    def log(self, step: int, values: Mapping[str, float | int]) -> None:
        """Show the metrics of a step, by name."""
        ...

    def close(self) -> None:
        """Write what is pending, and close."""
        ...


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
            r'Nothing for TensorBoard: tensorboardX is missing (`pip install -e ".\[train]"` in a '
            "checkout of jaxzero)"
        )
    if run.wandb is not None:
        trackers.append(WeightsAndBiases(run.wandb, run.directory, dataclasses.asdict(settings)))
    return trackers


class TensorBoard:
    """Write scalars to event files, one file for each start; `log` returns once they are on disk.

    Metrics from before a checkpoint must exist when a run resumes from it; a `SummaryWriter` hands
    events to a thread, and its `flush` does not wait for that thread.
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

        event = vars(event_pb2)["Event"]  # which is made when the module is imported
        self._writer.write_event(event(wall_time=time.time(), step=step, **what))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """Log to a run of a Weights & Biases project.

    The id of that run is a file in the training run's folder, so a resumed job continues the same
    run. The steps that it repeats are not discarded: Weights & Biases ignores steps that it already
    has, and their values are the same bit for bit.
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
