"""Exit statuses of a training process, for those who start it again."""

from typing import Final

STOPPED: Final = 75
"""Asked to stop by SIGTERM, and saved: the same command goes on. `EX_TEMPFAIL` of sysexits.h."""

PEER_LOST: Final = 76
"""Another process died or hangs; start all again from the last checkpoint."""

DIVERGED: Final = 77
"""Losses or gradients stay non-finite, or replicas differ: look before starting again."""
