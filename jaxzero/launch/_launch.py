"""`jaxzero launch`: run several processes on this machine, simulating several hosts.

It does the work of a cluster's scheduler on one machine: start the processes, assign ranks, show
their output, end all when one fails, and restart them from the last checkpoint.
"""

import dataclasses
import math
import os
import signal
import time
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from .._processes import DIVERGED, INTERRUPTED, MISTAKE, STOPPED
from ._child import Output, Slot, environment, reserve_port, slots
from ._command import prepare
from ._orphan_guard import OrphanGuard
from ._supervisor import Outcome, StopRequests, Supervisor, noted_stop_requests

_LONGEST_PAUSE = 30.0  # seconds between attempts; the first is 1
_POLL_SECONDS = 0.05
_FLUSH_SECONDS = 5.0  # to write the remaining output


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Run a script in several processes on this machine, simulating several hosts.

    Needs no extra. The environment of each process has the variables that
    jaxzero.distributed.initialize() reads. Lines of output are prefixed by the rank of their
    process. If one process fails, the others get SIGTERM, and SIGKILL after the grace period; so do
    all processes if the launcher gets SIGTERM or Ctrl-C. A second Ctrl-C kills them at once.

    Exit status of a process, and of the launcher from the first process that failed: 0 done; 2 a
    mistake in the arguments; 74 a file could not be read or written; 75 stopped by SIGTERM after
    saving, run again to continue; 76 another process is lost or hangs; 77 too many non-finite
    steps, or replicas differ; 130 Ctrl-C; 128 + n killed by signal n.
    """

    nodes: int = 2
    """Number of simulated hosts."""

    procs_per_node: int = 1
    """Processes per host."""

    devices_per_proc: Annotated[int | None, arg(metavar="INT")] = None
    """Devices per process: simulated CPU devices, or GPUs, assigned in the order of ranks. Default:
    one per process; a single process uses all GPUs."""

    restart: int = 0
    """Number of restarts of all processes after a failure, with a pause that grows from 1 to 30
    seconds. No restart after exit status 0, 2 or 77, or if the launcher was asked to stop. The
    script itself must resume from its last checkpoint; JAXZERO_RESTARTS in its environment is the
    number of restarts so far."""

    min_nodes: Annotated[int | None, arg(metavar="INT")] = None
    """A restart leaves out the node that failed, as long as at least this many remain. Default: all
    nodes are restarted."""

    grace: float = 30.0
    """Seconds from SIGTERM to SIGKILL, for saving a checkpoint."""

    log_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """Also append the output of process N to DIR/process-N.log."""

    command: Annotated[Positional[tuple[str, ...]], arg(metavar="-- COMMAND ...")]
    """The command, after two dashes: a script (train.py), which runs on the interpreter of jaxzero,
    or a program and its arguments. It is not passed to a shell. A bare python is the first on PATH;
    its path is printed, with a warning if it belongs to another environment than jaxzero."""

    def __post_init__(self):
        for name in ("nodes", "procs_per_node", "devices_per_proc", "min_nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be positive; got {value}.")
        if self.restart < 0:
            raise ValueError(f"`restart` cannot be negative; got {self.restart}.")
        if not 0 <= self.grace < math.inf:
            raise ValueError(f"`grace` must be a number of seconds, 0 or more; got {self.grace}.")
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(
                f"`min_nodes` can be at most `nodes`, {self.nodes}; got {self.min_nodes}."
            )
        if self.min_nodes is not None and not self.restart:
            raise ValueError("`min_nodes` is the fewest nodes of a restart; give `restart` too.")
        if not self.command:
            raise ValueError(
                "`command` is missing. Give it after two dashes: jaxzero launch -- train.py"
            )


def launch(settings: Launch) -> int:
    """Run `settings.command` in all processes until they end; return the exit status.

    It handles SIGINT, SIGTERM and SIGHUP while it runs, so it must be called in the main thread.

    Raises:
        ValueError: the command cannot be run, or `log_dir` cannot be written; nothing is running.
    """
    prepared = prepare(settings.command)
    settings = dataclasses.replace(settings, command=prepared.command)
    if settings.log_dir is not None:
        _make_log_dir(settings.log_dir)
    output = Output()
    output.say(prepared.message)
    try:
        with noted_stop_requests() as requests, OrphanGuard() as guard:
            return _Attempts(settings, output, requests, guard).run()
    finally:
        output.close(_FLUSH_SECONDS)


class _Attempts:
    """Runs the processes, and restarts them after a failure."""

    def __init__(
        self, settings: Launch, output: Output, requests: StopRequests, guard: OrphanGuard
    ):
        self._settings, self._output = settings, output
        self._requests, self._guard = requests, guard
        self._nodes = list(range(settings.nodes))  # as numbered in the first attempt

    def run(self) -> int:
        """Run and restart until no restart is left or allowed; return the last exit status."""
        restarts = 0
        while True:
            began = time.monotonic()
            outcome = self._attempt(restarts)
            self._report(outcome, time.monotonic() - began)
            if restarts == self._settings.restart or not _may_restart(outcome):
                return outcome.status
            self._leave_out(outcome.blamed)
            restarts += 1
            pause = min(2.0 ** (restarts - 1), _LONGEST_PAUSE)
            self._output.say(
                f"starting again in {pause:g} s, with {len(self._nodes)} of "
                f"{self._settings.nodes} nodes (restart {restarts} of {self._settings.restart})"
            )
            if (request := self._pause(pause)) is not None:
                return INTERRUPTED if request == signal.SIGINT else STOPPED

    def _attempt(self, restarts: int) -> Outcome:
        settings = self._settings
        places = slots(self._nodes, settings.procs_per_node, settings.devices_per_proc)
        port = reserve_port()  # a new one for each attempt: the last may still be bound
        supervisor = Supervisor(
            settings.command,
            grace=settings.grace,
            output=self._output,
            requests=self._requests,
            guard=self._guard,
            log_dir=settings.log_dir,
        )
        environments = [
            environment(
                slot,
                processes=len(places),
                port=port,
                restarts=restarts,
                cpu_devices=settings.devices_per_proc,
            )
            for slot in places
        ]
        try:
            return supervisor.run(list(zip(places, environments, strict=True)))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ValueError(
                f"`command` cannot be run: {settings.command[0]}: {reason}."
            ) from error

    def _report(self, outcome: Outcome, seconds: float) -> None:
        first = outcome.first
        if first is None or outcome.request is not None or len(outcome.ended) == 1:
            return  # the end of a single process has already been printed
        self._output.say(f"after {seconds:.1f} s all have ended; the cause: {first}")
        if first.tail:
            lines = "\n".join(f"  {line[:500]}" for line in first.tail)
            self._output.say(f"the last lines of process {first.slot.process}:\n{lines}")

    def _leave_out(self, slot: Slot | None) -> None:
        least = self._settings.min_nodes
        if slot is not None and least is not None and len(self._nodes) > least:
            self._output.say(f"node {slot.node} is left out")
            del self._nodes[slot.node]

    def _pause(self, seconds: float) -> signal.Signals | None:
        """Wait for `seconds`; return early with the signal if the launcher is asked to stop."""
        deadline = time.monotonic() + seconds
        while self._requests.first is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self._requests.first


def _may_restart(outcome: Outcome) -> bool:
    return outcome.request is None and outcome.status not in (0, MISTAKE, DIVERGED)


def _make_log_dir(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"`log_dir` {directory} cannot be made: {reason}.") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ValueError(f"`log_dir` {directory} cannot be written. Give another.")
