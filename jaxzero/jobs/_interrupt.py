"""Ctrl-C as a polite request: finish the step, save, and say how to go on."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def polite_interrupt() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether Ctrl-C was pressed inside the `with` block.

    The first press is only noted. The second acts as usual (KeyboardInterrupt), for someone who
    cannot wait. Outside the main thread, where Python delivers no signals, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = False
    usual = signal.getsignal(signal.SIGINT)

    def note(signum: int, frame: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, usual)
