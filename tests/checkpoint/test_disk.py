"""Runs that are killed while they save, disks that are full, and mistakes."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz

from .saved import files_in, flip, largest_file, make_state

KILLED = """
import os, signal, sys
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
import jaxzero as jz
from jaxzero._checkpoint import saver

zero = jz.Zero(jz.make_mesh(1, devices=jax.devices()[:1]))
saver.publish = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
with jz.Checkpoints(sys.argv[1], zero) as checkpoints:
    checkpoints.save(60, {"params": zero.shard({"w": np.ones((3, 5), np.float32)})})
"""


def test_a_run_killed_while_it_saves_leaves_the_checkpoint_before(directory, zero):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(directory)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [path for path in directory.iterdir() if path.name.startswith(".60.")]
    assert len(left) == 1 and (left[0] / "SHA256SUMS").is_file()  # all but the rename was done
    with jz.Checkpoints(directory, zero) as checkpoints:
        assert checkpoints.latest_step() == 40
        assert checkpoints.restore(make_state(zero, 0)).step == 40
        checkpoints.save(60, make_state(zero, 60))
    assert sorted(path.name for path in directory.iterdir()) == ["40", "60"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB, which only root can mount."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    done = mount and subprocess.run(command, capture_output=True, text=True)
    if not done or done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr if done else 'no `mount`'}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


# If writing an array's description fails first, Orbax raises while TensorStore still writes the
# array. Its thread then finds the event loop closed, and can only print that.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk(small_disk, zero):
    """The save fails, those before it stay, and the next one succeeds where there is room."""
    directory, noise = small_disk / "run", np.random.default_rng(0)

    def state(kilobytes):  # of numbers that no compression makes fewer
        return {"x": jnp.asarray(noise.integers(0, 2**32, kilobytes * 256, np.uint32))}

    with jz.Checkpoints(directory, zero) as checkpoints:
        checkpoints.save(1, state(300))
        checkpoints.save(2, state(2000))
        with pytest.raises(RuntimeError, match=rf"step 2 .*'{directory}'.*(?i:no space).*\[1\]"):
            checkpoints.save(3, state(300))
        assert sorted(path.name for path in directory.iterdir()) == ["1"]
        (small_disk / "full").write_bytes(bytes(400_000))
        checkpoints.save(3, state(300))
        with pytest.raises(RuntimeError, match="step 3 could not be saved"):
            checkpoints.close()
        assert checkpoints.restore(state(300)).step == 1
        (small_disk / "full").unlink()
        checkpoints.save(3, state(300))
        assert checkpoints.restore(state(300)).step == 3


def test_a_directory_that_cannot_be_written_to(small_disk, source, zero):
    shutil.copytree(source, small_disk / "run")
    flip(largest_file(small_disk / "run" / "40"), 0.5)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with jz.Checkpoints(small_disk / "run", zero) as checkpoints:
        with pytest.warns(checkpoints.Damaged, match="step 40 .*left where it is"):
            assert checkpoints.restore(make_state(zero, 0)).step == 20
        with pytest.raises(RuntimeError, match="step 60 could not be saved.*Read-only"):
            checkpoints.save(60, make_state(zero, 60))


def test_sha256sum_agrees(source):
    """The program reads the list, and finds every file but the list itself in it."""
    if shutil.which("sha256sum") is None:
        pytest.skip("there is no `sha256sum`")
    folder = source / "40"
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    files = {path.relative_to(folder).as_posix() for path in files_in(folder)}
    assert len(done.stdout.splitlines()) == len(files) - 1
    sizes = json.loads((folder / "jaxzero.json").read_text())["files"]
    assert files == sizes.keys() | {"SHA256SUMS", "jaxzero.json"}
    assert all((folder / name).stat().st_size == size for name, size in sizes.items())


def test_mistakes_are_named(directory, zero):
    with pytest.raises(ValueError, match="`timeout` must be a positive number of seconds; got 0"):
        jz.Checkpoints(directory, zero, timeout=0)
    with jz.Checkpoints(directory, zero) as checkpoints:
        with pytest.raises(TypeError, match=r"`params.w` must be an array; got float"):
            checkpoints.save(50, {"params": {"w": 1.0}})
        with pytest.raises(TypeError, match=r"`epoch` must be an array; got int"):
            checkpoints.save(50, {"epoch": 1})
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(50, make_state(zero, 0), extra={"key": object()})
        with pytest.raises(ValueError, match="`step` must not be negative; got -1"):
            checkpoints.save(-1, make_state(zero, 0))
        with pytest.raises(ValueError, match="`state` has no array with elements"):
            checkpoints.save(50, {"wire_state": None})
        like = {
            "params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_state(zero, 0)["params"])
        }
        with pytest.raises(
            ValueError, match=r"`params.* is float32 in .*40, and bfloat16 in `like`"
        ):
            checkpoints.restore(like)
    assert sorted(path.name for path in directory.iterdir()) == ["20", "40"]
