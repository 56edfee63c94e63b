"""Record signals that the launcher receives, which its main loop handles later."""

import contextlib
import signal
from collections.abc import Iterator

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """The signals received so far."""

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
