"""A process that dies or hangs ends the others, in bounded time and with a word on who it was.

A collective whose partner is gone waits for ever, so the processes that are well are the ones that
hang. Every process therefore tells its steps to JAX's coordination service, from a thread that runs
while devices do, and looks at what the others tell. Two things end it, with status `PEER_LOST`:
another process is silent (killed, stopped, its machine gone), or this one makes no step (a
deadlock, a device that hangs). Clocks of different machines are not compared: what counts is when
another's counter was last seen to move, by the clock here.
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
_TICKS = 4  # how often we speak and look, in `heartbeat_seconds`
_DONE = "done"
_AGREED = (None, 0, STOPPED, DIVERGED)  # what `SystemExit` says where all processes raise it


class AgreedEnd(Exception):
    """An end that all processes come to together, so that `Watchdog` lets it pass."""


class Watchdog:
    """Ends this process when it makes no progress, or another is lost. A context manager.

    with Watchdog(step_seconds=600) as watchdog:
        for step in range(first, last):
            ...
            watchdog.beat(step)

    An exception that leaves the `with` block ends a process that is one of several at once: an
    ordinary exit would first wait for the others, who wait for this one. The status is that of the
    exit, or `PEER_LOST` for a TimeoutError. JAX's runtime errors, other than a full device, wait
    twice `heartbeat_seconds`, whether it was another process that failed. What all raise together
    passes: `AgreedEnd`, and `SystemExit` with 0, `STOPPED` or `DIVERGED`.

    Args:
        step_seconds: the longest time from one step to the next, compiling and saving included.
        heartbeat_seconds: after so much silence a process is lost.

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
            publish(_NAME, f"0 {self._step}")  # who never spoke cannot fall silent
            self._talker = threading.Thread(target=self._talk, name="jaxzero talk", daemon=True)
            self._talker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _) -> None:
        if process_count() > 1 and not _is_agreed(error):
            traceback.print_exception(error)
            if any(_may_be_of_a_peer(e) for e in causes(error)):
                time.sleep(2 * self._heartbeat_seconds)  # the thread says who is lost, if any is
            message = f"This process leaves at once, so that the others learn of it: {error!r}"
            _leave(message, _status_of(error))
        self._over.set()
        if self._talker is not None:
            self._talker.join(self._heartbeat_seconds)  # until it has said that this is the end

    def beat(self, step: int) -> None:
        """Say that this process has made a step."""
        self._step = step
        self._stepped = time.monotonic()

    @contextlib.contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Allow what is inside so much time in place of a step's: an evaluation, a download.

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
        """Tell and ask, where a call may hang because process 0 does."""
        for count in itertools.count(1):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # `_watch` sees the silence
                publish(_NAME, f"{count} {self._step}")
                self._peers.note(published(_NAME))
            if self._over.wait(self._heartbeat_seconds / _TICKS):
                break
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            publish(_NAME, _DONE)

    def _watch(self) -> None:
        """Judge, and never wait for anybody."""
        tick = self._heartbeat_seconds / _TICKS
        before = time.monotonic()
        while not self._over.wait(min(tick, self._step_seconds / _TICKS)):
            now = time.monotonic()
            if now - before > self._heartbeat_seconds:  # it was this process that stood still
                self._peers.forgive()
                self._stepped = max(self._stepped, now - self._step_seconds / 2)
            before = now
            if process_count() > 1 and (lost := self._peers.lost()):
                _leave(f"{lost} This process was at {_name_of(self._step)}.", PEER_LOST)
            if now - self._stepped > self._step_seconds:
                faulthandler.dump_traceback(all_threads=True)
                _leave(
                    f"No step for {self._step_seconds:g} s, since {_name_of(self._step)}; above is "
                    f"where this process stands.{self._peers.describe()}",
                    PEER_LOST,
                )


class _Peers:
    """When this process last saw each other one alive."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._lock = threading.Lock()
        self._asked = time.monotonic()  # the last time that process 0 answered
        self._seen: dict[int, tuple[str, float]] = {}

    def note(self, told: dict[int, str]) -> None:
        now = time.monotonic()
        with self._lock:
            self._asked = now
            for index, text in told.items():
                if index not in self._seen or self._seen[index][0] != text:
                    self._seen[index] = (text, now)

    def forgive(self) -> None:
        """Start to count anew."""
        now = time.monotonic()
        with self._lock:
            self._asked = now
            self._seen = {index: (text, now) for index, (text, _) in self._seen.items()}

    def lost(self) -> str:
        """Who is silent, as a sentence, or nothing."""
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
        """How far the others are."""
        with self._lock:
            others = [
                f"{describe_process(index)}: {_step_of(text)}"
                for index, (text, _) in sorted(self._seen.items())
                if index != process_index()
            ]
        return f" The others: {'; '.join(others)}." if others else ""


@contextlib.contextmanager
def time_limit(what: str, seconds: float) -> Iterator[None]:
    """End this process, with `PEER_LOST`, if what is inside takes longer.

    For what comes before and after training, such as restoring and exporting, where no `Watchdog`
    runs: a process that waits there for one that hangs has no other end.

    Args:
        what: is inside, as the message says it.
        seconds: that it may take. While this process itself is stopped they do not run.

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
            f"{what} took more than {seconds:g} s; above is where this process stands. If it needs "
            "more time, allow it.",
            PEER_LOST,
        )

    threading.Thread(target=watch, name="jaxzero time limit", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was raised from: a save that failed may have lost a process."""
    while error is not None:
        yield error
        error = error.__cause__


def _may_be_of_a_peer(error: BaseException) -> bool:
    """Whether it may be a collective whose partner is gone; a device that is full is not."""
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
    """End this process as one of several: at once, where an exit would wait for the others.

    An ordinary exit waits until all processes have come to their end. One that has failed must
    not: the others wait for it elsewhere. Alone, this does nothing.
    """
    if process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _leave(message: str, status: int) -> None:
    """The same with a last word, and when alone too: what hangs would hang an ordinary exit."""
    sys.stdout.flush()
    print(f"jaxzero: {message}", file=sys.stderr, flush=True)
    os._exit(status)
