"""Processes end with the launcher that started them, even if it is killed by SIGKILL.

A launcher that gets SIGKILL cannot tell its children to end, and the kernel only tells direct
children (PR_SET_PDEATHSIG, on Linux), not theirs. So a second, tiny process reads a pipe to which
only the launcher holds the other end: the process groups that live and those that have ended. When
the pipe closes, because the launcher has ended in whatever way, it kills the groups that are left.

This file is also the program of that process: run by its path it imports nothing of jaxzero.
"""

import contextlib
import os
import signal
import subprocess
import sys

_WAIT_SECONDS = 2.0  # for a process that has nothing left to do


class OrphanGuard:
    """Kills the process groups in its care when this process ends. Use it as a context manager."""

    def __enter__(self) -> "OrphanGuard":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to the launcher's group pass it by
        )
        return self

    def add(self, group: int) -> None:
        """Take the process group `group` into care."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """`group` has ended; its number may come to mean another."""
        self._tell(f"-{group}\n")

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # someone killed the guard: the rest works without it
            os.write(self._process.stdin.fileno(), line.encode())


def main() -> None:
    """Follow standard input, and kill what is left when it ends."""
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line[1:])
        if line.startswith("+"):
            groups.add(number)
        else:
            groups.discard(number)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
