"""Registers and spills of the Pallas kernels of a program, from the reports of their assembler."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_FOLDER = "MOSAIC_GPU_DUMP_TO"
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill (?:stores|loads)")


@contextlib.contextmanager
def kernel_reports() -> Iterator[Callable[[], dict[str, Any]]]:
    """A context; what it yields returns the kernels that were compiled in it, by name.

    A kernel is compiled once in a process: what was compiled earlier has no report. Of each name
    there are the number of kernels, the fewest and most registers of a thread, and the bytes that
    all of them spill to memory.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        before, os.environ[_FOLDER] = os.environ.get(_FOLDER), folder
        try:
            yield lambda: found
        finally:
            os.environ.pop(_FOLDER)
            if before is not None:
                os.environ[_FOLDER] = before
            found |= _read(Path(folder))


def _read(folder: Path) -> dict[str, Any]:
    registers: dict[str, list[int]] = {}
    spilled: dict[str, int] = {}
    for path in sorted(folder.glob("*.ptxas")):
        name, report = re.sub(r"_\d+$", "", path.stem), path.read_text()
        registers.setdefault(name, []).extend(int(x) for x in _REGISTERS.findall(report))
        spilled[name] = spilled.get(name, 0) + sum(int(x) for x in _SPILLED.findall(report))
    return {
        name: {
            "kernels": len(each),
            "registers": [min(each), max(each)],
            "spilled_bytes": spilled[name],
        }
        for name, each in registers.items()
    }
