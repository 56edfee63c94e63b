"""The job's checkpoints: what is kept, and that damage is neither forgotten nor trained over."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import tiny_job
from rich.console import Console
from tiny_job import make_settings, with_run

import jaxzero as jz
from jaxzero import jobs
from jaxzero.jobs._resume import begin, save
from jaxzero.jobs._session import open_session

pytestmark = pytest.mark.standard_promotion  # optax


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An encoder, and the data to train it on."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "data").mkdir()
    return tiny_job.write_checkpoint(folder / "encoder"), tiny_job.write_data(folder / "data")


@pytest.fixture
def settings(inputs: tuple[Path, Path], tmp_path: Path) -> jobs.Train:
    return make_settings(*inputs, tmp_path)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120, record=True)


def damage(folder: Path) -> None:
    (folder / "extra" / "metadata").write_text("{}")


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def test_that_all_checkpoints_are_damaged_is_not_forgotten(settings: jobs.Train, console: Console):
    directory = settings.run.directory
    with open_session(settings, console) as session:
        save(session, dataclasses.replace(begin(session), step=1))
        session.journal.append("step", 1, loss=1.0)
    damage(directory / "checkpoints" / "1")
    with (
        pytest.warns(jz.Checkpoints.Damaged),
        pytest.raises(ValueError, match="Every checkpoint in .* is damaged"),
    ):
        jobs.train(with_run(settings, resume_or_start=True), console)
    for again in ({"resume_or_start": True}, {"resume": True}, {}):
        with pytest.raises(ValueError, match="Every checkpoint .* is damaged: 1.damaged.*backup"):
            jobs.train(with_run(settings, **again), console)
    assert '"loss": 1.0' in (directory / "metrics.jsonl").read_text()
