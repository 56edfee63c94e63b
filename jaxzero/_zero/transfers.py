"""Move host arrays to devices in the background, while the next ones are read.

Transposing a matrix takes most of the time of loading it. JAX does it during the transfer, outside
of Python's lock, so two threads are faster than one. Reading stays in the calling thread, since the
source may be of any kind.
"""

from __future__ import annotations

import collections
import concurrent.futures
import types
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .._raw import raw

_THREADS = 2


class InTransfer(NamedTuple):
    """A global array whose shards are in transfer."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    shards: list[concurrent.futures.Future[jax.Array]]

    def array(self) -> jax.Array:
        """Wait for the shards, and return the array."""
        arrays = [shard.result() for shard in self.shards]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)


def finished(placed: jax.Array | InTransfer) -> jax.Array:
    """The array, after its transfer."""
    return placed.array() if isinstance(placed, InTransfer) else placed


class Transfers:
    """Threads that move arrays to devices. A context manager: leaving it ends the threads."""

    def __init__(self):
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "transfer")
        self._running: collections.deque[concurrent.futures.Future[jax.Array]] = collections.deque()

    def __enter__(self) -> Transfers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._threads.shutdown(cancel_futures=error is not None)

    def make_room(self) -> None:
        """Wait until a thread is free.

        Call it before reading an array: then the host holds at most `_THREADS` arrays at a time,
        the new one included.
        """
        while len(self._running) >= _THREADS:
            self._running.popleft().result()

    def put(
        self, data: np.ndarray, target: SingleDeviceSharding
    ) -> concurrent.futures.Future[jax.Array]:
        """Begin to move an array to a memory of a device; it must not change until then."""
        if data.dtype.itemsize > 4:
            # The width of 64-bit types depends on `jax.enable_x64`, which may hold in one thread.
            done: concurrent.futures.Future[jax.Array] = concurrent.futures.Future()
            done.set_result(put_copy(data, target))
            return done
        self._running.append(self._threads.submit(put_copy, data, target))
        return self._running[-1]


def put_copy(data: np.ndarray, target: SingleDeviceSharding) -> jax.Array:
    """Copy an array to `target` and wait for the copy, which shares no memory with `data`.

    The CPU backend uses an aligned host array in place. If that is the map of a file, the values
    would change with the file.
    """
    moved = jax.block_until_ready(jax.device_put(data, target))
    (device,) = target.device_set
    is_shared = device.platform == "cpu" and moved.unsafe_buffer_pointer() == data.ctypes.data
    if not is_shared or not data.nbytes:
        return moved
    return jax.block_until_ready(jax.device_put(raw(data).copy().view(data.dtype), target))
