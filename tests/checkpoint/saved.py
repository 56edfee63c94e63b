"""A tiny state to save, and what happens to its files."""

from pathlib import Path

import numpy as np


def make_state(zero, number):
    return {"params": zero.shard({"w": np.full((3, 5), number, np.float32), "b": np.ones(4)})}


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def largest_file(folder: Path) -> Path:
    return max(files_in(folder / "state"), key=lambda path: path.stat().st_size)


def flip(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 16
    path.write_bytes(content)
