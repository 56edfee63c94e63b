"""What several processes train is what one does, also when some are killed on the way."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import tiny_checkpoint
import tiny_job
from _kills import COMMAND, Kill, random_kill, train
from _processes import run
from safetensors.numpy import load_file
from train_by_processes import batches, init, loss_fn

from jaxzero import distributed

# Each step sums 16 rows and at most 24 products, in another order: n eps = 24 x 6e-8 of the terms.
# Adam divides by the root of the mean square, which can double that, over four steps.
TOLERANCE = 4 * 2 * 24 * 2**-24


# A dot product of 16 numbers is divided by the temperature, 0.05, over 60 steps. Weights are not
# compared: Adam makes whole steps of what is rounding alone, as in the key's bias, which changes no
# loss.
JOB_TOLERANCE = 60 * 20 * 16 * 2**-24


@pytest.mark.standard_promotion
def test_two_processes_train_what_one_and_one_device_do(tmp_path: Path):
    params, tx = init(), optax.adam(1e-2)
    opt_state, losses = tx.init(params), []
    for rows in batches():
        loss, grads = jax.value_and_grad(loss_fn)(params, rows)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    found = {}
    for count in (1, 2):
        out = tmp_path / f"{count}.npz"
        for end in run("train_by_processes.py", count, 4, out):
            assert end.status == 0, end.err
        found[count] = dict(np.load(out))
    for result in found.values():
        np.testing.assert_allclose(result.pop("losses"), losses, rtol=TOLERANCE)
        for name, x in result.items():
            scale = np.abs(params[name]).max()
            np.testing.assert_allclose(x, params[name], atol=TOLERANCE * scale, rtol=0)


@pytest.mark.parametrize("count", [1, 2])
def test_sums_over_processes_are_right_every_time(count: int):
    """Gloo's reduce-scatter is not: of the large sums it gives a few in a hundred wrong."""
    for process in run("sum_by_processes.py", count):
        assert process.said() == {"wrong": 0, "collectives": ["all-to-all"]}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the parameters that the example ends with."""
    return train(tmp_path_factory.mktemp("whole") / "run", None).digest


@pytest.mark.ci
@pytest.mark.parametrize(
    "kill",
    [
        Kill(host=0, after_step=13, during_save=True, moment=0.0),
        Kill(host=1, after_step=18, during_save=True, moment=0.0),
        Kill(host=1, after_step=9, during_save=False, moment=0.0, signum=signal.SIGSTOP),
    ],
    ids=["first host, saving", "second host, saving", "stopped"],
)
def test_nothing_is_lost_by_a_kill(kill: Kill, uninterrupted: str, tmp_path: Path):
    after = train(tmp_path / "run", kill)
    assert after.digest == uninterrupted
    assert after.nothing_lost and after.saved > 0
    assert after.was_saving or not kill.during_save


@pytest.mark.ci
def test_nothing_is_lost_by_a_kill_at_a_random_moment(uninterrupted: str, tmp_path: Path):
    seed = random.SystemRandom().randrange(10**6)
    kill = random_kill(seed, during_save=bool(seed % 2))
    after = train(tmp_path / "run", kill)
    assert after.digest == uninterrupted, kill
    assert after.nothing_lost, (kill, after)


@pytest.mark.ci
def test_a_host_that_is_lost_is_left_out(uninterrupted: str, tmp_path: Path):
    kill = Kill(host=1, after_step=9, during_save=False, moment=0.0)
    after = train(tmp_path / "run", kill, launch=["--min-nodes", "1"])
    assert after.status == 0 and after.nothing_lost and after.saved > 0
    assert after.digest != uninterrupted, "on two devices sums are made in another order"


def _job(folder: Path, *options: str, steps: str = "60", launch: tuple[str, ...] = ()) -> list[str]:
    job = ["train", "--checkpoint", str(folder / "tiny"), "--data", str(folder / "data")]
    job += ["--pairs", "8", "--steps", steps, "--save-every", "2", "--max-tokens", "8"]
    job += ["--wire", "float32", "--runs", str(folder / "runs"), *options]
    return [*COMMAND, "launch", *launch, "--", *COMMAND, *job] if launch else [*COMMAND, *job]


@pytest.mark.ci
def test_the_job_on_two_hosts_stops_goes_on_and_equals_one(tmp_path: Path):
    tiny_checkpoint.write(tmp_path / "tiny", tiny_checkpoint.tensors())
    (tmp_path / "data").mkdir()
    tiny_job.write_data(tmp_path / "data")
    two = ("--nodes", "2", "--devices-per-proc", "2", "--grace", "60")
    alone = {**os.environ, "JAX_NUM_CPU_DEVICES": "4"}
    subprocess.run(_job(tmp_path, "--name", "one"), check=True, env=alone, capture_output=True)

    command = _job(tmp_path, "--name", "two", "--resume-or-start", launch=two)
    journal = tmp_path / "runs" / "two" / "metrics.jsonl"
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while not (journal.is_file() and '"step": 2' in journal.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=300)
    finally:
        process.kill()  # what it launched ends with it
        process.wait()
    output = (tmp_path / "log").read_text()
    assert process.returncode == distributed.STOPPED, output
    assert re.search(r"\[0\] Interrupted; saved after step \d", output)

    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\[0\] Resumed after step \d", done.stdout)
    one, both = (_losses(tmp_path / "runs" / name) for name in ("one", "two"))
    np.testing.assert_allclose(both, one, rtol=JOB_TOLERANCE)
    exports = [tmp_path / "runs" / name / "export" / "model.safetensors" for name in ("one", "two")]
    one, both = map(load_file, exports)
    assert one.keys() == both.keys()


def _losses(directory: Path) -> list[float]:
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "step"]
