"""Move host arrays to devices in background threads, while the next arrays are read.

Loading a matrix spends most time on transposing it, and on page faults of the memory that it is
written to. JAX does both during the transfer, outside of Python's lock, so two threads are faster
than one. The calling thread reads, since the source may be of any kind. A map of a file is read by
a background thread, which moves all slices of an array without waiting for another thread.
"""

from __future__ import annotations

import concurrent.futures
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from .._raw import raw
from .._without_gc import without_gc

T = TypeVar("T")

_THREADS = 2  # also the number of arrays that are on the host at a time
_SCRATCH_BYTES = 2**25  # of each thread
_CACHE_PERIOD = 2**12  # addresses this far apart share a set of a processor's first cache
_CACHE_LINE = 64  # bytes between rows, so that neighbouring rows are in other sets


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


Placed = jax.Array | InTransfer | concurrent.futures.Future[jax.Array]


def finished(placed: Placed) -> jax.Array:
    """Wait for a transfer; return its array."""
    if isinstance(placed, concurrent.futures.Future):
        return placed.result()
    return placed.array() if isinstance(placed, InTransfer) else placed


class Transfers:
    """Threads that move arrays to devices. Leaving this context manager ends the threads.

    Inside, Python's collector of cycles is off: the arrays of a large tree are enough to start it,
    and while it walks over all objects of the process (0.1 s) it holds the lock that the threads
    need between two copies.
    """

    def __init__(self):
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "transfer")
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._scratch = threading.local()
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
            for future in done:
                future.result()

    def put(
        self, data: np.ndarray, targets: list[SingleDeviceSharding]
    ) -> concurrent.futures.Future[list[jax.Array]]:
        """Begin to copy `data` to each device memory of `targets`; return a future of the copies.

        `data` must not change until the copies are done.
        """
        if data.dtype.itemsize > 4:
            # The width of 64-bit types depends on `jax.enable_x64`, which may hold in one thread.
            done: concurrent.futures.Future[list[jax.Array]] = concurrent.futures.Future()
            done.set_result(put_copies([data] * len(targets), targets))
            return done
        return self.run(lambda: put_copies([data] * len(targets), targets))

    def run(self, move: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run `move` in a thread; return a future of its result. `move` copies arrays to devices.

        There is no need to call `make_room` first: `move` holds memory only while it runs.
        """
        running = self._threads.submit(move)
        self._running.add(running)
        return running

    def spread_rows(self, data: np.ndarray) -> np.ndarray:
        """Copy a transposed matrix, if its rows collide in the cache, to memory where they do not.

        A transpose reads a few bytes of many rows at once. If rows are a multiple of 4096 bytes
        apart, they share one set of the cache. Then each row is fetched again for its next few
        bytes, which takes longer than this copy. Arrays without this problem, and large ones, are
        returned unchanged.

        The copy is in memory of the calling thread, and the thread's next call overwrites it.
        """
        itemsize = data.dtype.itemsize
        if data.ndim != 2 or data.strides[0] != itemsize or data.strides[1] % _CACHE_PERIOD:
            return data
        num_columns, num_rows = data.shape
        row_bytes = num_columns * itemsize + _CACHE_LINE
        if num_columns == 1 or num_rows * row_bytes > _SCRATCH_BYTES:
            return data
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = np.empty(_SCRATCH_BYTES, np.uint8)
        memory = self._scratch.memory[: num_rows * row_bytes].reshape(num_rows, row_bytes)
        copy = memory[:, : num_columns * itemsize].view(data.dtype).T
        raw(copy)[...] = raw(data)
        return copy


def copy_slices(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    get: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array:
    """Copy host arrays to the shards of one global array, and wait. No memory is shared.

    JAX is called once for all shards: for arrays of a few MB, calls take as long as their copies.

    Args:
        shape: the shape of the global array.
        sharding: the sharding of the global array.
        get: returns the slice at an index; it is called once for each different slice.
    """
    held: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}

    def slice_of(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        bounds = tuple(each.indices(n) for each, n in zip(index, shape, strict=True))
        if bounds not in held:
            held[bounds] = get(index)
        return held[bounds]

    array = jax.make_array_from_callback(shape, sharding, slice_of)
    array.block_until_ready()
    if not any(x.flags.c_contiguous for x in held.values()):
        return array  # JAX has copied them: it uses only contiguous arrays in place
    copies = [_apart(shard.data, slice_of(shard.index)) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, jax.block_until_ready(copies))


def put_copies(data: list[np.ndarray], targets: list[SingleDeviceSharding]) -> list[jax.Array]:
    """Copy each array to its target, and wait. The copies share no memory with `data`.

    The CPU backend would use an aligned host array in place. If that is the map of a file, the
    values would change with the file.
    """
    moved = jax.block_until_ready(jax.device_put(data, targets))
    return jax.block_until_ready([_apart(x, y) for x, y in zip(moved, data, strict=True)])


def _apart(moved: Any, data: np.ndarray) -> jax.Array:
    """Return `moved`, an array that JAX made from `data`, copied if it shares `data`'s memory."""
    (device,) = moved.devices()
    if device.platform != "cpu" or moved.unsafe_buffer_pointer() != data.ctypes.data:
        return moved
    return jax.device_put(raw(data).copy().view(data.dtype), moved.sharding)
