"""Move host arrays to devices in the background, while the next ones are read.

Transposing a matrix, and page faults of the memory it is written to, take most of the time of
loading it. JAX does it during the transfer, outside of Python's lock, so two threads are faster
than one. Reading stays in the calling thread, since the source may be of any kind, except for maps
of files: a thread then moves all slices of an array without waiting for another thread.
"""

from __future__ import annotations

import concurrent.futures
import types
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .._raw import raw
from .._without_gc import without_gc

_THREADS = 2


class InTransfer(NamedTuple):
    """A global array whose shards are in transfer."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    parts: list[concurrent.futures.Future[list[jax.Array]]]  # of one or more shards each

    def array(self) -> jax.Array:
        """Wait for the shards, and return the array."""
        shards = {device: x for part in self.parts for x in part.result() for device in x.devices()}
        devices = self.sharding.addressable_devices_indices_map(self.shape)
        return jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, [shards[device] for device in devices]
        )


def finished(placed: jax.Array | InTransfer) -> jax.Array:
    """The array, after its transfer."""
    return placed.array() if isinstance(placed, InTransfer) else placed


class Transfers:
    """Threads that move arrays to devices. A context manager: leaving it ends the threads.

    Inside, Python's collector of cycles is off: the arrays of a large tree are enough to start it,
    and while it walks over all objects of the process (0.1 s) it holds the lock that the threads
    need between two copies.
    """

    def __init__(self):
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "transfer")
        self._running: set[concurrent.futures.Future[list[jax.Array]]] = set()
        self._no_gc = without_gc()

    def __enter__(self) -> Transfers:
        self._no_gc.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._threads.shutdown(cancel_futures=error is not None)
        self._no_gc.__exit__(kind, error, traceback)

    def make_room(self) -> None:
        """Wait until a thread is free.

        Call it before reading an array: then the host holds at most `_THREADS` arrays at a time,
        the new one included.
        """
        while len(self._running) >= _THREADS:
            first = concurrent.futures.FIRST_COMPLETED
            done, self._running = concurrent.futures.wait(self._running, return_when=first)
            for each in done:
                each.result()

    def put(
        self, data: np.ndarray, targets: list[SingleDeviceSharding]
    ) -> concurrent.futures.Future[list[jax.Array]]:
        """Begin to move an array to memories of devices; it must not change until then."""
        if data.dtype.itemsize > 4:
            # The width of 64-bit types depends on `jax.enable_x64`, which may hold in one thread.
            done: concurrent.futures.Future[list[jax.Array]] = concurrent.futures.Future()
            done.set_result(put_copies([data] * len(targets), targets))
            return done
        return self.run(lambda: put_copies([data] * len(targets), targets))

    def run(
        self, move: Callable[[], list[jax.Array]]
    ) -> concurrent.futures.Future[list[jax.Array]]:
        """Let a thread read arrays and `put_copies` them, after what was begun before.

        It waits for no room: `move` holds memory only while it runs.
        """
        running = self._threads.submit(move)
        self._running.add(running)
        return running


def put_copies(data: list[np.ndarray], targets: list[SingleDeviceSharding]) -> list[jax.Array]:
    """Copy each array to its target and wait for the copies, which share no memory with `data`.

    The CPU backend uses an aligned host array in place. If that is the map of a file, the values
    would change with the file.
    """
    moved = jax.block_until_ready(jax.device_put(data, targets))
    for i, (x, target) in enumerate(zip(data, targets, strict=True)):
        (device,) = target.device_set
        if device.platform == "cpu" and moved[i].unsafe_buffer_pointer() == x.ctypes.data:
            moved[i] = jax.device_put(raw(x).copy().view(x.dtype), target)
    return jax.block_until_ready(moved)
