"""Damage files at random, and keep what reads them within bounds of time and memory."""

from __future__ import annotations

import contextlib
import gc
import random
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxzero.interop import LazyTensor

MAX_SECONDS = 10  # of CPU time
MAX_WAITING = 60  # seconds of any time: opening a pipe waits, and takes no CPU time
MAX_BYTES = 2**30


class OutOfTime(BaseException):
    """A limit was reached; no `Exception`, since readers report an `OSError` as a damaged file."""


@contextlib.contextmanager
def bounds() -> Iterator[None]:
    """Interrupt the body after `MAX_SECONDS` of CPU time or `MAX_WAITING` seconds, as Ctrl-C does.

    It may allocate `MAX_BYTES`. What exists already is left out of garbage collections meanwhile:
    in a process with a large heap one of all of it takes seconds.
    """

    def interrupt(*_: object) -> None:
        raise OutOfTime(f"not done after {MAX_SECONDS} s of CPU time, or {MAX_WAITING} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old_limit = resource.getrlimit(resource.RLIMIT_AS)
    timers = {
        signal.ITIMER_PROF: (signal.SIGPROF, MAX_SECONDS),
        signal.ITIMER_REAL: (signal.SIGALRM, MAX_WAITING),
    }
    old_handlers = {number: signal.signal(number, interrupt) for number, _ in timers.values()}
    gc.freeze()
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_BYTES, old_limit[1])
    )
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        gc.unfreeze()
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, old_limit)


def damaged(whole: bytes, rng: random.Random, positions: Sequence[int]) -> bytes:
    """Change a file in one to three places, each among `positions`."""
    data = bytearray(whole)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if not data:
            break
        at = rng.choice(positions) % len(data)
        match rng.choice(
            ["bit", "byte", "shift", "bit", "byte", "delete", "insert", "copy", "cut"]
        ):
            case "bit":
                data[at] ^= 1 << rng.randrange(8)
            case "byte":
                data[at] = rng.randrange(256)
            case "shift":
                data[at] = (data[at] + rng.choice([-20, -1, 1, 2, 20])) % 256
            case "delete":
                del data[at : at + rng.randrange(1, 30)]
            case "insert":
                data[at:at] = rng.randbytes(rng.randrange(1, 30))
            case "copy":
                size, source = rng.choice([1, 2, 4, 8, 40]), rng.choice(positions) % len(data)
                data[at : at + size] = data[source : source + size]
            case _:
                del data[at:]
    return bytes(data)


def fuzz(
    path: Path,
    count: int,
    seed: int,
    *,
    damage: Callable[[random.Random], None],
    read: Callable[[Path], Mapping[str, LazyTensor]],
    check: Callable[[dict[str, np.ndarray]], None],
    refusals: tuple[type[Exception], ...] = (ValueError,),
) -> int:
    """Damage a checkpoint `count` times, and check what is read of it, or the error.

    Args:
        path: the checkpoint.
        count: number of damaged checkpoints.
        seed: seed of the damage.
        damage: writes a damaged checkpoint to `path`.
        read: opens it.
        check: raises if the arrays are not those of `path`.
        refusals: types of the errors by which a checkpoint is refused.

    Returns:
        How many checkpoints were read.
    """
    rng = random.Random(seed)
    accepted = 0
    for number in range(count):
        damage(rng)
        try:
            with bounds():
                ours = {name: held.read() for name, held in read(path).items()}
        except refusals as error:
            check_refusal(error, path)
            continue
        try:
            check(ours)
        except Exception as error:
            error.add_note(f"checkpoint {number} of seed {seed}")
            raise
        accepted += 1
    return accepted


def check_refusal(error: Exception, path: Path) -> None:
    """An error names the file, fits a line of a terminal, and is not of memory."""
    text = str(error)
    assert str(path) in text, text
    assert text.isprintable() and len(text) < 2000, ascii(text)
    assert "MemoryError" not in text, text


def equal(array: np.ndarray, tensor: Any) -> bool:
    """Return whether an array has the shape, dtype and bits of a tensor of PyTorch."""
    import torch

    if array.shape != tuple(tensor.shape) or f"torch.{array.dtype.name}" != str(tensor.dtype):
        return False
    flat = tensor.detach().contiguous().reshape(-1)
    held = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return held == np.ascontiguousarray(array).tobytes()
