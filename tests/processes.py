"""Real processes on this machine that form one run: started, waited for, never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Ended(NamedTuple):
    """What became of a process."""

    status: int  # negative: the signal that ended it
    out: str
    err: str

    def said(self) -> Any:
        """The last line of a process that ended well, which is JSON; Gloo prints others."""
        assert self.status == 0, self.err
        return json.loads(self.out.splitlines()[-1])


def free_address() -> str:
    """An address of this machine that nobody listens on just now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def run(module: str, count: int, *arguments: object, seconds: float = 120) -> list[Ended]:
    """Run `python -m MODULE ADDRESS NUMBER COUNT ARGUMENTS...`, `count` times at once."""
    with started(module, count, *arguments) as processes:
        return ended(processes, seconds=seconds)


@contextlib.contextmanager
def started(
    module: str, count: int, *arguments: object, stdin: int = subprocess.DEVNULL
) -> Iterator[list[subprocess.Popen]]:
    """Start them, and kill whatever is left at the end."""
    address = free_address()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, address, str(number), str(count)]
            + [str(argument) for argument in arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        for number in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()  # which also closes its pipes


def ended(processes: Sequence[subprocess.Popen], *, seconds: float) -> list[Ended]:
    """Wait for all of them.

    Raises:
        subprocess.TimeoutExpired: one does not end in time.
    """
    deadline = time.monotonic() + seconds
    results = []
    for process in processes:
        out, err = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        results.append(Ended(process.returncode, out, err))
    return results


def line_from(process: subprocess.Popen, text: str, *, seconds: float = 90) -> str:
    """Read what a process prints until a line holds `text`, and return that line."""
    watch = threading.Timer(seconds, process.kill)  # so that the reading ends
    watch.start()
    try:
        for line in process.stdout or ():
            if text in line:
                return line
    finally:
        watch.cancel()
    raise AssertionError(f"{text!r} never came: {process.communicate()[1][-2000:]}")
