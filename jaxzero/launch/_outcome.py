"""How processes that belong together ended, which of them is the cause, and what status follows.

Whoever ends badly first is not always to blame: a process that loses its peer says so by its exit
code (76) or is aborted by JAX (SIGABRT), and one that we asked to end has only followed another.
"""

import dataclasses
import signal

from .._processes import PEER_LOST, STOPPED, describe, exit_status
from ._child_environment import Slot

# How a process ends that lost another. An abort alone may also be a failure of native code.
CONSEQUENCES = (PEER_LOST, -signal.SIGABRT)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one process ended. `returncode` is as `subprocess` has it."""

    slot: Slot
    returncode: int
    seconds: float  # after its start
    asked: bool  # it had been asked to end
    hung: bool  # it did not end when asked, and was killed
    tail: tuple[str, ...] = ()  # the last lines of its output

    def __str__(self) -> str:
        how = "did not end when asked, and was killed" if self.hung else describe(self.returncode)
        return f"{self.slot}: {how}, after {self.seconds:.1f} s"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How all processes ended, in the order of their ends."""

    ended: tuple[Ended, ...]
    request: signal.Signals | None = None  # what the launcher was asked to stop by

    @property
    def first(self) -> Ended | None:
        """The failure that the others follow from; None if all is done."""
        failures = [end for end in self.ended if end.returncode != 0]
        return min(failures, key=_rank, default=None)  # the earliest of the lowest rank

    @property
    def blamed(self) -> Slot | None:
        """The process without which it may go better: the one that failed by itself, or hung."""
        if self.first is None or self.first.returncode == STOPPED:
            return None
        lost = [end for end in self.ended if end.returncode in CONSEQUENCES and not end.asked]
        is_alone = self.first.returncode != PEER_LOST and len(lost) == 1
        if self.first not in lost or is_alone:
            return self.first.slot
        hung = [end.slot for end in self.ended if end.hung]
        return hung[0] if len(hung) == 1 else None  # of several most only waited for one

    @property
    def status(self) -> int:
        """The exit status of the launcher."""
        if self.first is None:
            return 0
        if self.request == signal.SIGINT:
            return exit_status(-signal.SIGINT)
        return exit_status(self.first.returncode)


def _rank(end: Ended) -> int:
    if end.returncode == STOPPED:
        return 3  # it saved: worth telling if nothing worse happened
    if end.asked:
        return 2
    return 1 if end.returncode in CONSEQUENCES else 0
