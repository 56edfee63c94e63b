"""Synchronization protocol of collectives that are one kernel on every device.

Every device runs the same kernel. Its thread blocks divide the tiles of an array among them;
block b of a device communicates only with block b of the other devices, through semaphores of
its own. Every device has an inbox with `slots` places for a tile per block and sending device.
A block of device d, which is also one of its own peers, does this (`exchange`):

    signal `entered` on every peer, and wait until every peer has signalled it here
    for i = 0, 1, ..., tiles + slots - 2:
        if i < tiles:                                                      (send)
            if i >= slots: wait until every peer has signalled `free` here
            write tile i into place `i % slots` of d in the inbox of every p
            signal `arrived[d]` on every p
        k = i - (slots - 1); if k >= 0:                                    (receive)
            for every peer p, in order: wait for `arrived[p]`, read place `k % slots` of p
            if k + slots < tiles: signal `free` on every p

So up to `slots` tiles of each peer are in flight while one is decoded. The steps order memory
accesses as follows, in the terms of PTX's memory model and as JAX 0.11.2 and 0.12.0 compile them
(x < y: x happens before y in base causality order):

- *Write* is an ordinary (weak) store to the peer's memory by 128 threads: `remote_ref` only
  changes the address. It does not use TMA, so no proxy fence is needed.
- *Signal* is `bar.sync`, followed by `red.release.sys.add` on the peer's semaphore by one thread.
  The barrier orders the stores and loads of all threads before the release, and a release is
  cumulative: a thread that acquires the new count sees those stores, and those loads are done.
- *Wait* is a loop of `atom.relaxed.sys.cas` by one thread, which subtracts the count, followed by
  `fence.acquire.sys` and `bar.sync`. Counts change only by atomic operations, so it synchronizes
  with every signal that the count contains, from any device.
- *Read* is an ordinary load after that barrier, and not `ld.global.nc`, which may be stale.

One fence would suffice for signals to several peers. But JAX's `semaphore_signal_parallel` makes
relaxed signals with a fence behind each and none before the first, so the first may overtake a
tile. Therefore each signal is a release of its own.

The protocol guarantees:

1. A tile is read in full: its stores < release of `arrived` < acquire < its loads. There is one
   `arrived` per sender; a sum over senders would count a fast sender's second tile as a slow
   sender's first.
2. A place is overwritten only after it has been read: loads < release of `free` < acquire <
   stores of the tile `slots` later. One `free` for all peers is enough: a peer signals it for
   the (m+1)-th time only after its own m-th wait. So when the first block ends its m-th wait,
   no peer has signalled more than m times, and N m signals are m from each.
3. No peer writes into an inbox before its owner has entered this call: an earlier operation on
   that device might still read the memory. Exchanges have a stream of their own, on which they run
   one after the other. That stream waits for all operations that the stream of compute began before
   the call. So an owner that signals `entered` has finished them. Operations that compute during
   the call use other memory: XLA keeps the inbox, a result of the kernel, until the kernel ends.
4. No peer writes into an inbox after its owner has left: an owner leaves when all tiles have
   arrived.
5. Every signal is consumed once, by the block that receives it, before that block ends. So all
   semaphores are zero at the end and are not accessed afterwards: the next call, or the next
   iteration of a `scan`, may reuse the memory.
6. No deadlock. The signals that a block waits for in round i are sent by its peers in round
   i - 1 at the latest, or early in round i, before they wait for any signal that this block
   sends in round i; induction on rounds. `free` for tile i is signalled in round
   i - slots + (slots - 1) = i - 1.

The protocol relies on three assumptions, which the kernels must ensure:

- All semaphores of all devices are zero before any block of the call starts. XLA passes zeros to
  each call, written at some earlier time (within a loop: in its body); JAX's runtime then runs a
  barrier over all devices of the mesh right before the kernel
  (`CompilerParams.skip_device_barrier=False`, the default). With that barrier,
  guarantee 3 would hold without `entered`. But JAX documents the barrier for semaphores only, not
  for reuse of other memory.
- All blocks of a device run concurrently. Otherwise block b of one device may deadlock waiting
  for block b of another, which is queued behind a block that waits for block b. So the grid must
  fit on the device beside the grids of NCCL's kernels, which wait for devices too. Kernels that
  only compute end by themselves.
- Every device of the axis can store into the memory of every other: one NVLink domain.

`tests/kernels/test_protocol.py` runs `exchange` on a model of such memory with adversarial
schedulers, and shows that it fails if any one of these orderings is removed.
`tests/kernels/test_remote_aot.py` checks that the compiled PTX has the steps in this order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Literal

Semaphore = Literal["entered", "arrived", "free"]  # a block has one `arrived` for each peer


class Party(abc.ABC):
    """The operations that `exchange` calls, for one thread block of one device.

    A kernel implements them as instructions, and the tests as a simulation. Indices of devices,
    tiles and slots may be traced values. A slot is a place for one tile in an inbox.

    Attributes:
        num_devices: number of devices that take part.
    """

    num_devices: int

    @abc.abstractmethod
    def repeat(self, num: Any, body: Callable[[Any], None]) -> None:
        """Call `body(i)` for `i` from 0 to `num - 1`."""

    @abc.abstractmethod
    def when(self, condition: Any, body: Callable[[], None]) -> None:
        """Call `body()` if `condition` holds."""

    @abc.abstractmethod
    def signal(self, semaphore: Semaphore, peer: Any) -> None:
        """Add 1 to a semaphore of `peer`; to its `arrived` for this device, if that is named."""

    @abc.abstractmethod
    def wait(self, semaphore: Semaphore, count: int, peer: int = 0) -> None:
        """Wait until a semaphore of this device is at least `count`, then subtract `count`.

        `peer` chooses among the semaphores `arrived`, and is ignored for the others.
        """

    @abc.abstractmethod
    def write(self, tile: Any, slot: Any) -> None:
        """Encode this device's tile for each peer, and write it into `slot` of the peer's inbox."""

    @abc.abstractmethod
    def read(self, peer: Any, tile: Any, slot: Any, so_far: Any) -> Any:
        """Decode the tile that `peer` sent; return the sum of it and of earlier peers' tiles.

        `so_far` is what `read` returned for the peer before, None for the first. A gather, which
        sums nothing, stores the tile instead, and returns None.
        """

    @abc.abstractmethod
    def store(self, tile: Any, total: Any) -> None:
        """Store `total`, what `read` returned for the last peer, as tile `tile` of the result."""


def exchange(party: Party, *, num_tiles: Any, most_tiles: int, slots: int) -> None:
    """Send every peer its tiles, and receive the peers' tiles, by the protocol of this module.

    Args:
        party: this block.
        num_tiles: number of tiles of this block, equal for block b of every device.
        most_tiles: largest number of tiles of any block.
        slots: tiles of each peer that fit into an inbox.
    """
    peers, ahead = party.num_devices, slots - 1
    is_scarce = slots < most_tiles  # slots must be reused, so `free` is needed

    def send(tile: Any) -> None:
        if is_scarce:
            party.when(tile >= slots, lambda: party.wait("free", peers))
        party.write(tile, tile % slots)
        party.repeat(peers, lambda p: party.signal("arrived", p))

    def receive(tile: Any) -> None:
        total = None
        for peer in range(peers):  # in order, so that sums are bitwise equal on all devices
            party.wait("arrived", 1, peer)
            total = party.read(peer, tile, tile % slots, total)
        party.store(tile, total)
        if is_scarce:
            party.when(
                tile + slots < num_tiles,
                lambda: party.repeat(peers, lambda p: party.signal("free", p)),
            )

    def work(i: Any) -> None:
        party.when(i < num_tiles, lambda: send(i))
        party.when(i >= ahead, lambda: receive(i - ahead))

    party.repeat(peers, lambda p: party.signal("entered", p))
    party.wait("entered", peers)
    party.repeat(num_tiles + ahead, work)
