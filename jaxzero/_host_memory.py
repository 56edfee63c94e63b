"""Ask the operating system how much memory the host has left."""

from __future__ import annotations

import os


def available_bytes() -> int | None:
    """Return the bytes of host memory that are available; None if the system does not tell."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
