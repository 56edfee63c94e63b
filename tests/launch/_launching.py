"""Small scripts for `jaxzero launch`, and waiting for what they do."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxzero import launch as launcher
from jaxzero.launch import _launch

PYTHON = (sys.executable, "-u", "-S", "-E", "-c")
# Done, a mistake in the arguments, a file error, three ends of distributed jobs, and Ctrl-C.
EXIT_CODES = (0, 2, 74, 75, 76, 77, 130)
PREAMBLE = """
import os, signal, subprocess, sys, time
process = int(os.environ["JAXZERO_PROCESS_ID"])
processes = int(os.environ["JAXZERO_NUM_PROCESSES"])
restarts = int(os.environ["JAXZERO_RESTARTS"])

def meet():  # wait for all processes of this attempt
    mine = f"met-{restarts}-"
    open(f"{mine}{process}", "w").close()
    while sum(name.startswith(mine) for name in os.listdir()) < processes:
        time.sleep(0.01)
"""


def go_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are short, and what scripts write is in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_launch, "_LONGEST_PAUSE", 0.05)


def settings(script: str, **options) -> launcher.Launch:
    return launcher.Launch(command=(*PYTHON, PREAMBLE + textwrap.dedent(script)), **options)


def launch(script: str, **options) -> int:
    return launcher.launch(settings(script, **options))


def ends(number: int, seconds: float = 5.0) -> bool:
    """Whether process `number` is gone within `seconds`; a zombie that init has not met counts."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(number, 0)
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def wait_for(*names: str) -> None:
    deadline = time.monotonic() + 20
    while not all(Path(name).exists() and Path(name).stat().st_size for name in names):
        assert time.monotonic() < deadline, f"not all of {names} appeared"
        time.sleep(0.01)
