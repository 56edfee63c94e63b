"""`write_checkpoint` that fails, and `check_copy` of a copy that differs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxzero import interop


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_writing_without_torch_says_what_to_install(tmp_path: Path, form, monkeypatch):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "s.safetensors")
    tensors = interop.open_checkpoint(tmp_path / "s.safetensors")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=f"form='{form}', .* needs the package 'torch'.*pip inst"):
        interop.write_checkpoint(tensors, tmp_path / "out", form=form)
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


def test_a_file_that_failed_leaves_nothing(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="needs torch: it writes")
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "s.safetensors")
    tensors = interop.open_checkpoint(tmp_path / "s.safetensors")
    (tmp_path / "o.bin").write_bytes(b"old")
    with pytest.MonkeyPatch.context() as patch:

        def full_disk(_, file):
            file.write(b"half")
            raise OSError("No space left on device")

        patch.setattr(torch, "save", full_disk)
        with pytest.raises(OSError, match="No space left"):
            interop.write_checkpoint(tensors, tmp_path / "o.bin", form="torch")
    assert (tmp_path / "o.bin").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.bin", "s.safetensors"]
    with pytest.raises(ValueError, match=r"`path` must be a directory with form='dcp'"):
        interop.write_checkpoint(tensors, tmp_path / "o.bin", form="dcp")


def test_a_copy_that_differs_is_found(tmp_path: Path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float16)}
    source = tmp_path / "source.safetensors"
    save_file(arrays, source)
    tensors = interop.open_checkpoint(source)
    for changed, message in [
        (
            arrays | {"a": arrays["a"] + 1},
            "'a' in .* .*float32.* differs from the tensor that was written",
        ),
        (arrays | {"b": np.ones(2, np.float32)}, "'b' in .*float32"),
        (arrays | {"a": arrays["a"].T.copy()}, "'a' in "),
        ({"a": arrays["a"]}, "'b' was not written"),
        (arrays | {"c": arrays["b"]}, "'c' was not in the source"),
    ]:
        save_file(changed, tmp_path / "copy.safetensors")
        with pytest.raises(ValueError, match=message):
            interop.check_copy(tensors, tmp_path / "copy.safetensors")
    interop.check_copy(tensors, source)
