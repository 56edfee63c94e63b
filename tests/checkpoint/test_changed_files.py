"""Files of a checkpoint that were changed or replaced: never a hang, never another value."""

import contextlib
import hashlib
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxzero as jz
from tests.processes import ROOT

from .saved import make_state

MAX_SECONDS, MAX_BYTES = 10, 2**30
REPLACEMENTS = {
    "pipe": (os.mkfifo, "is a named pipe"),
    "zeros": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "terabyte": (lambda path: path.touch() or os.truncate(path, 2**40), "1099511627776 bytes"),
}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize("name", ["SHA256SUMS", "jaxzero.json", "extra/metadata"])
def test_what_is_no_regular_file_is_damage(directory, zero, name: str, replacement: str):
    make, said = REPLACEMENTS[replacement]
    (directory / "40" / name).unlink()
    make(directory / "40" / name)
    checkpoints = jz.Checkpoints(directory, zero)
    with pytest.warns(checkpoints.Damaged, match=f"step 40 .*{name}.* {said}"):
        assert checkpoints.restore(make_state(zero, 0)).step == 20


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda said: said.pop("files"), "no description of a checkpoint .KeyError: 'files'"),
        (lambda said: said["files"].update({"../x": 1}), "lists files outside of the folder"),
        (lambda said: said["files"].update({"x": True}), "sizes that are no numbers"),
        (lambda said: said["files"].update({"x": 2**40}), r"lists \d+ bytes, and its leaves have"),
    ],
)
def test_a_description_that_fits_its_digest_is_checked(directory, zero, change, said: str):
    folder = directory / "40"
    content = json.loads((folder / "jaxzero.json").read_text())
    change(content)
    (folder / "jaxzero.json").write_text(json.dumps(content))
    digest = hashlib.sha256((folder / "jaxzero.json").read_bytes())
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    kept = [line for line in lines if not line.endswith("  jaxzero.json")]
    kept.append(f"{digest.hexdigest()}  jaxzero.json")
    (folder / "SHA256SUMS").write_text("\n".join(kept) + "\n")
    checkpoints = jz.Checkpoints(directory, zero)
    with pytest.warns(checkpoints.Damaged, match=f"step 40 .*jaxzero.json .*{said}"):
        assert checkpoints.restore(make_state(zero, 0)).step == 20


def test_extra_that_could_not_be_read_back_is_not_saved(tmp_path, zero, monkeypatch):
    monkeypatch.setattr("jaxzero._checkpoint.checkpoints.MAX_TEXT_BYTES", 20)
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        with pytest.raises(ValueError, match="`extra` has 32 bytes as JSON, and at most 20"):
            checkpoints.save(1, make_state(zero, 1), extra={"text": "x" * 20})
        assert checkpoints.latest_step() is None


@contextlib.contextmanager
def restoring(*arguments: object) -> Iterator[subprocess.Popen]:
    """A process of `restore_mutated` that is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.restore_mutated", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        bufsize=0,
    )
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline()) == "ready"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.ci
@pytest.mark.parametrize("digests", ["kept", "signed"])
def test_changes_are_refused_or_make_no_difference(source: Path, tmp_path: Path, digests: str):
    """A change of `extra` that is signed is what was saved."""
    shutil.copytree(source / "20", tmp_path / "source" / "20")
    ends = []
    with restoring(tmp_path / "source", tmp_path, digests) as process:
        assert process.stdin is not None and process.stdout is not None
        for number in range(70):
            process.stdin.write(f"{number}\n".encode())
            ready, _, _ = select.select([process.stdout], [], [], MAX_SECONDS)
            assert ready, f"change {number} hangs"
            what, end, said, num_bytes = json.loads(process.stdout.readline())
            assert num_bytes < MAX_BYTES, what
            if end == "restored":
                is_extra = digests != "kept" and what.endswith("extra/metadata")
                assert said == "exactly" or is_extra, what
            else:
                assert end == "ValueError" or (end == "OSError" and "loop" in what), (what, said)
                assert str(tmp_path) in said, (what, said)
            ends.append(end)
    counts = np.unique(ends, return_counts=True)
    assert len(counts[0]) > 1 and counts[1].min() > 1, "some are refused and some restored"
