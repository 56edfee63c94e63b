"""A stand-in for NVIDIA's assembler, for programs that are compiled and never run.

For each kernel, and for each configuration of a kernel that it considers, XLA writes PTX, starts
`ptxas`, and reads the machine code: some 80 processes for a program, a third of a compile. Neither
the schedule nor the memory of a program depends on machine code. So XLA is shown the folder of CUDA
with other tools in the place of two: they answer what is asked about their version as the real
ones do, and write a file of one line where machine code is expected.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from .target import find_module

_PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvcc")  # of pip, for CUDA 13 and 12
_TOOLS = ("ptxas", "nvlink")
_SCRIPT = """#!/bin/sh
before=
for argument; do
  if [ "$before" = -o ]; then echo "not assembled" > "$argument"; exit; fi
  before=$argument
done
exec {tool} "$@"
"""


def folder_of_cuda(folder: Path) -> Path | None:
    """Make a folder for XLA's option `xla_gpu_cuda_data_dir`.

    Args:
        folder: an empty one, to be filled with links to CUDA's files and two scripts.

    Returns:
        `folder`; None if CUDA's tools did not come from pip, or scripts cannot be run there.
    """
    root = _root()
    if root is None:
        return None
    try:
        (folder / "bin").mkdir()
        for path in [*root.iterdir(), *(root / "bin").iterdir()]:
            if path.name not in ("bin", *_TOOLS):
                (folder / path.relative_to(root)).symlink_to(path)
        for name in _TOOLS:
            script = folder / "bin" / name
            script.write_text(_SCRIPT.format(tool=shlex.quote(str(root / "bin" / name))))
            script.chmod(0o700)
            subprocess.run([script, "--version"], check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    return folder


def _root() -> Path | None:
    for package in _PACKAGES:
        spec = find_module(package)
        for place in (spec and spec.submodule_search_locations) or ():
            if all((Path(place) / "bin" / name).is_file() for name in _TOOLS):
                return Path(place)
    return None
