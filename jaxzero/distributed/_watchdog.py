"""End all processes within bounded time if one of them dies or hangs, and report which one.

A collective whose partner is gone waits forever, so the healthy processes hang. Therefore a thread
of every process publishes its step to JAX's coordination service, also while devices compute, and
reads the steps of the others. A process exits with status `PEER_LOST` if another process is silent
(killed, stopped, machine lost), or if it makes no progress itself (deadlock, hanging device).
Clocks of different machines are not compared: silence is measured by the local clock, from the
last time that the other's counter changed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import jax

from .._processes import (
    DIVERGED,
    INTERRUPTED,
    PEER_LOST,
    STOPPED,
    describe_process,
    process_count,
    process_index,
    publish,
    published,
)

_NAME = "watchdog"
_TICKS = 4  # publishes and checks per `heartbeat_seconds`: three may be late before one is missed
_DONE = "done"
_AGREED = (None, 0, STOPPED, DIVERGED)  # codes of `SystemExit` that all processes raise together


class AgreedEnd(Exception):
    """An exception that all processes raise together, so that `Watchdog` lets it propagate."""


class Watchdog:
    """Context manager that ends this process if it makes no progress or another one is lost.

    with Watchdog(step_seconds=600) as watchdog:
        for step in range(first, last):
            ...
            watchdog.beat(step)

    With several processes, an exception that leaves the `with` block ends the process immediately:
    a normal exit would wait for the others, which wait for this one. The exit status is that of
    the exception, or `PEER_LOST` for a TimeoutError. After a JAX runtime error other than out of
    memory, it first waits twice `heartbeat_seconds`, to report a lost process if that is the
    cause. Exceptions that all processes raise together propagate: `AgreedEnd`, and `SystemExit`
    with 0, `STOPPED` or `DIVERGED`.

    Args:
        step_seconds: longest time from one step to the next, including compiling and saving.
        heartbeat_seconds: a process is considered lost after this time of silence.

    Raises:
        ValueError: a time is not positive.
    """

    def __init__(self, *, step_seconds: float = 1800.0, heartbeat_seconds: float = 30.0):
        _check_positive("step_seconds", step_seconds)
        _check_positive("heartbeat_seconds", heartbeat_seconds)
        self._step_seconds = step_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._step = -1
        self._stepped = time.monotonic()
        self._over = threading.Event()
        self._talker: threading.Thread | None = None
        self._peers = _Peers(heartbeat_seconds)

    def __enter__(self) -> Watchdog:
        self._stepped = time.monotonic()
        threading.Thread(target=self._watch, name="jaxzero watchdog", daemon=True).start()
        if process_count() > 1:
            publish(_NAME, f"0 {self._step}")  # so that the others monitor this process from now on
            self._talker = threading.Thread(target=self._talk, name="jaxzero talk", daemon=True)
            self._talker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _) -> None:
        if process_count() > 1 and not _is_agreed(error):
            traceback.print_exception(error)
            # A process that is lost makes collectives fail on the others, with an error that does
            # not name it.
            if any(_may_be_of_a_peer(e) for e in causes(error)):
                time.sleep(2 * self._heartbeat_seconds)  # `_watch` reports a lost process meanwhile
            message = f"This process exits at once, so that the others notice: {error!r}"
            _leave(message, _status_of(error))
        self._over.set()
        if self._talker is not None:
            self._talker.join(self._heartbeat_seconds)  # until it has published `_DONE`

    def beat(self, step: int) -> None:
        """Record that this process has completed a step."""
        self._step = step
        self._stepped = time.monotonic()

    @contextlib.contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Replace the time limit of a step inside the `with` block, such as for an evaluation.

        Raises:
            ValueError: `seconds` is not positive.
        """
        _check_positive("seconds", seconds)
        self._stepped = time.monotonic()
        allowed, self._step_seconds = self._step_seconds, seconds
        try:
            yield
        finally:
            self._stepped = time.monotonic()
            self._step_seconds = allowed

    def _talk(self) -> None:
        """Publish this process's step and read those of the others, until training is over.

        It runs in its own thread, since calls to the coordination service hang if process 0 hangs.
        """
        for count in itertools.count(1):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # `_watch` sees the silence
                publish(_NAME, f"{count} {self._step}")
                self._peers.note(published(_NAME))
            if self._over.wait(self._heartbeat_seconds / _TICKS):
                break
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            publish(_NAME, _DONE)  # process 0, which runs the service, may have ended

    def _watch(self) -> None:
        """Check for lost processes and missing progress, until training is over; never blocks."""
        tick = self._heartbeat_seconds / _TICKS
        before = time.monotonic()
        while not self._over.wait(min(tick, self._step_seconds / _TICKS)):
            now = time.monotonic()
            if now - before > self._heartbeat_seconds:  # this process itself was suspended
                self._peers.forgive()
                self._stepped = max(self._stepped, now - self._step_seconds / 2)
            before = now
            if process_count() > 1 and (lost := self._peers.lost()):
                _leave(f"{lost} This process was at {_name_of(self._step)}.", PEER_LOST)
            if now - self._stepped > self._step_seconds:
                faulthandler.dump_traceback(all_threads=True)
                _leave(
                    f"No step for {self._step_seconds:g} s, since {_name_of(self._step)}; the "
                    f"traceback of this process is above.{self._peers.describe()}",
                    PEER_LOST,
                )


