"""A run goes on from a checkpoint bit for bit, on other meshes, stages and processes as well."""

import json
import shutil

import jax
import numpy as np
import pytest

import jaxzero as jz
from tests.jobs.tiny_run import assert_same_bits, make_run, whole
from tests.processes import run as run_processes

pytestmark = pytest.mark.standard_promotion  # optax


@pytest.fixture(scope="module")
def run():
    return make_run(nodes=2, devices=8)


@pytest.fixture(scope="module")
def left(run, tmp_path_factory):
    """A run of 6 steps that was saved after the 3rd: the directory, and the state after both."""
    directory, at = tmp_path_factory.mktemp("left"), {}
    state = jax.jit(lambda state: jax.tree.map(lambda x: x.copy(), state))(run.first)
    with jz.Checkpoints(directory, run.zero) as checkpoints, jax.numpy_dtype_promotion("standard"):
        for step in range(1, 7):
            state = run.step(state)
            if step in (3, 6):
                at[step] = whole(run, state)
            if step == 3:  # the next step takes the memory of what is being saved
                checkpoints.save(3, state, extra={"position": 72})
    return directory, at


def test_a_resumed_run_equals_one_that_was_not_interrupted(run, left):
    directory, at = left
    with jz.Checkpoints(directory, run.zero) as checkpoints:
        step, state, extra = checkpoints.restore(run.first)
    assert (step, extra) == (3, {"position": 72})
    assert_same_bits(whole(run, state), at[3])
    shardings = [jax.tree.map(lambda x: x.sharding, tree["params"]) for tree in (state, run.first)]
    assert shardings[0] == shardings[1]
    for _ in range(3):
        state = run.step(state)
    assert_same_bits(whole(run, state), at[6])


@pytest.fixture(scope="module")
def six():
    return make_run(nodes=3, devices=6)


def test_moves_between_meshes_and_stages(left, six, tmp_path):
    """8 devices to 4 to 6, and stage 3 to 0 to 3."""
    directory, at = left
    for number, run in enumerate([make_run(2, 4, jz.ddp()), six]):
        with jz.Checkpoints(directory, run.zero) as checkpoints:
            state = checkpoints.restore(run.first).state
        assert_same_bits(whole(run, state), at[3])
        directory = tmp_path / str(number)
        with jz.Checkpoints(directory, run.zero) as checkpoints:
            checkpoints.save(3, state)
    description = json.loads((directory / "3" / "jaxzero.json").read_text())
    assert description["mesh"] == {"node": 3, "local": 2}
    assert description["stage"] == 3 and "Int4(block=128" in description["config"]
    assert description["leaves"]["params.w"] == "float32[7,5]"  # 36 elements where it is split


@pytest.fixture(scope="module")
def two_processes(left, tmp_path_factory):
    """Two processes of two devices take up the run, and save theirs: where, and what they said."""
    (saved, at), folder = left, tmp_path_factory.mktemp("processes")
    shutil.copytree(saved, folder / "one")
    np.savez(folder / "want.npz", **at[3])
    ends = run_processes("tests.checkpoint.checkpoint_by_processes", 2, folder, seconds=300)
    return folder, [end.said() for end in ends]


@pytest.mark.ci
def test_moves_between_numbers_of_processes(two_processes, six):
    """1 process to 2, which the script compares, and 2 to 1."""
    folder, _ = two_processes
    files = json.loads((folder / "many" / "2" / "jaxzero.json").read_text())["files"]
    assert {name.split("/")[1] for name in files} >= {"ocdbt.process_0", "ocdbt.process_1"}
    with jz.Checkpoints(folder / "many", six.zero) as checkpoints:
        step, state, extra = checkpoints.restore(six.first)
    assert (step, extra) == (2, {"position": 48})
    assert_same_bits(whole(six, state), dict(np.load(folder / "many.npz")))


@pytest.mark.ci
def test_processes_fail_together(two_processes):
    """One cannot write, and both hear of it. Nothing is left of this, nor of what did not begin."""
    folder, said = two_processes
    for number, each in enumerate(said):
        reason = "OSError" if number == 1 else "RuntimeError: process 1: OSError"
        assert f"step 4 could not be saved in '{folder / 'many'}' ({reason}: " in each["failed"]
    assert sorted(path.name for path in (folder / "many").iterdir()) == ["2", "3.damaged"]


@pytest.mark.ci
def test_what_one_process_cannot_read_no_process_takes_for_no_checkpoint(two_processes):
    _, (first, second) = two_processes
    assert second["unread"] == "FileNotFoundError: a file is gone"
    assert first["unread"] == "RuntimeError: process 1: FileNotFoundError: a file is gone"


@pytest.mark.ci
def test_what_one_process_cannot_verify_is_renamed_by_none(two_processes):
    folder, (first, second) = two_processes
    assert second["unverified"].startswith(f"OSError: '{folder / 'many' / '2'}")
    assert "cannot be read (Input/output error)" in second["unverified"]
    assert first["unverified"] == f"RuntimeError: process 1: {second['unverified']}"
    assert not (folder / "many" / "2.damaged").exists()


@pytest.mark.ci
def test_processes_agree_on_damage_and_on_differences(two_processes):
    folder, (first, second) = two_processes
    assert len(first["damaged"]) == 1 and first["damaged"] == second["damaged"]
    assert "step 3" in first["damaged"][0] and "state/" in first["damaged"][0]
    assert (folder / "many" / "3.damaged").is_dir()
    assert first["steps"] == second["steps"]
    assert (
        first["steps"].startswith("ValueError: `step` must be the same")
        and "[4, 5]" in first["steps"]
    )
    assert first["different"] == second["different"]
    assert first["different"].startswith("ValueError: The leaf `own` is local to each process")


@pytest.mark.ci
def test_a_process_that_does_not_come_is_waited_for_so_long_and_no_longer(two_processes):
    folder, (first, _) = two_processes
    assert first["lost"].startswith("RuntimeError: The checkpoint of step 5 could not be saved")
    assert "process 1" in first["lost"] and "steps [2]" in first["lost"]
    assert 2 <= first["waited"] < 30
