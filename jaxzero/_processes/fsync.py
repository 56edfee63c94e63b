"""Flush files to disk, so that they survive a crash of the machine."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file's contents, or a folder's list of entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush a folder, and all files and folders in it."""
    for parent, _, names in os.walk(folder):
        for name in names:
            flush(Path(parent, name))
        flush(Path(parent))