class _Peers:
    """All other processes, and when this process last saw the counter of each change."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._lock = threading.Lock()
        self._asked = time.monotonic()  # last time at which process 0 answered
        self._seen: dict[int, tuple[str, float]] = {}

    def note(self, messages: dict[int, str]) -> None:
        now = time.monotonic()
        with self._lock:
            self._asked = now
            for index, text in messages.items():
                if index not in self._seen or self._seen[index][0] != text:
                    self._seen[index] = (text, now)

    def forgive(self) -> None:
        """Restart all timers, as after a suspension of this process itself."""
        now = time.monotonic()
        with self._lock:
            self._asked = now
            self._seen = {index: (text, now) for index, (text, _) in self._seen.items()}

    def lost(self) -> str:
        """Describe a process that has been silent for too long; "" if there is none."""
        now = time.monotonic()
        with self._lock:
            if now - self._asked > 2 * self._seconds:
                return (
                    f"{describe_process(0)}, which coordinates, has not answered for "
                    f"{now - self._asked:.0f} s: it died, hangs, or the network is down."
                )
            for index, (text, seen) in sorted(self._seen.items()):
                silent = text != _DONE and index != process_index() and now - seen > self._seconds
                if silent:
                    return (
                        f"{describe_process(index)} has been silent for {now - seen:.0f} s (it was "
                        f"heard at {_step_of(text)}): it died, hangs, or its network is down."
                    )
        return ""

    def describe(self) -> str:
        """Describe the last known step of each other process."""
        with self._lock:
            others = [
                f"{describe_process(index)}: {_step_of(text)}"
                for index, (text, _) in sorted(self._seen.items())
                if index != process_index()
            ]
        return f" The others: {'; '.join(others)}." if others else ""


@contextlib.contextmanager
def time_limit(what: str, seconds: float) -> Iterator[None]:
    """End this process with `PEER_LOST` if the `with` block takes more than `seconds`.

    Use it before and after training, such as for restoring and exporting, where no `Watchdog`
    runs: otherwise a process would wait forever for one that hangs.

    Args:
        what: name of the operation, as the subject of the message.
        seconds: time limit. Time during which this process is suspended does not count.

    Raises:
        ValueError: `seconds` is not positive.
    """
    _check_positive("seconds", seconds)
    over = threading.Event()

    def watch() -> None:
        left = seconds
        while left > 0:
            before = time.monotonic()
            if over.wait(min(left, 1.0)):
                return
            left -= min(time.monotonic() - before, 2.0)
        faulthandler.dump_traceback(all_threads=True)
        _leave(
            f"{what} took more than {seconds:g} s; the traceback of this process is above. If it "
            "needs more time, raise the limit.",
            PEER_LOST,
        )

    threading.Thread(target=watch, name="jaxzero time limit", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes: a lost process may have caused a failed save."""
    while error is not None:
        yield error
        error = error.__cause__


def _may_be_of_a_peer(error: BaseException) -> bool:
    """Return True for a JAX error other than out of memory: a lost process may have caused it."""
    is_full = str(error).startswith("RESOURCE_EXHAUSTED")
    return isinstance(error, jax.errors.JaxRuntimeError) and not is_full


def _check_positive(name: str, seconds: float) -> None:
    if not seconds > 0:
        raise ValueError(f"`{name}` must be a positive number of seconds; got {seconds!r}.")


def _is_agreed(error: BaseException | None) -> bool:
    if isinstance(error, SystemExit):
        return error.code in _AGREED
    return error is None or isinstance(error, AgreedEnd)


def _status_of(error: BaseException | None) -> int:
    if any(isinstance(e, TimeoutError) for e in causes(error)):
        return PEER_LOST
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _step_of(text: str) -> str:
    if text == _DONE:
        return "the end"
    return _name_of(int(text.split()[1]))


def _name_of(step: int) -> str:
    return "the start" if step < 0 else f"step {step}"


def leave(status: int) -> None:
    """End this process immediately if it is one of several; a single process continues.

    A normal exit waits until all processes exit. A process that has failed must not wait, because
    the others wait for it in a collective.
    """
    if process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _leave(message: str, status: int) -> None:
    """Print a message and end this process immediately: a normal exit could hang too."""
    sys.stdout.flush()
    print(f"jaxzero: {message}", file=sys.stderr, flush=True)
    os._exit(status)
