"""Kill the launched processes if the launcher dies, even by SIGKILL.

A launcher that gets SIGKILL cannot end its children, and the kernel signals only direct children
(PR_SET_PDEATHSIG, on Linux), not their descendants. So the launcher starts a small guard process
and writes to it, through a pipe, which process groups have started and which have ended. The pipe
closes when the launcher exits or is killed. Then the guard kills the groups that have not ended.

The guard process runs this same file as a script, so the file imports nothing from jaxzero.
"""

import contextlib
import os
import signal
import subprocess
import sys

_WAIT_SECONDS = 2.0  # for the guard process to exit


class OrphanGuard:
    """Context manager that kills the registered process groups when this process ends."""

    def __enter__(self) -> "OrphanGuard":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that it does not get signals to the launcher's group
        )
        return self

    def add(self, group: int) -> None:
        """Register a process group, given by its id, to be killed when the launcher ends."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Unregister a process group that has ended, since the kernel may reuse its id."""
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
        with contextlib.suppress(OSError):  # the guard was killed; the launcher works without it
            os.write(self._process.stdin.fileno(), line.encode())


def main() -> None:
    """Run the guard: read groups from standard input; when it closes, kill those left."""
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
