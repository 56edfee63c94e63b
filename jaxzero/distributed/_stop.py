"""SIGTERM and Ctrl-C as a polite request: finish the step, save, and say how to go on."""

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

_calls = itertools.count(1)  # of this process, over all stop requests: JAX's service has one count


class StopRequest:
    """Whether this run was asked to stop, agreed over all processes. A context manager.

    Schedulers send SIGTERM some time before they end a process, and often to one process only. All
    must stop after the same step, or those that go on wait for the others for ever; JAX's
    preemption service finds a step that none has passed yet. Ctrl-C is taken for the same request.
    Pressed a second time, it acts as usual (KeyboardInterrupt), for someone who cannot wait.

    JAX's service listens from `distributed.initialize` on, also where that finds one process alone.
    Without it a process is asked inside the `with` block only, and outside the main thread, where
    Python delivers no signals, never.

    with StopRequest() as stop:
        for step in range(first, last):
            ...
            if stop.reached():
                save()
                raise SystemExit(distributed.STOPPED)
    """

    def __init__(self):
        self.interrupted = False
        """Whether it was Ctrl-C, in this process."""
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
        """Whether to stop after this step. All processes call it after every step."""
        if process_count() == 1 and not notices_sigterm():
            return self._asked
        # A count from 1, not the step: asked before the first call, JAX says that 1 is the last.
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
                os.kill(os.getpid(), signal.SIGTERM)  # for JAX's service, which tells all
