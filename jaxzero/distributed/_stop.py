"""Handle SIGTERM and Ctrl-C as requests to finish the step, save and exit."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils

from .._processes import notices_sigterm, process_count

# JAX's preemption service has one counter per process, so all `StopRequest`s share this one.
_calls = itertools.count(1)


class StopRequest:
    """Context manager that stops all processes after the same step, on SIGTERM or Ctrl-C.

    Schedulers send SIGTERM some time before they kill a process, and often to one process only.
    All processes must stop after the same step, or the others deadlock; JAX's preemption service
    finds a step that no process has passed yet. Ctrl-C is treated in the same way. A second Ctrl-C
    raises KeyboardInterrupt as usual.

    JAX's service receives SIGTERM from `distributed.initialize` on, even for a single process.
    Without `initialize`, signals are handled inside the `with` block only, and only in the main
    thread, since Python delivers no signals to other threads.

    with StopRequest() as stop:
        for step in range(first, last):
            ...
            if stop.reached():
                save()
                raise SystemExit(distributed.STOPPED)
    """

    def __init__(self):
        self.interrupted = False
        """True if this process received Ctrl-C."""
        self._asked = False
        self._usual: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._listen(signal.SIGINT, self._note_interrupt)
            if not notices_sigterm():
                self._listen(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)
        self._usual = {}

    def reached(self) -> bool:
        """Return True if the run is to stop after this step.

        All processes must call it after every step; all get the same answer.
        """
        if process_count() == 1 and not notices_sigterm():
            return self._asked
        # A counter from 1 instead of the step: after an early request JAX stops at number 1.
        return multihost_utils.reached_preemption_sync_point(next(_calls))

    def _listen(self, number: signal.Signals, handler: Any) -> None:
        self._usual[number] = signal.getsignal(number)
        signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = self._asked = True
        signal.signal(signal.SIGINT, self._usual[signal.SIGINT])
        if notices_sigterm():
            with contextlib.suppress(ProcessLookupError):
                os.kill(os.getpid(), signal.SIGTERM)  # JAX's service then informs all processes
