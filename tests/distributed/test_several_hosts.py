"""What several processes train is what one does, also when some are killed on the way."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from benchmarks.faults._kills import COMMAND, Kill, random_kill, train, workers
from benchmarks.network import _hosts
from benchmarks.network._hosts import ADDRESSES, Hosts
from jaxzero import distributed
from tests.interop import tiny_checkpoint
from tests.jobs import tiny_job
from tests.processes import ended, line_from, run

from .train_by_processes import ROWS, STEPS, examples, init, loss_fn

NO_HOSTS = _hosts.missing()
# The network namespaces have fixed names and addresses: one test at a time uses them.
pytestmark = pytest.mark.xdist_group("hosts")

# Each step sums 16 rows and at most 24 products, in another order: n eps = 24 x 6e-8 of the terms.
# Adam divides by the root of the mean square, which can double that, in each of the steps.
TOLERANCE = STEPS * 2 * 24 * 2**-24


# A dot product of 16 numbers is divided by the temperature, 0.05, over 60 steps. Weights are not
# compared: Adam makes whole steps of what is rounding alone, as in the key's bias, which changes no
# loss.
JOB_TOLERANCE = 60 * 20 * 16 * 2**-24


@pytest.fixture(scope="module")
def on_one_device() -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of all steps, and the parameters after them."""
    params, tx = init(), optax.adam(1e-2)
    order = iter(examples())
    with jax.numpy_dtype_promotion("standard"):
        opt_state, losses = tx.init(params), []
        for _ in range(STEPS):
            rows = np.stack(list(itertools.islice(order, ROWS)))
            loss, grads = jax.value_and_grad(loss_fn)(params, rows)
            updates, opt_state = tx.update(grads, opt_state)
            params = optax.apply_updates(params, updates)
            losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, params)


def _train_by_processes(directory: Path, count: int, devices: int, last: int) -> list[float]:
    """Train from the last checkpoint there to step `last`; the losses on the way."""
    for end in run("tests.distributed.train_by_processes", count, devices, directory, last):
        assert end.status == 0, end.err
    return np.load(directory / f"{last}.npz")["losses"].tolist()


def _assert_same(directory: Path, losses: list[float], expected) -> None:
    np.testing.assert_allclose(losses, expected[0], rtol=TOLERANCE)
    found = np.load(directory / f"{STEPS}.npz")
    for name, x in expected[1].items():
        scale = np.abs(x).max()
        np.testing.assert_allclose(found[name], x, atol=TOLERANCE * scale, rtol=0)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.one_in(2)
def test_processes_train_what_one_device_does(count: int, on_one_device, tmp_path: Path):
    _assert_same(tmp_path, _train_by_processes(tmp_path, count, 4, STEPS), on_one_device)


@pytest.mark.ci
def test_two_hosts_then_one_then_two_train_what_one_device_does(on_one_device, tmp_path: Path):
    """Every example once, in order: another would change the loss of its step, by a tenth or so."""
    losses = []
    for last, (count, devices) in zip((2, 4, STEPS), [(2, 4), (1, 2), (2, 4)], strict=True):
        losses += _train_by_processes(tmp_path, count, devices, last)
    _assert_same(tmp_path, losses, on_one_device)


