"""What the journal shows elsewhere: TensorBoard's files, Weights & Biases, and traces of steps."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2

from jaxzero import jobs
from jaxzero.jobs._journal import Journal, make_trackers
from jaxzero.jobs._loop import StepProfiler

Event = vars(event_pb2)["Event"]  # made when it is imported


def make_settings(runs: Path, **run) -> jobs.Train:
    return jobs.Train(run=jobs.Run(name="run", runs=runs, **run))


def open_journal(settings: jobs.Train) -> Journal:
    trackers = make_trackers(settings, Console(file=io.StringIO()))
    return Journal(settings.run.directory / "metrics.jsonl", trackers)


def stopped_and_resumed(settings: jobs.Train) -> Journal:
    """Ended hard after step 5 and an evaluation; the last checkpoint was that of step 3."""
    journal = open_journal(settings)
    journal.clear()
    journal.append("evaluation", 0, mrr_at_10=0.25)
    for step in range(1, 6):
        journal.append("step", step, loss=1 / step, accuracy=step / 8)
    journal.append("evaluation", 5, mrr_at_10=0.5)
    files = list((settings.run.directory / "tensorboard").iterdir())
    left = [file.read_bytes() for file in files]
    journal.close()
    assert [file.read_bytes() for file in files] == left, "a process that is killed closes nothing"

    journal = open_journal(settings)
    journal.drop_after(3)
    for step in range(4, 8):
        journal.append("step", step, loss=-1 / step, accuracy=step / 16)
    journal.append("evaluation", 7, mrr_at_10=0.75)
    journal.close()
    return journal


def events(file: Path) -> Iterator[Any]:
    """Records are a length, its checksum, the bytes and theirs: little-endian, sums of 4 bytes."""
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert len(data) >= 16 + length, "cut off"
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def points(directory: Path) -> list[tuple[str, int, float]]:
    """What TensorBoard shows: it reads files by name, and a start voids its step and later ones."""
    shown: list[tuple[str, int, float]] = []
    for file in sorted(directory.iterdir()):
        for event in events(file):
            if event.session_log.status == 1:  # START
                shown = [point for point in shown if point[1] < event.step]
            shown += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return shown


def test_tensorboard_shows_what_the_journal_says(tmp_path: Path):
    journal = stopped_and_resumed(make_settings(tmp_path))
    rows = journal.rows("step") + journal.rows("evaluation")
    assert len(rows) == 9
    said = [
        (name, row["step"], pytest.approx(value, rel=1e-6))  # float32
        for row in rows
        for name, value in row.items()
        if name not in ("kind", "step")
    ]
    shown = points(tmp_path / "run" / "tensorboard")
    assert sorted(shown, key=lambda point: point[:2]) == sorted(said, key=lambda point: point[:2])


def test_a_journal_that_cannot_be_written_or_read_says_where(tmp_path: Path):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with pytest.raises(OSError, match=r"No space left on device\. .*`resume`.*'/dev/full'"):
        Journal(Path("/dev/full")).append("step", 1, loss=1.0)
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append("step", 1, loss=1.0)
    with journal.path.open("a") as file:
        file.write("\0\0\n")
    with pytest.raises(
        ValueError, match=r"Line 2 of '.*metrics.jsonl' is no JSON: .* move the file"
    ):
        journal.rows("step")


def test_a_run_that_starts_again_shows_nothing_of_the_first(tmp_path: Path):
    journal = open_journal(make_settings(tmp_path))
    for loss in (1.0, 2.0):
        journal.clear()
        journal.append("step", 1, loss=loss)
    journal.close()
    assert points(tmp_path / "run" / "tensorboard") == [("loss", 1, 2.0)]


def test_nothing_is_shown_where_nothing_is_installed_or_on_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    output = io.StringIO()
    console = Console(file=output, width=200)
    settings = make_settings(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: 1)
        assert not make_trackers(settings, console)
    assert len(make_trackers(settings, console)) == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not make_trackers(settings, console)
    assert (
        output.getvalue()
        == 'Nothing for TensorBoard: tensorboardX is missing (`pip install "jaxzero[train]"`)\n'
    )
    with pytest.raises(
        ValueError, match="`wandb='p'` needs the package wandb.* `pip install wandb`"
    ):
        make_trackers(make_settings(tmp_path, wandb="p"), console)


RECORDER = """
calls = []

class Run:
    def log(self, values, step):
        calls.append(("log", step, values))

    def finish(self):
        calls.append(("finish",))

def init(**options):
    calls.append(("init", options))
    return Run()
"""


def test_weights_and_biases_keeps_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module that notes its calls stands for the real one, which wants a service."""
    (tmp_path / "wandb.py").write_text(RECORDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    settings = make_settings(tmp_path, wandb="project")
    stopped_and_resumed(settings)
    import wandb  # the recorder

    calls: list[Any] = wandb.calls
    inits = [options for kind, *options in calls if kind == "init"]
    assert len(inits) == 2 and inits[0] == inits[1]
    (options,) = inits[0]
    assert options["id"] == (tmp_path / "run" / "wandb_id").read_text()
    assert (options["project"], options["name"], options["resume"]) == ("project", "run", "allow")
    assert options["dir"] == str(tmp_path / "run")
    assert options["config"]["optimization"]["learning_rate"] == 2e-4
    logged = [rest for kind, *rest in calls if kind == "log"]
    assert logged[0] == [0, {"mrr_at_10": 0.25}]
    assert logged[7] == [3, {"loss": 1 / 3, "accuracy": 3 / 8}]  # of the checkpoint
    assert [step for step, _ in logged] == [0, 1, 2, 3, 4, 5, 5, 3, 4, 5, 6, 7, 7]
    assert calls[-1] == ("finish",)

    with contextlib.closing(open_journal(settings)) as journal:
        journal.clear()  # a new run
    calls.pop()  # its end
    assert calls[-1][0] == "init" and calls[-1][1]["id"] != options["id"]


def traced_steps(directory: Path) -> list[list[int]]:
    """The numbers of the steps in each trace, as the file for Chrome has them."""
    return [
        [
            int(event["args"]["step_num"])
            for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
            if event.get("name") == "train"
        ]
        for file in sorted(directory.rglob("*.trace.json.gz"))
    ]


def test_steps_are_traced(tmp_path: Path):
    with StepProfiler(range(3, 5), tmp_path) as profiler:
        for number in range(2, 7):
            with profiler.step(number):
                jnp.ones(3).block_until_ready()
    assert traced_steps(tmp_path) == [[3, 4]]


@pytest.mark.ci
def test_rounds_that_hold_steps_to_trace_are_traced(tmp_path: Path):
    with StepProfiler(range(4, 6), tmp_path) as profiler:  # in the second round and in the third
        for first in range(1, 11, 2):
            with profiler.step(first, 2):
                jnp.ones(3).block_until_ready()
    assert traced_steps(tmp_path) == [[3, 5]]


def test_a_trace_ends_with_the_run(tmp_path: Path):
    with pytest.raises(OSError, match="gone"), StepProfiler(range(3, 9), tmp_path) as profiler:
        with profiler.step(5):  # resumed in the middle
            pass
        with profiler.step(6):
            raise OSError("The power is gone.")
    assert traced_steps(tmp_path) == [[5, 6]]
    with StepProfiler(range(0), tmp_path) as profiler, profiler.step(1):
        pass
    assert len(traced_steps(tmp_path)) == 1
