"""Damaged checkpoints are named, and the one before is used; what cannot be read is no damage."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import jaxzero as jz
from jaxzero._checkpoint import checkpoints as _checkpoint
from jaxzero._checkpoint import directory as _directory
from jaxzero._checkpoint import saver

from .saved import files_in, flip, largest_file, make_state


def _cut_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def _put_file_for_folder(folder: Path) -> None:
    shutil.rmtree(folder / "state")
    (folder / "state").write_bytes(b"")


def _leave_little(folder: Path) -> None:
    for path in files_in(folder)[:3] + [folder / "SHA256SUMS", folder / "jaxzero.json"]:
        path.unlink(missing_ok=True)


DAMAGES = {  # what was done to the folder: what is said of it
    "first file": (lambda x: flip(files_in(x)[0], 0), "SHA256SUMS"),
    "middle file": (lambda x: flip(files_in(x)[len(files_in(x)) // 2], 0.5), "holds other bytes"),
    "last file": (lambda x: flip(files_in(x)[-1], 1), "holds other bytes"),
    "arrays": (lambda x: flip(largest_file(x), 0.5), "state/.* holds other bytes"),
    "description": (lambda x: flip(x / "jaxzero.json", 0.5), "jaxzero.json holds other bytes"),
    "Orbax' metadata": (lambda x: flip(x / "state/_METADATA", 0.5), "state/_METADATA holds"),
    "extra": (lambda x: flip(x / "extra/metadata", 0.5), "extra/metadata holds other bytes"),
    "cut": (
        lambda x: largest_file(x).write_bytes(largest_file(x).read_bytes()[:-1]),
        r"has \d+ bytes, and",
    ),
    "missing file": (lambda x: largest_file(x).unlink(), "state/.* is missing"),
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
        step, state, extra = checkpoints.restore(make_state(zero, 0))
    assert (step, extra) == (20, {"step": 20})
    got, want = (zero.unshard(x["params"])["w"] for x in (state, make_state(zero, 20)))
    np.testing.assert_array_equal(got, want)
    assert sorted(path.name for path in directory.iterdir()) == ["20", "40.damaged"]


def test_the_step_of_a_damaged_checkpoint_can_be_saved_again(directory, zero):
    flip(largest_file(directory / "40"), 0.5)
    with jz.Checkpoints(directory, zero, keep=2) as checkpoints:
        with pytest.raises(ValueError, match=r"step 40 .* is damaged.*'40.damaged'.*steps \[20\]"):
            checkpoints.restore(make_state(zero, 0), step=40)
        with pytest.raises(FileNotFoundError, match=r"step 40 .*set aside: 40.damaged.*\[20\]"):
            checkpoints.restore(make_state(zero, 0), step=40)
        checkpoints.save(40, make_state(zero, 41))
        assert checkpoints.restore(make_state(zero, 0)).step == 40
        checkpoints.save(60, make_state(zero, 60))
    # Two that are good are kept, and what was set aside.
    assert sorted(path.name for path in directory.iterdir()) == ["40", "40.damaged", "60"]
    flip(largest_file(directory / "40"), 0.5)
    with jz.Checkpoints(directory, zero) as checkpoints, pytest.raises(ValueError):
        checkpoints.restore(make_state(zero, 0), step=40)
    assert (directory / "40.damaged.2").is_dir()


def test_all_are_damaged(directory, zero):
    for step in ("20", "40"):
        flip(largest_file(directory / step), 0.5)
    checkpoints = jz.Checkpoints(directory, zero)
    with (
        pytest.warns(checkpoints.Damaged),
        pytest.raises(ValueError, match=r"(?s)Every checkpoint in .*step 40.*step 20"),
    ):
        checkpoints.restore(make_state(zero, 0))


def test_that_all_are_damaged_is_not_forgotten(directory, zero):
    """Whatever starts the run again would otherwise let it begin at its first step."""
    for step in ("20", "40"):
        flip(largest_file(directory / step), 0.5)
    like, names = make_state(zero, 0), "20.damaged, 40.damaged"
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
        checkpoints.restore_or_none(make_state(zero, 0))


def test_what_cannot_be_looked_at_is_not_taken_for_deleted(directory, zero, monkeypatch):
    def stale(*args):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with jz.Checkpoints(directory, zero) as checkpoints:
        monkeypatch.setattr(_checkpoint, "read_arrays", stale)
        monkeypatch.setattr(_checkpoint, "is_folder", stale)
        with pytest.raises(OSError, match="Stale file handle"):
            checkpoints.restore(make_state(zero, 0))


def test_a_reader_finds_what_was_saved_while_it_looked(directory, zero, monkeypatch):
    """The run that saves here is two checkpoints further, and has deleted those that were seen."""

    def verify(folder, **share):
        for old, new in ((20, 60), (40, 80)):
            if (directory / str(old)).is_dir():
                (directory / str(old)).rename(directory / str(new))
        return _find_damage(folder, **share)

    _find_damage = _directory.find_damage
    monkeypatch.setattr(_directory, "find_damage", verify)
    with jz.Checkpoints(directory, zero) as checkpoints:
        assert checkpoints.restore(make_state(zero, 0)).step == 80


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
            checkpoints.save(60, make_state(zero, 60))
            with pytest.warns(UserWarning, match="step 60 is saved, but one older .*not yours"):
                checkpoints.close()
        assert sorted(path.name for path in directory.iterdir()) == ["20", "60"]
        checkpoints.save(80, make_state(zero, 80))
    assert sorted(path.name for path in directory.iterdir()) == ["80"]


def test_a_directory_that_cannot_be_listed_fails_the_save_with_its_reason(
    directory, zero, monkeypatch
):
    def stale(directory):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with jz.Checkpoints(directory, zero) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(saver, "list_steps", stale)
        message = "step 60 could not be saved .*Stale file handle.*cannot be listed either"
        with pytest.raises(RuntimeError, match=message):
            checkpoints.save(60, make_state(zero, 60))


@pytest.mark.parametrize("reason", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["SHA256SUMS", "jaxzero.json", "state/_METADATA"])
def test_a_file_that_cannot_be_read_is_no_damage(name, reason, directory, zero, monkeypatch):
    """It may pass, and all checkpoints of the file system would be renamed meanwhile."""

    def open_(path, *args, **kwargs):
        if path == directory / "40" / name:
            raise OSError(reason, os.strerror(reason))
        return _open(path, *args, **kwargs)

    _open = os.open
    checkpoints = jz.Checkpoints(directory, zero)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_)
        message = rf"40/{name}' cannot be read \({os.strerror(reason)}\).*nothing was renamed"
        with pytest.raises(OSError, match=message):
            checkpoints.restore_or_none(make_state(zero, 0))
    assert sorted(path.name for path in directory.iterdir()) == ["20", "40"]
    assert checkpoints.restore(make_state(zero, 0)).step == 40


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
        checkpoints.restore_or_none(make_state(zero, 0))


def test_a_checkpoint_without_digests_is_damaged(directory, zero):
    for name in ("SHA256SUMS", "jaxzero.json"):
        (directory / "40" / name).unlink()
    (directory / "40" / "_CHECKPOINT_METADATA").write_text("{}")  # as of Orbax' manager
    checkpoints = jz.Checkpoints(directory, zero)
    with pytest.warns(checkpoints.Damaged, match="step 40 .* is damaged: .*SHA256SUMS"):
        assert checkpoints.restore(make_state(zero, 0)).step == 20


def test_errors_in_the_background_come_up_and_do_not_stay(directory, zero, monkeypatch):
    def fail(*args):
        raise OSError("the disk is gone")

    with jz.Checkpoints(directory, zero) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(saver, "publish", fail)
            checkpoints.save(60, make_state(zero, 60))
            with pytest.raises(RuntimeError, match=r"step 60 .*disk is gone.*steps \[20, 40\]"):
                checkpoints.save(80, make_state(zero, 80))
            checkpoints.save(80, make_state(zero, 80))
            with pytest.raises(RuntimeError, match="step 80 could not be saved"):
                checkpoints.close()
        assert sorted(path.name for path in directory.iterdir()) == ["20", "40"]
        checkpoints.save(80, make_state(zero, 80))
        assert checkpoints.restore(make_state(zero, 0)).step == 80
