"""The whole job on a tiny encoder: what it writes, going on after a stop, and refusals."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_args

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jaxzero import commands, jobs
from jaxzero.distributed import Watchdog
from jaxzero.jobs import _loop, _printed
from jaxzero.jobs._loop import run_steps
from jaxzero.jobs._session import begin, open_session, restore
from jaxzero.jobs._setup import zero_config
from tests.interop import tiny_checkpoint

from .tiny_job import OPTIMIZATION, exported, losses, make_settings, with_run, with_wire

# optax computes `decay**count` from a float and an integer.
pytestmark = pytest.mark.standard_promotion


class Finished(NamedTuple):
    """A run from the first step to the last, which the tests here only look at."""

    settings: jobs.Train
    outcome: jobs.Outcome
    text: str

    @property
    def directory(self) -> Path:
        return self.settings.run.directory


@pytest.fixture(scope="module")
def finish(
    tiny_encoder: Path, tiny_code: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[jobs.Wire], Finished]:
    @functools.cache
    def run(wire: jobs.Wire) -> Finished:
        settings = make_settings(tiny_encoder, tiny_code, tmp_path_factory.mktemp("runs"))
        settings = with_wire(settings, wire)
        output = io.StringIO()
        with jax.numpy_dtype_promotion("standard"):
            outcome = jobs.train(settings, Console(file=output, width=120))
        return Finished(settings, outcome, output.getvalue())

    return run


@pytest.fixture(scope="module")
def finished(finish: Callable[[jobs.Wire], Finished]) -> Finished:
    return finish("zeropp")


def at_step(step: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something while the given step runs."""
    one_step = _loop._one_step

    def with_action(session, state, step_fn):
        if state.step + 1 == step:
            action()
        return one_step(session, state, step_fn)

    monkeypatch.setattr(_loop, "_one_step", with_action)


def power_cut() -> None:
    raise OSError("The power is gone.")


def test_writes_everything_and_learns(finished: Finished):
    settings, outcome, text = finished
    directory = finished.directory
    assert (directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in directory.iterdir()) == [
        "checkpoints",
        "export",
        "loss.png",
        "metrics.jsonl",
        "tensorboard",
    ]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("evaluation", 0),
        *(("step", step) for step in range(1, 5)),
        ("evaluation", 4),
        ("node_bytes", 4),
    ]
    assert rows[0] | dataclasses.asdict(outcome.before) == rows[0]
    assert rows[-2] | dataclasses.asdict(outcome.after) == rows[-2]
    assert losses(directory)[-1] < losses(directory)[0]
    # The pooler took no part; everything that did was changed.
    before, after = (
        load_file(f / "model.safetensors") for f in (settings.checkpoint, directory / "export")
    )
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}
    assert "8 fake CPU devices, 2 nodes x 4, 1 process" in text
    assert "MRR@10" in text and "recall@1" in text


def test_the_first_lines_say_what_is_held_and_sent(finished: Finished):
    first, _ = finished.text.split("Before training")
    held, sent = first.splitlines()[-2:]
    weights = {
        name: x.nbytes
        for name, x in load_file(finished.settings.checkpoint / "model.safetensors").items()
        if x.dtype == np.float32 and not name.startswith("pooler")
    }
    found = re.fullmatch(
        r"A device holds ([\d.]+) KiB of parameters and ([\d.]+) KiB of optimizer state", held
    )
    assert found
    parameters, state = (float(number) * 2**10 for number in found.groups())
    assert parameters == pytest.approx(sum(weights.values()) / 8, rel=0.01)  # and some padding
    assert state == pytest.approx(2 * parameters, rel=0.01)  # of Adam
    node_bytes = finished.outcome.node_bytes.sent / 2**10
    assert sent.startswith(f"A step sends {node_bytes:.2f} KiB into each node and ")
    assert sent.endswith("KiB to each device from its own node")


