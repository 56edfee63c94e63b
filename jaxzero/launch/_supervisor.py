"""Start a group of processes, and end all of them when one fails.

When a process fails, the others get SIGTERM, and SIGKILL after a grace period. If the first to
fail reports a lost peer, the supervisor first waits a moment for that peer's own exit. The
supervisor waits without limit only as long as no process has failed.
"""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .._processes import STOPPED
from ._child_environment import Slot
from ._child_output import ChildOutput, Output
from ._orphan_guard import OrphanGuard
from ._outcome import CONSEQUENCES, Outcome, ProcessExit
from ._stop_requests import StopRequests

_POLL_SECONDS = 0.02
_CAUSE_SECONDS = 2.0  # wait for the exit of the peer that another process lost
_KILL_SECONDS = 10.0  # wait for processes to end after SIGKILL
_OUTPUT_SECONDS = 5.0  # how long output may arrive after the end of its process


class Supervisor:
    """Run a command in several processes, and ensure that all of them end.

    Args:
        command: a program and its arguments.
        grace: seconds between SIGTERM and SIGKILL.
        output: shows the lines of the processes and of the launcher.
        requests: the signals that the launcher receives while the processes run.
        guard: kills the processes if the launcher is killed.
        log_dir: folder for one log file per process, or None.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        grace: float,
        output: Output,
        requests: StopRequests,
        guard: OrphanGuard,
        log_dir: Path | None,
    ):
        self._command, self._grace, self._log_dir = list(command), grace, log_dir
        self._output, self._requests, self._guard = output, requests, guard
        self._children: list[_Child] = []
        self._ended: list[ProcessExit] = []
        # Times at which running processes get SIGTERM, get SIGKILL, and are given up.
        self._ask_at = self._kill_at = self._give_up_at = math.inf

    def run(self, places: Sequence[tuple[Slot, dict[str, str]]]) -> Outcome:
        """Run one process per slot, with its environment; return when all have ended.

        Raises:
            OSError: the command cannot be run; processes that were started have been killed.
        """
        with self._leaving_none():
            for slot, environment in places:
                self._start(slot, environment, numbered=len(places) > 1)
            while self._running() and time.monotonic() < self._give_up_at:
                self._note_ends()
                self._note_requests()
                self._ask_and_kill()
                time.sleep(_POLL_SECONDS)
        return Outcome(self._with_tails(), self._requests.first)

    def _start(self, slot: Slot, environment: dict[str, str], *, numbered: bool) -> None:
        process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches only the launcher, which sends SIGTERM
        )
        self._guard.add(process.pid)
        output = ChildOutput(
            self._output,
            process,
            number=slot.process if numbered else None,
            log=self._log_dir / f"process-{slot.process}.log" if self._log_dir else None,
        )
        self._children.append(_Child(slot, process, output))

    def _running(self) -> list["_Child"]:
        return [child for child in self._children if not child.has_ended]

    def _note_ends(self) -> None:
        for child in self._running():
            if (end := child.poll()) is None:
                continue
            self._guard.remove(child.process.pid)
            self._ended.append(end)
            if end.returncode == 0:
                continue
            self._output.say(str(end))
            # After status 75 the others have agreed to stop too, and are saving.
            patience = self._grace if end.returncode == STOPPED else 0.0
            if end.returncode in CONSEQUENCES:
                patience = _CAUSE_SECONDS
            self._ask_at = min(self._ask_at, time.monotonic() + patience)

    def _note_requests(self) -> None:
        if self._requests.first is not None:
            self._ask_at = min(self._ask_at, time.monotonic())
        if self._requests.at_once:
            self._kill_at = min(self._kill_at, time.monotonic())

    def _ask_and_kill(self) -> None:
        now, running = time.monotonic(), self._running()
        if not running:
            return
        if now >= self._ask_at and not any(child.sigterm_sent for child in running):
            self._output.say(
                f"asking {', '.join(str(child.slot.process) for child in running)} to stop "
                f"(SIGTERM; SIGKILL after {self._grace:g} s)"
            )
            for child in running:
                child.ask()
            self._kill_at = min(self._kill_at, now + self._grace)
        if now >= self._kill_at and self._give_up_at == math.inf:
            for child in running:
                child.kill(hung=not self._requests.at_once)
            self._give_up_at = now + _KILL_SECONDS

    @contextlib.contextmanager
    def _leaving_none(self) -> Iterator[None]:
        """Kill all processes if the `with` block raises; report those that survive SIGKILL."""
        try:
            yield
        except BaseException:
            for child in self._running():
                child.kill(hung=False)
                child.poll(_KILL_SECONDS)
                child.output.close(0.0)
            raise
        for child in self._running():
            self._output.say(f"{child.slot} outlives SIGKILL: its pid is {child.process.pid}")
            self._ended.append(child.given_up())

    def _with_tails(self) -> tuple[ProcessExit, ...]:
        deadline = time.monotonic() + _OUTPUT_SECONDS
        tails = {
            child.slot: child.output.close(max(0.0, deadline - time.monotonic()))
            for child in self._children
        }
        return tuple(dataclasses.replace(end, tail=tuple(tails[end.slot])) for end in self._ended)


class _Child:
    """A launched process, which leads a process group of its own."""

    def __init__(self, slot: Slot, process: subprocess.Popen[bytes], output: ChildOutput):
        self.slot, self.process, self.output = slot, process, output
        self.has_ended = self.sigterm_sent = False
        self._hung = False
        self._started = time.monotonic()

    def poll(self, seconds: float = 0.0) -> ProcessExit | None:
        """Wait at most `seconds` for the process to end; return its exit, or None."""
        try:
            returncode = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._kill_group()  # its descendants end with it
        return self._end(returncode)

    def ask(self) -> None:
        """Send SIGTERM to the process only: it may need its child processes to save."""
        self.sigterm_sent = True
        self.process.terminate()

    def kill(self, *, hung: bool) -> None:
        self._hung = hung
        self._kill_group()

    def given_up(self) -> ProcessExit:
        """Return the `ProcessExit` of a process that survives SIGKILL, without waiting for it."""
        self.process.returncode = -signal.SIGKILL
        return self._end(-signal.SIGKILL)

    def _end(self, returncode: int) -> ProcessExit:
        self.has_ended = True
        seconds = time.monotonic() - self._started
        return ProcessExit(self.slot, returncode, seconds, self.sigterm_sent, self._hung)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # empty, or zombies only
            os.killpg(self.process.pid, signal.SIGKILL)
