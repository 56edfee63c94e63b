"""Where the journal's numbers are shown while the job runs: TensorBoard, Weights & Biases.

The journal stays the record. A tracker is told of every row, under the names that it has there;
when a run is resumed, what it was told of later steps is void.
"""

import dataclasses
import importlib.util
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from rich.console import Console

from ._settings import Train


@runtime_checkable
class Tracker(Protocol):
    """Shows numbers over steps."""

    def start(self, step: int) -> None:
        """Begin, or go on: what was logged of `step` and later ones is void."""
        ...

    def log(self, step: int, values: Mapping[str, float | int]) -> None:
        """Show numbers of a step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


def make_trackers(settings: Train, console: Console) -> Sequence[Tracker]:
    """Those that are installed and wanted; none on processes other than the first.

    Raises:
        ValueError: Weights & Biases is wanted and not installed.
    """
    run = settings.run
    if jax.process_index() != 0:
        return ()
    trackers: list[Tracker] = []
    if importlib.util.find_spec("tensorboardX") is not None:
        trackers.append(TensorBoard(run.directory / "tensorboard"))
    else:
        console.print('Nothing for TensorBoard: tensorboardX is missing (in "jaxzero\\[train]")')
    if run.wandb is not None:
        trackers.append(WeightsAndBiases(run.wandb, run.directory, dataclasses.asdict(settings)))
    return trackers


class TensorBoard:
    """Scalars in an event file for each start."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._writer: Any = None

    def start(self, step: int) -> None:
        from tensorboardX import SummaryWriter  # optional, and slow to import

        self.close()
        # Files are named by the second, and one of the same name would be overwritten.
        suffix = f".{step}.{os.getpid()}"
        self._writer = SummaryWriter(str(self._directory), purge_step=step, filename_suffix=suffix)

    def log(self, step: int, values: Mapping[str, float | int]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # what comes before a checkpoint must be there when it is resumed

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of a project. It keeps its id, in the run's folder, when it is resumed.

    Weights & Biases itself ignores numbers of steps that it has already, which a resumed run
    repeats bit for bit.
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
