"""The stand-in for NVIDIA's assembler: what it answers itself, and what it leaves to CUDA's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxzero._planner.assembler import folder_of_cuda

_TOOL = '#!/bin/sh\necho "{name} 13.0 $*"\nexit {status}\n'


@pytest.fixture
def cuda(tmp_path, monkeypatch):
    """CUDA as pip installs it, with tools that print what they are called with."""
    for name in [x for x in sys.modules if x.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site's packages")])

    def install(status: int = 0) -> Path:
        root = tmp_path / "site's packages" / "nvidia" / "cu13"
        (root / "bin").mkdir(parents=True)
        (root / "nvvm").mkdir()
        (root / "nvvm" / "libdevice.10.bc").write_text("device library")
        for name in ("ptxas", "nvlink", "fatbinary"):
            (root / "bin" / name).write_text(_TOOL.format(name=name, status=status))
            (root / "bin" / name).chmod(0o700)
        return root

    return install


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def test_versions_are_those_of_cuda_and_nothing_is_assembled(cuda, folder, tmp_path):
    root = cuda()
    assert folder_of_cuda(folder) == folder
    for name in ("ptxas", "nvlink"):
        tool, out = folder / "bin" / name, tmp_path / f"{name}.out"
        assert subprocess.check_output([tool, "--version"], text=True) == f"{name} 13.0 --version\n"
        asked = subprocess.check_output([tool, "--input-as-string", ".version 99.99"], text=True)
        assert asked == f"{name} 13.0 --input-as-string .version 99.99\n"
        command = [tool, "kernel.ptx", "-o", out, "-arch=sm_90a", "--warn-on-spills"]
        assert subprocess.check_output(command) == b""
        assert out.read_text() == "not assembled\n"
    for path in ("bin/fatbinary", "nvvm"):
        assert (folder / path).resolve() == root / path


def test_without_cuda_there_is_no_folder(cuda, folder):
    assert folder_of_cuda(folder) is None


def test_without_tools_that_run_there_is_no_folder(cuda, folder):
    cuda(status=1)
    assert folder_of_cuda(folder) is None