@pytest.mark.ci
@pytest.mark.parametrize("count", [1, 2])
def test_sums_over_processes_are_right_every_time(count: int):
    """Gloo's reduce-scatter is not: of the large sums it gives a few in a hundred wrong."""
    for process in run("tests.mesh.sum_by_processes", count):
        assert process.said() == {"wrong": 0, "collectives": ["all-to-all"]}
        # A group that Gloo connects during a step fails if a process comes 30 s late.
        before, after = process.out.split("sharded\n")
        assert ("[Gloo]" in before) == (count > 1) and (count == 1 or "[Gloo]" not in after)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the parameters that the example ends with."""
    return train(tmp_path_factory.mktemp("whole") / "run", None).digest


@pytest.mark.ci
@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(
            Kill(host=0, after_step=13, during_save=True, moment=0.0),
            marks=pytest.mark.exhaustive,
        ),
        Kill(host=1, after_step=18, during_save=True, moment=0.0),
        Kill(host=1, after_step=9, during_save=False, moment=0.0, signum=signal.SIGSTOP),
    ],
    ids=["first host, saving", "second host, saving", "stopped"],
)
def test_nothing_is_lost_by_a_kill(kill: Kill, uninterrupted: str, tmp_path: Path):
    after = train(tmp_path / "run", kill)
    assert after.digest == uninterrupted and after.status == 0
    assert after.restarted and after.nothing_lost and after.saved > 0
    assert after.was_saving or not kill.during_save


@pytest.mark.ci
def test_nothing_is_lost_by_a_kill_at_a_random_moment(uninterrupted: str, tmp_path: Path):
    seed = random.SystemRandom().randrange(10**6)
    kill = random_kill(seed, during_save=bool(seed % 2))
    after = train(tmp_path / "run", kill)
    assert after.digest == uninterrupted and after.status == 0, kill
    assert after.restarted and after.nothing_lost, (kill, after)


@pytest.mark.ci
@pytest.mark.skipif(NO_HOSTS is not None, reason=f"two hosts: {NO_HOSTS}")
def test_a_network_that_is_gone_ends_both():
    script = Path(__file__).with_name("distributed_run.py")
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with Hosts() as hosts:
        processes = [
            hosts.start(
                number,
                [sys.executable, str(script), f"{ADDRESSES[0]}:7077", str(number), "2", "train"],
                env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        for process in processes:
            line_from(process, "training")
        hosts.cut()
        for end in ended(processes, seconds=60):
            if end.status == distributed.PEER_LOST:
                assert "it died, hangs, or " in end.err
            else:  # JAX may see it first
                assert end.status == -signal.SIGABRT and "another task died" in end.err


@pytest.mark.ci
def test_a_host_that_is_lost_is_left_out(uninterrupted: str, tmp_path: Path):
    kill = Kill(host=1, after_step=9, during_save=False, moment=0.0)
    after = train(tmp_path / "run", kill, launch=["--min-nodes", "1"])
    assert after.status == 0 and after.restarted and after.nothing_lost and after.saved > 0
    assert after.digest != uninterrupted, "on two devices sums are made in another order"


def _job(folder: Path, *options: str, steps: str = "60", launch: tuple[str, ...] = ()) -> list[str]:
    job = ["train", "--checkpoint", str(folder / "tiny"), "--data", str(folder / "data")]
    job += ["--batch-size", "8", "--steps", steps, "--save-every", "2", "--max-tokens", "8"]
    job += ["--runs", str(folder / "runs"), *options]
    return [*COMMAND, "launch", *launch, "--", *COMMAND, *job] if launch else [*COMMAND, *job]


@pytest.mark.ci
def test_the_job_on_two_hosts_stops_goes_on_and_equals_one(tmp_path: Path):
    tiny_checkpoint.write(tmp_path / "tiny", tiny_checkpoint.tensors())
    (tmp_path / "data").mkdir()
    tiny_job.write_data(tmp_path / "data")
    two = ("--nodes", "2", "--devices-per-proc", "2", "--grace", "60")
    alone = {**os.environ, "JAX_NUM_CPU_DEVICES": "4"}
    exact = ("--wire", "float32", "--name")
    subprocess.run(_job(tmp_path, *exact, "one"), check=True, env=alone, capture_output=True)

    command = _job(tmp_path, *exact, "two", "--resume-or-start", launch=two)
    status, output = _disturbed(
        command, tmp_path / "runs" / "two", 2, lambda launcher: os.kill(launcher, signal.SIGTERM)
    )
    assert status == distributed.STOPPED, output
    assert re.search(r"\[0\] Interrupted; saved after step \d", output)

    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\[0\] Resumed after step \d", done.stdout)
    one, both = (tiny_job.losses(tmp_path / "runs" / name) for name in ("one", "two"))
    np.testing.assert_allclose(both, one, rtol=JOB_TOLERANCE)
    one, both = (tiny_job.exported(tmp_path / "runs" / name) for name in ("one", "two"))
    assert one.keys() == both.keys()


@pytest.mark.exhaustive
def test_the_job_loses_nothing_by_a_kill(tmp_path: Path):
    """With a wire state, which is saved beside, and a journal, which is cut at the checkpoint."""
    tiny_job.write_checkpoint(tmp_path / "tiny")
    (tmp_path / "data").mkdir()
    tiny_job.write_data(tmp_path / "data")
    two = ("--nodes", "2", "--devices-per-proc", "2", "--grace", "5", "--restart", "1")

    def command(name: str) -> list[str]:
        options = ("--name", name, "--resume-or-start", "--wire", "zeropp4")
        return _job(tmp_path, *options, steps="12", launch=two)

    def kill(launcher: int) -> None:
        os.kill(workers(launcher)[1], signal.SIGKILL)

    whole = subprocess.run(command("whole"), capture_output=True, text=True, timeout=300)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    status, output = _disturbed(command("killed"), tmp_path / "runs" / "killed", 7, kill)
    assert status == 0, output
    assert "starting again" in output and re.search(r"\[0\] Resumed after step \d", output)
    one, other = (tmp_path / "runs" / name for name in ("whole", "killed"))
    assert tiny_job.losses(one) == tiny_job.losses(other) and len(tiny_job.losses(one)) == 12
    assert tiny_job.exported(one) == tiny_job.exported(other)


def _disturbed(
    command: list[str], directory: Path, step: int, act: Callable[[int], None]
) -> tuple[int, str]:
    """Run a launcher, `act` on it once the job has made a step; its status, and what was said."""
    journal, log = directory / "metrics.jsonl", directory.parent / f"{directory.name}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 300
        while not (journal.is_file() and f'"step": {step}' in journal.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        act(process.pid)
        process.wait(timeout=300)
    finally:
        process.kill()  # what it launched ends with it
        process.wait()
    return process.returncode, log.read_text()
