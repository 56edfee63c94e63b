"""Exit states of all processes, the failure that caused the others, and the launcher's status.

The first process that fails is not always the cause: a process that loses its peer exits with code
76 or is aborted by JAX (SIGABRT), and one that the launcher terminated only follows another.
"""

import dataclasses
import signal

from .._processes import PEER_LOST, STOPPED, describe, exit_status
from ._child_environment import Slot

# Exit codes of a process that lost a peer. A single abort may also be a failure of native code.
CONSEQUENCES = (PEER_LOST, -signal.SIGABRT)


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