def test_the_summary_says_what_entered_a_node(finished: Finished):
    crossed = finished.outcome.node_bytes
    lines = (finished.directory / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {"kind": "node_bytes", "step": 4, **dataclasses.asdict(crossed)}
    # 0.75 M of the 2 M that ZeRO-3 sends in 16 bits, and 4 M in 32; M for all but small leaves. It
    # holds layers as small as these from forward to backward, so that weights are sent once.
    assert crossed.sent / crossed.zero3_bfloat16 == pytest.approx(0.75 / 2, abs=0.1)
    assert crossed.zero3_bfloat16 / crossed.zero3_float32 == pytest.approx(1 / 2, abs=1e-3)
    text = " ".join(finished.text.split())
    share = f"{crossed.sent / crossed.zero3_float32:.0%}"
    assert f"between nodes {crossed.sent / 2**10:.2f} KiB of weights and gradients" in text
    assert f"{crossed.zero3_float32 / 2**10:.2f} KiB in float32 (this is {share})" in text


@pytest.mark.ci
def test_stopped_and_resumed_equals_uninterrupted(
    settings: jobs.Train,
    finish: Callable[[jobs.Wire], Finished],
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
):
    finished = finish("zeropp4")  # which has the most to remember: all others, and a wire state
    settings = with_wire(settings, "zeropp4")
    directory = settings.run.directory
    handler = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    with monkeypatch.context() as patch:
        at_step(1, lambda: os.kill(os.getpid(), signal.SIGINT), patch)
        with pytest.raises(jobs.Interrupted, match="'run' was interrupted after step 1") as error:
            jobs.train(settings, console)
    assert (error.value.name, error.value.step) == ("run", 1)
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (directory / "export").exists()

    resumed = with_run(settings, resume=True)
    with monkeypatch.context() as patch:
        at_step(4, power_cut, patch)
        with pytest.raises(OSError, match="The power is gone"):
            jobs.train(resumed, console)
    assert len(losses(directory)) == 3  # the last checkpoint is that of step 2

    jobs.train(resumed, console)
    assert losses(directory) == losses(finished.directory)
    assert exported(directory) == exported(finished.directory)
    assert "starts anew" not in console.export_text()


@pytest.mark.ci
def test_a_run_whose_journal_is_lost_goes_on(finished: Finished, console: Console, tmp_path: Path):
    shutil.copytree(finished.settings.run.runs, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    settings = with_run(finished.settings, runs=tmp_path, resume=True)
    outcome = jobs.train(settings, console)
    assert (outcome.before, outcome.after) == (finished.outcome.before, finished.outcome.after)


def test_sigterm_saves_and_says_so(
    settings: jobs.Train, console: Console, monkeypatch: pytest.MonkeyPatch
):
    handler = signal.getsignal(signal.SIGTERM)
    at_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch)
    with pytest.raises(jobs.Interrupted, match="after step 1 and saved") as error:
        jobs.train(with_run(settings, resume_or_start=True), console)
    assert not error.value.by_ctrl_c
    assert signal.getsignal(signal.SIGTERM) is handler
    with open_session(with_run(settings, resume=True), console) as session:
        assert session.checkpoints.latest_step() == 1


@pytest.mark.ci
def test_batches_that_adapt_go_on_in_the_middle_of_one(
    settings: jobs.Train, console: Console, monkeypatch: pytest.MonkeyPatch
):
    optimization = dataclasses.replace(OPTIMIZATION, steps=6, adaptive_batch=0.2, largest_batch=64)
    settings = dataclasses.replace(settings, optimization=optimization)
    with open_session(with_run(settings, name="whole"), console) as session:
        whole = run_steps(session, begin(session), Watchdog())
        rows = session.journal.rows("step")
    assert [row["updates"] for row in rows[:2]] == [0, 1]  # the first batch is of two steps
    assert all(2 <= row["steps_per_update"] <= 4 for row in rows)  # 64 pairs are four
    assert ["gradient_similarity" in row for row in rows] == [False] + [True] * 5
    assert rows[2]["updates"] == 1  # where it is saved now: one step into a batch

    with monkeypatch.context() as patch, pytest.raises(OSError, match="The power is gone"):
        at_step(4, power_cut, patch)
        with open_session(with_run(settings, save_every=3), console) as session:
            run_steps(session, begin(session), Watchdog())
    with open_session(with_run(settings, resume=True), console) as session:
        resumed = run_steps(session, restore(session), Watchdog())
    assert jax.tree.all(jax.tree.map(np.array_equal, resumed.params, whole.params))


def test_numbers_that_json_lacks_are_no_numbers_of_a_row():
    numbers = {"loss": math.nan, "gradient_similarity": 0.1, "noise_scale_steps": math.inf}
    assert list(_loop._finite(numbers)) == ["gradient_similarity"]


def test_the_summary_says_how_many_updates_there_were():
    rows = [{"step": 1, "updates": 0.0}, {"step": 9, "updates": 4.0, "noise_scale_steps": 3.25}]
    assert _printed._batches(rows) == "4, of 2.2 steps on average; gradient noise scale 3.2 steps"
    assert _printed._batches(rows[:1]) == "0"


@pytest.mark.ci
def test_the_same_run_on_another_mesh(settings: jobs.Train, console: Console):
    plain = with_run(with_wire(settings, "float32"), name="plain")
    with open_session(plain, console) as session:
        run_steps(session, begin(session), Watchdog())
    other = dataclasses.replace(
        settings,
        devices=jobs.Devices(nodes=1, devices=2),
        sharding=jobs.Sharding(stage=1, wire="float32"),
    )
    outcome = jobs.train(other, console)
    expected = losses(plain.run.directory)
    # Sums in another order: a few roundings of float32, which four Adam steps multiply.
    np.testing.assert_allclose(losses(other.run.directory), expected, rtol=1e-4)
    assert outcome.node_bytes is None
    assert "between nodes" not in console.export_text()


def test_refuses_to_resume_or_to_start(settings: jobs.Train, finished: Finished, console: Console):
    with pytest.raises(ValueError, match="nothing to resume in .*Leave out `resume`"):
        jobs.train(with_run(settings, resume=True), console)
    with pytest.raises(ValueError, match="already holds a run, at step 4.*choose another `name`"):
        jobs.train(finished.settings, console)
    changed = dataclasses.replace(
        with_run(finished.settings, resume=True),
        optimization=dataclasses.replace(OPTIMIZATION, learning_rate=1.0),
    )
    with pytest.raises(ValueError, match="another `learning_rate`: .* with 0.01, got 1.0"):
        jobs.train(changed, console)


def test_says_plainly_when_torch_is_missing(
    settings: jobs.Train, console: Console, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert jobs.train(untrained(settings), console).torch_difference is None
    assert "not compared: torch or transformers is missing" in console.export_text()


def test_an_export_that_disagrees_is_an_error(
    settings: jobs.Train, console: Console, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(
        "jaxzero.jobs._tasks.embed_with_transformers",
        lambda directory, ids, mask: np.zeros((len(ids), tiny_checkpoint.HIDDEN), np.float32),
    )
    with pytest.raises(RuntimeError, match="embeddings differ by .*, more than 1e-04"):
        jobs.train(untrained(settings), console)


def untrained(settings: jobs.Train) -> jobs.Train:
    """Zero steps: the training step is not even compiled."""
    return dataclasses.replace(settings, optimization=jobs.Optimization(steps=0))


def test_too_many_devices(settings: jobs.Train, console: Console):
    many = dataclasses.replace(settings, devices=jobs.Devices(devices=9))
    with pytest.raises(ValueError, match=r"`devices` asks for 9, JAX sees 8 \(cpu\)"):
        jobs.train(many, console)


@pytest.mark.parametrize(
    ("max_tokens", "message"),
    [
        (25, r"`max_tokens` must be at most 24, for which the checkpoint has positions; got 25\."),
        (2, r"`max_tokens` must be more than the 2 special tokens of each text; got 2\."),
        (1, r"`max_tokens` must be more than the 2 special tokens of each text; got 1\."),
    ],
)
def test_lengths_that_the_model_lacks_name_the_setting(
    settings: jobs.Train, console: Console, max_tokens: int, message: str
):
    data = dataclasses.replace(settings.data, max_tokens=max_tokens)
    with pytest.raises(ValueError, match=message):
        jobs.train(dataclasses.replace(untrained(settings), data=data), console)


def test_report_trains_and_writes_nothing(tiny_encoder: Path, console: Console, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("made a folder"))
    commands.report(commands.Report(checkpoint=tiny_encoder), console)
    text = console.export_text()
    assert "8 fake CPU devices" in text
    lines = text.strip().splitlines()[-5:]
    labels = [line[:14].strip() for line in lines]
    assert labels == ["Per device", "Into a node", "Whole", "Largest wait", "Details"]
    commands.report(commands.Report(checkpoint=tiny_encoder, detail=("leaves", "traffic")), console)
    text = console.export_text()
    assert "embeddings.word.embedding" in text
    assert re.search("weights +node +all-gather +uint8", text)
    assert re.search("gradients +local +all-to-all +uint8", text)
    assert "enter a node" in text and "of slices (hpZ)" in text


@pytest.mark.parametrize("wire", get_args(jobs.Wire))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_wire_goes_with_every_stage(stage: int, wire: jobs.Wire):
    config = zero_config(jobs.Sharding(stage=stage, wire=wire))
    assert config.stage == stage
    assert (config.hpz is not None) == (stage == 3 and wire.startswith("zeropp"))
    assert config.needs_wire_state == (stage == 3 and wire == "zeropp4")
    assert (config.gradients.node is not None) == (wire != "float32")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jobs.Data(max_tokens=0), "`max_tokens` must be positive; got 0"),
        (lambda: jobs.Devices(devices=0), "`devices` must be positive; got 0"),
        (lambda: jobs.Optimization(learning_rate=-1.0), "`learning_rate` must be positive"),
        (lambda: jobs.Optimization(learning_rate=float("inf")), "positive and finite; got inf"),
        (
            lambda: commands.Convert(source=Path(), target=Path(), max_shard_gb=float("inf")),
            "`max_shard_gb` must be positive and finite; got inf",
        ),
        (lambda: jobs.Optimization(steps=-1), "`steps` cannot be negative; got -1"),
        (lambda: jobs.Optimization(adaptive_batch=1.0), "`adaptive_batch` .* less than 1; got 1.0"),
        (
            lambda: jobs.Optimization(adaptive_batch=0.1, batch_size=32, largest_batch=63),
            "`largest_batch` must be at least two steps of `batch_size` 32.* got 63",
        ),
        (lambda: jobs.Run(name="../x"), r"`name` must be a plain folder name; got '\.\./x'"),
        (lambda: jobs.Run(resume=True), "`resume` needs the `name` of the run"),
        (lambda: jobs.Run(keep_checkpoints=0), "`keep_checkpoints` must be positive; got 0"),
        (lambda: jobs.Run(profile="0:5"), "`profile` must be the numbers of .* 3:5; got '0:5'"),
        (lambda: jobs.Run(profile="5:3"), "got '5:3'"),
        (lambda: jobs.Run(profile="5"), "got '5'"),
    ],
)
def test_settings_check_themselves(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_run_without_a_name_gets_the_time():
    assert len(jobs.Run().named().directory.name) == len("20260131-235959")
