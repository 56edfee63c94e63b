"""What is wrong with a checkpoint is found and said, and nothing good is lost by it."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from jaxzero._checkpoint import checkpoints as _checkpoint
from jaxzero._checkpoint import saver, selection


@pytest.fixture(scope="module")
def zero():
    return jz.Zero(jz.make_mesh(1, devices=jax.devices()[:2]))


def _state(zero, number):
    return {"params": zero.shard({"w": np.full((3, 5), number, np.float32), "b": np.ones(4)})}


@pytest.fixture(scope="module")
def source(zero, tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    with jz.Checkpoints(directory, zero) as checkpoints:
        for step in (20, 40):
            checkpoints.save(step, _state(zero, step), extra={"step": step})
    return directory


@pytest.fixture
def directory(source, tmp_path):
    """Checkpoints of steps 20 and 40."""
    return shutil.copytree(source, tmp_path / "checkpoints")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _largest(folder: Path) -> Path:
    return max(_files(folder / "state"), key=lambda path: path.stat().st_size)


def _flip(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 16
    path.write_bytes(content)


def _cut_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def _put_file_for_folder(folder: Path) -> None:
    shutil.rmtree(folder / "state")
    (folder / "state").write_bytes(b"")


def _leave_little(folder: Path) -> None:
    for path in _files(folder)[:3] + [folder / "SHA256SUMS", folder / "jaxzero.json"]:
        path.unlink(missing_ok=True)


DAMAGES = {  # what was done to the folder: what is said of it
    "first file": (lambda x: _flip(_files(x)[0], 0), "SHA256SUMS"),
    "middle file": (lambda x: _flip(_files(x)[len(_files(x)) // 2], 0.5), "holds other bytes"),
    "last file": (lambda x: _flip(_files(x)[-1], 1), "holds other bytes"),
    "arrays": (lambda x: _flip(_largest(x), 0.5), "state/.* holds other bytes"),
    "description": (lambda x: _flip(x / "jaxzero.json", 0.5), "jaxzero.json holds other bytes"),
    "Orbax' metadata": (lambda x: _flip(x / "state/_METADATA", 0.5), "state/_METADATA holds"),
    "extra": (lambda x: _flip(x / "extra/metadata", 0.5), "extra/metadata holds other bytes"),
    "cut": (
        lambda x: _largest(x).write_bytes(_largest(x).read_bytes()[:-1]),
        r"has \d+ bytes, and",
    ),
    "missing file": (lambda x: _largest(x).unlink(), "state/.* is missing"),
    "missing metadata": (lambda x: (x / "state/_METADATA").unlink(), "state/_METADATA is missing"),
    "file for folder": (_put_file_for_folder, "is missing.* more"),
    "missing folder": (lambda x: shutil.rmtree(x / "state"), "is missing.* more"),
    "missing description": (lambda x: (x / "jaxzero.json").unlink(), "jaxzero.json is missing"),
    "missing digests": (lambda x: (x / "SHA256SUMS").unlink(), "SHA256SUMS is missing"),
    "what is left of rm": (_leave_little, "SHA256SUMS is missing"),
    "cut digests": (lambda x: _cut_last_line(x / "SHA256SUMS"), "SHA256SUMS does not list"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(damage, directory, zero):
    act, said = DAMAGES[damage]
    act(directory / "40")
    checkpoints = jz.Checkpoints(directory, zero)
    with pytest.warns(checkpoints.Damaged, match=f"step 40 in .*checkpoints.*{said}"):
        step, state, extra = checkpoints.restore(_state(zero, 0))
    assert (step, extra) == (20, {"step": 20})
    got, want = (zero.unshard(x["params"])["w"] for x in (state, _state(zero, 20)))
    np.testing.assert_array_equal(got, want)
    assert sorted(path.name for path in directory.iterdir()) == ["20", "40.damaged"]


def test_the_step_of_a_damaged_checkpoint_can_be_saved_again(directory, zero):
    _flip(_largest(directory / "40"), 0.5)
    with jz.Checkpoints(directory, zero, keep=2) as checkpoints:
        with pytest.raises(ValueError, match=r"step 40 .* is damaged.*'40.damaged'.*steps \[20\]"):
            checkpoints.restore(_state(zero, 0), step=40)
        with pytest.raises(FileNotFoundError, match=r"step 40 .*\[20\].*set aside: 40.damaged"):
            checkpoints.restore(_state(zero, 0), step=40)
        checkpoints.save(40, _state(zero, 41))
        assert checkpoints.restore(_state(zero, 0)).step == 40
        checkpoints.save(60, _state(zero, 60))
    # Two that are good are kept, and what was set aside.
    assert sorted(path.name for path in directory.iterdir()) == ["40", "40.damaged", "60"]
    _flip(_largest(directory / "40"), 0.5)
    with jz.Checkpoints(directory, zero) as checkpoints, pytest.raises(ValueError):
        checkpoints.restore(_state(zero, 0), step=40)
    assert (directory / "40.damaged.2").is_dir()


def test_all_are_damaged(directory, zero):
    for step in ("20", "40"):
        _flip(_largest(directory / step), 0.5)
    checkpoints = jz.Checkpoints(directory, zero)
    with (
        pytest.warns(checkpoints.Damaged),
        pytest.raises(ValueError, match=r"(?s)Every checkpoint in .*step 40.*step 20"),
    ):
        checkpoints.restore(_state(zero, 0))


def test_that_all_are_damaged_is_not_forgotten(directory, zero):
    """Whatever starts the run again would otherwise let it begin at its first step."""
    for step in ("20", "40"):
        _flip(_largest(directory / step), 0.5)
    like, names = _state(zero, 0), "20.damaged, 40.damaged"
    with pytest.warns(jz.Checkpoints.Damaged), pytest.raises(ValueError, match="is damaged"):
        jz.Checkpoints(directory, zero).restore_or_none(like)
    for _ in range(2):
        checkpoints = jz.Checkpoints(directory, zero)
        message = f"in '{directory}' is damaged: {names}. Put one back .*, or move these away"
        with pytest.raises(ValueError, match=message):
            checkpoints.restore_or_none(like)
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(like)
    (directory / "20.damaged").rename(directory.parent / "20")
    with pytest.raises(ValueError, match=r"is damaged: 40\.damaged\."):
        checkpoints.restore_or_none(like)
    (directory / "40.damaged").rename(directory.parent / "40")
    assert checkpoints.restore_or_none(like) is None


def test_a_checkpoint_that_is_gone_when_it_is_read_is_not_taken_for_none(
    directory, zero, monkeypatch
):
    """Nor is anything else that is missing after one was chosen."""

    def choose(*args):
        step = _choose(*args)
        shutil.rmtree(directory / str(step))
        return step

    _choose = _checkpoint.choose
    monkeypatch.setattr(_checkpoint, "choose", choose)
    message = f"{directory}/40' was deleted while it was read.*a larger `keep`"
    with (
        jz.Checkpoints(directory, zero) as checkpoints,
        pytest.raises(FileNotFoundError, match=message),
    ):
        checkpoints.restore_or_none(_state(zero, 0))


def test_what_cannot_be_looked_at_is_not_taken_for_deleted(directory, zero, monkeypatch):
    def stale(*args):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with jz.Checkpoints(directory, zero) as checkpoints:
        monkeypatch.setattr(checkpoints, "_read", stale)
        monkeypatch.setattr(_checkpoint, "is_folder", stale)
        with pytest.raises(OSError, match="Stale file handle"):
            checkpoints.restore(_state(zero, 0))


def test_a_reader_finds_what_was_saved_while_it_looked(directory, zero, monkeypatch):
    """The run that saves here is two checkpoints further, and has deleted those that were seen."""

    def verify(folder, **share):
        for old, new in ((20, 60), (40, 80)):
            if (directory / str(old)).is_dir():
                (directory / str(old)).rename(directory / str(new))
        return _find_damage(folder, **share)

    _find_damage = selection.find_damage
    monkeypatch.setattr(selection, "find_damage", verify)
    with jz.Checkpoints(directory, zero) as checkpoints:
        assert checkpoints.restore(_state(zero, 0)).step == 80


def test_an_old_checkpoint_that_cannot_be_removed_is_no_failed_save(directory, zero, monkeypatch):
    """Nor are those behind it kept."""

    def rename(old, new):
        if Path(old) == directory / "20":
            raise PermissionError("not yours")
        _rename(old, new)

    _rename = os.rename
    with jz.Checkpoints(directory, zero, keep=1) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            checkpoints.save(60, _state(zero, 60))
            with pytest.warns(UserWarning, match="step 60 is saved, but one older .*not yours"):
                checkpoints.close()
        assert sorted(path.name for path in directory.iterdir()) == ["20", "60"]
        checkpoints.save(80, _state(zero, 80))
    assert sorted(path.name for path in directory.iterdir()) == ["80"]


def test_a_directory_that_cannot_be_listed_fails_the_save_with_its_reason(
    directory, zero, monkeypatch
):
    def stale(directory):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with jz.Checkpoints(directory, zero) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(saver, "list_steps", stale)
        message = "step 60 could not be saved .*Stale file handle.*Nor can be seen which are there"
        with pytest.raises(RuntimeError, match=message):
            checkpoints.save(60, _state(zero, 60))


@pytest.mark.parametrize("reason", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["SHA256SUMS", "jaxzero.json", "state/_METADATA"])
def test_a_file_that_cannot_be_read_is_no_damage(name, reason, directory, zero, monkeypatch):
    """It may pass, and all checkpoints of the file system would be renamed meanwhile."""

    def open_(path, *args, **kwargs):
        if path == directory / "40" / name:
            raise OSError(reason, os.strerror(reason))
        return _open(path, *args, **kwargs)

    _open = Path.open
    checkpoints = jz.Checkpoints(directory, zero)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_)
        message = rf"40/{name}' cannot be read \({os.strerror(reason)}\).*nothing was renamed"
        with pytest.raises(OSError, match=message):
            checkpoints.restore_or_none(_state(zero, 0))
    assert sorted(path.name for path in directory.iterdir()) == ["20", "40"]
    assert checkpoints.restore(_state(zero, 0)).step == 40


def test_a_folder_that_cannot_be_looked_at_is_an_error(directory, zero, monkeypatch):
    """And not one that is not there."""

    def stat(path, **kwargs):
        if path == directory / "40":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return _stat(path, **kwargs)

    _stat = Path.stat
    checkpoints = jz.Checkpoints(directory, zero)
    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(OSError, match="Input/output error.*40"):
        checkpoints.restore_or_none(_state(zero, 0))


def test_checkpoints_without_digests_are_read_with_a_warning(directory, zero):
    for name in ("SHA256SUMS", "jaxzero.json"):
        (directory / "40" / name).unlink()
    (directory / "40" / "_CHECKPOINT_METADATA").write_text("{}")  # Orbax' manager wrote it
    checkpoints = jz.Checkpoints(directory, zero)
    with pytest.warns(UserWarning, match="40' holds no digests.*cannot be verified"):
        assert checkpoints.restore(_state(zero, 0)).step == 40


def test_errors_in_the_background_come_up_and_do_not_stay(directory, zero, monkeypatch):
    def fail(*args):
        raise OSError("the disk is gone")

    with jz.Checkpoints(directory, zero) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(saver, "publish", fail)
            checkpoints.save(60, _state(zero, 60))
            with pytest.raises(RuntimeError, match=r"step 60 .*disk is gone.*steps \[20, 40\]"):
                checkpoints.save(80, _state(zero, 80))
            checkpoints.save(80, _state(zero, 80))
            with pytest.raises(RuntimeError, match="step 80 could not be saved"):
                checkpoints.close()
        assert sorted(path.name for path in directory.iterdir()) == ["20", "40"]
        checkpoints.save(80, _state(zero, 80))
        assert checkpoints.restore(_state(zero, 0)).step == 80


KILLED = """
import os, signal, sys
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
import jaxzero as jz
from jaxzero import saver

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
        assert checkpoints.restore(_state(zero, 0)).step == 40
        checkpoints.save(60, _state(zero, 60))
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
    _flip(_largest(small_disk / "run" / "40"), 0.5)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with jz.Checkpoints(small_disk / "run", zero) as checkpoints:
        with pytest.warns(checkpoints.Damaged, match="step 40 .*left where it is"):
            assert checkpoints.restore(_state(zero, 0)).step == 20
        with pytest.raises(RuntimeError, match="step 60 could not be saved.*Read-only"):
            checkpoints.save(60, _state(zero, 60))


def test_sha256sum_agrees(source):
    """The program reads the list, and finds every file but the list itself in it."""
    if shutil.which("sha256sum") is None:
        pytest.skip("there is no `sha256sum`")
    folder = source / "40"
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    files = {path.relative_to(folder).as_posix() for path in _files(folder)}
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
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(50, _state(zero, 0), extra={"key": object()})
        with pytest.raises(ValueError, match="`step` must not be negative; got -1"):
            checkpoints.save(-1, _state(zero, 0))
        with pytest.raises(ValueError, match="`state` holds no numbers"):
            checkpoints.save(50, {"wire_state": None})
        like = {"params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), _state(zero, 0)["params"])}
        with pytest.raises(
            ValueError, match=r"`params.* is float32 in .*40, and bfloat16 in `like`"
        ):
            checkpoints.restore(like)
    assert sorted(path.name for path in directory.iterdir()) == ["20", "40"]
