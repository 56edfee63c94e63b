"""Have free memory backed by the host, before a time is measured.

A virtual machine may give free memory back to its host (free page reporting, a balloon). To write
2 GB of such memory took 1 to 8 s on one of ours, and 0.1 to 0.7 s just after it had been freed: it
is given back again within seconds. A measured time would say more about that than about the code.
"""

from __future__ import annotations

import mmap
import time

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_SECONDS_PER_GB = 0.2
_TRIES = 5


def back_memory(num_bytes: int) -> float:
    """Write memory and free it until that is fast, so that the next allocations are backed.

    Args:
        num_bytes: bytes to write.

    Returns:
        Seconds of the last try; more than 0.2 for each GB if it did not become fast.

    Raises:
        OSError: the system is no Linux of version 5.14 or newer.
    """
    seconds = 0.0
    for _ in range(_TRIES):
        start = time.perf_counter()
        with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.madvise(_MADV_POPULATE_WRITE)
        seconds = time.perf_counter() - start
        if seconds < _SECONDS_PER_GB * num_bytes / 1e9:
            break
    return seconds
