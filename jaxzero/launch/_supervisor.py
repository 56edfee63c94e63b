"""Start a group of processes, and end all of them when one fails or the launcher is asked to stop.

When a process fails, the others get SIGTERM, and SIGKILL after a grace period. If the first to
fail reports a lost peer, the supervisor first waits a moment for that peer's own exit. The
supervisor waits without limit only as long as no process has failed.

The first process that fails is not always the cause: a process that loses its peer exits with code
76 or is aborted by JAX (SIGABRT), and one that the launcher terminated only follows another.
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

from .._processes import PEER_LOST, STOPPED, describe, exit_status
from ._child import ChildOutput, Output, Slot
from ._orphan_guard import OrphanGuard

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Exit codes of a process that lost a peer. A single abort may also be a failure of native code.
CONSEQUENCES = (PEER_LOST, -signal.SIGABRT)
_POLL_SECONDS = 0.02
_CAUSE_SECONDS = 2.0  # wait for the exit of the peer that another process lost
_KILL_SECONDS = 10.0  # wait for processes to end after SIGKILL
_OUTPUT_SECONDS = 5.0  # how long output may arrive after the end of its process


class StopRequests:
    """The signals that ask the launcher to stop, as far as it has received them."""

    first: signal.Signals | None = None  # first signal that asked to stop
    at_once: bool = False  # True after a later Ctrl-C

    def note(self, signum: int, frame: object) -> None:
        """Record a signal; used as a signal handler."""
        if self.first is not None and signum == signal.SIGINT:
            self.at_once = True
        if self.first is None:
            self.first = signal.Signals(signum)


@contextlib.contextmanager
def noted_stop_requests() -> Iterator[StopRequests]:
    """Record SIGINT, SIGTERM and SIGHUP inside the `with` block, in the main thread.

    A signal that was already ignored stays ignored: SIGHUP under nohup, SIGINT in the background.
    """
    requests = StopRequests()
    before = {number: signal.getsignal(number) for number in _STOPPING}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, requests.note)
    try:
        yield requests
    finally:
        for number in taken:
            signal.signal(number, before[number])


@dataclasses.dataclass(frozen=True)
class ProcessExit:
    """The exit of one process. `returncode` is that of `subprocess`."""

    slot: Slot
    returncode: int
    seconds: float  # from its start
    sigterm_sent: bool  # True if the launcher had sent SIGTERM to it
    hung: bool  # True if it did not end within the grace period and was killed
    tail: tuple[str, ...] = ()  # the last lines of its output

    def __str__(self) -> str:
        how = "did not end when asked, and was killed" if self.hung else describe(self.returncode)
        return f"{self.slot}: {how}, after {self.seconds:.1f} s"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The exits of all processes, in the order in which they ended."""

    ended: tuple[ProcessExit, ...]
    request: signal.Signals | None = None  # the signal that asked the launcher to stop

    @property
    def first(self) -> ProcessExit | None:
        """The failure that caused the others; None if all processes succeeded."""
        failures = [end for end in self.ended if end.returncode != 0]
        return min(failures, key=_rank, default=None)  # the earliest of the lowest rank

    @property
    def blamed(self) -> Slot | None:
        """The slot to leave out of a restart: the process that failed on its own, or hung."""
        if self.first is None or self.first.returncode == STOPPED:
            return None
        lost = [
            end for end in self.ended if end.returncode in CONSEQUENCES and not end.sigterm_sent
        ]
        is_alone = self.first.returncode != PEER_LOST and len(lost) == 1
        if self.first not in lost or is_alone:
            return self.first.slot
        hung = [end.slot for end in self.ended if end.hung]
        return hung[0] if len(hung) == 1 else None  # of several, most only waited for another

    @property
    def status(self) -> int:
        """The exit status of the launcher."""
        if self.first is None:
            return 0
        if self.request == signal.SIGINT:
            return exit_status(-signal.SIGINT)
        return exit_status(self.first.returncode)


def _rank(end: ProcessExit) -> int:
    if end.returncode == STOPPED:
        return 3  # it saved its state: reported only if nothing worse happened
    if end.sigterm_sent:
        return 2
    return 1 if end.returncode in CONSEQUENCES else 0


class Supervisor:
    """Runs a command in several processes, and ensures that all of them end.

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
