"""How a host's link is used while steps run, by the counters of its interface.

with LinkUse(12.5e6) as link:
    ...
link.shares()   # {"both": 0.9, "one": 0.06, "neither": 0.04, "filled": 0.94}
"""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import NamedTuple

from ._hosts import INTERFACE

_SAMPLES_PER_SECOND = 5
_BUSY = 0.5  # of the link's rate


class Sample(NamedTuple):
    """Seconds, and the bytes that the interface has sent and received by then."""

    seconds: float
    sent: int
    received: int


class LinkUse:
    """Sample the counters of this host's interface until the block ends.

    Args:
        bytes_per_second: the rate of the link in each direction; None: it has no limit, and there
            is nothing to compare with.
    """

    def __init__(self, bytes_per_second: float | None):
        self._rate = bytes_per_second
        self._samples: list[Sample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> LinkUse:
        self._samples = [_now()]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def shares(self) -> dict[str, float] | None:
        """`shares_of` what was sampled; None for a link without a limit."""
        return None if self._rate is None else shares_of(self._samples, self._rate)

    def _sample(self) -> None:
        while not self._ended.wait(1 / _SAMPLES_PER_SECOND):
            self._samples.append(_now())
        self._samples.append(_now())


def shares_of(samples: list[Sample], bytes_per_second: float) -> dict[str, float]:
    """In which share of the time both directions of a link were busy, one alone, or neither.

    A direction is busy between two samples in which it moved half of what the rate allows, or
    more. "filled" is what was moved over what both directions could have moved, while at least one
    was busy; 0 if none ever was.
    """
    seconds = {"both": 0.0, "one": 0.0, "neither": 0.0}
    moved = possible = 0.0
    for before, after in itertools.pairwise(samples):
        passed = after.seconds - before.seconds
        sizes = after.sent - before.sent, after.received - before.received
        busy = sum(size >= _BUSY * bytes_per_second * passed for size in sizes)
        seconds[("neither", "one", "both")[busy]] += passed
        if busy:
            moved += sum(sizes)
            possible += 2 * bytes_per_second * passed
    whole = sum(seconds.values())
    shares = {name: round(part / whole, 3) for name, part in seconds.items()}
    return shares | {"filled": round(moved / possible, 3) if possible else 0.0}


def _now() -> Sample:
    folder = Path(f"/sys/class/net/{INTERFACE}/statistics")
    sent, received = (int((folder / f"{name}_bytes").read_text()) for name in ("tx", "rx"))
    return Sample(time.perf_counter(), sent, received)
