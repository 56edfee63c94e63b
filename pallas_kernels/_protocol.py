"""Who may touch whose memory when, in a collective that is one kernel on every device.

Every device runs the same kernel. Its blocks share out the tiles of an array; block b of a
device talks to block b of the others only, by semaphores of its own. In the memory of every
device lies an inbox: for each block, and each device that sends, `slots` places for a tile.
A block of device d, which is its own peer too, does this (`exchange`):

    signal `entered` on every peer, and wait until all have
    for i = 0, 1, ..., tiles + slots - 2:
        if i < tiles:                                                      (send)
            if i >= slots: wait until `free` has come from all
            write tile i into place `i % slots` of d in the inbox of every p
            signal `arrived[d]` on every p
        k = i - (slots - 1); if k >= 0:                                    (receive)
            for every peer p, in order: wait for `arrived[p]`, read place `k % slots` of p
            if k + slots < tiles: signal `free` on every p

So up to `slots` tiles of each peer are under way while one is decoded. What orders what, in the
terms of PTX's memory model, and what JAX 0.11.2 and 0.12.0 make of each step (x < y: x happens
before y, as base causality order has it):

- *Write* is an ordinary (weak) store to the peer's memory by 128 threads: `remote_ref` only
  changes the address. No TMA, so that no proxy fence is called for.
- *Signal* is `bar.sync`, then by one thread `red.release.sys.add` on the peer's semaphore. The
  barrier puts the stores and loads of all threads before the release, and a release is
  cumulative: who acquires the new count sees those stores, and those loads have been done.
- *Wait* is by one thread a loop of `atom.relaxed.sys.cas` that subtracts the count, then
  `fence.acquire.sys`, then `bar.sync`. Counts only change by atomic operations, so it
  synchronizes with every signal that the count contains, from whichever device.
- *Read* is an ordinary load, after that barrier. Not `ld.global.nc`: that may be stale.

One fence for signals to several peers would do. But what JAX has for that,
`semaphore_signal_parallel`, makes relaxed signals with a fence behind each and none before the
first, which then may overtake a tile. So each signal is a release of its own.

What follows from this:

1. A tile is read whole: its stores < release of `arrived` < acquire < its loads. There is one
   `arrived` for each sender; a sum over senders would count a fast one's second tile for a
   slow one's first.
2. A place is written again only when it has been read: loads < release of `free` < acquire <
   stores of the tile `slots` later. One `free` for all peers is enough: a peer signals it for
   the (m+1)-th time only after its own m-th wait. So when the first block ends its m-th wait,
   nobody has signalled more than m times, and N m signals are m from each.
3. Nobody writes into an inbox whose owner has not entered this call: the memory may hold what an
   earlier operation on that device still reads. An owner that signals `entered` has done all of
   that, since kernels on a stream follow each other.
4. Nobody writes into an inbox whose owner has left: it leaves when all tiles have arrived.
5. Every signal is waited for once, by the block it is sent to, before that block ends. So all
   semaphores are zero at the end and none is touched after it: the next call, or the next
   iteration of a `scan`, may have the same memory.
6. No deadlock. What a block waits for in round i its peers do in round i - 1 at the latest, or
   earlier in round i without waiting for anything of this block in round i: induction on rounds.
   `free` for tile i is signalled in round i - slots + (slots - 1) = i - 1.

Three things are taken for granted, and the kernels must see to them:

- All semaphores of all devices are zero before any block of the call starts. XLA gives each
  call zeros of its own, written somewhere before it, in a loop in its body; JAX's runtime then
  lets all devices of the mesh wait for each other, right before the kernel
  (`CompilerParams.skip_device_barrier=False`, the default). With that barrier 3 would hold
  without `entered`. But what it is documented for is semaphores, and not whose memory is free.
- All blocks of a device run at once. Else block b of one device may wait for ever for block b
  of another, which waits for a block that waits for block b. So the grid must fit the device,
  and kernels that run beside this one must come to an end without it.
- Every device of the axis can store into the memory of every other: one NVLink domain.

`tests/kernels/test_protocol.py` runs `exchange` in a model of such memory, against schedulers that
look for trouble, and shows that it goes wrong if any one of these orderings is left out.
`tests/kernels/test_remote_aot.py` finds the steps in the PTX that comes out, in this order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Literal

Semaphore = Literal["entered", "arrived", "free"]  # of the second there is one for each peer


class Party(abc.ABC):
    """One block of one device: what it can do, which a kernel emits and a simulation records.

    Numbers of devices, tiles and places may be values that only exist while a kernel runs.

    Attributes:
        num_devices: those that take part.
    """

    num_devices: int

    @abc.abstractmethod
    def repeat(self, num: Any, body: Callable[[Any], None]) -> None:
        """Do `body(i)` for `i` from 0 to `num - 1`."""

    @abc.abstractmethod
    def when(self, condition: Any, body: Callable[[], None]) -> None:
        """Do `body()` if `condition` holds."""

    @abc.abstractmethod
    def signal(self, semaphore: Semaphore, peer: Any) -> None:
        """Add 1 to a semaphore of `peer`; `arrived` is the one for this device."""

    @abc.abstractmethod
    def wait(self, semaphore: Semaphore, count: int, peer: int = 0) -> None:
        """Wait until a semaphore of this device has `count`, and subtract it."""

    @abc.abstractmethod
    def write(self, tile: Any, slot: Any) -> None:
        """Encode this device's tile, for every peer, and write it into that peer's inbox."""

    @abc.abstractmethod
    def read(self, peer: Any, tile: Any, slot: Any, so_far: Any) -> Any:
        """Decode what `peer` sent; returns what is kept of the tile of all peers until here."""

    @abc.abstractmethod
    def store(self, tile: Any, total: Any) -> None:
        """Keep the result of reading a tile of every peer."""


def exchange(party: Party, *, num_tiles: Any, most_tiles: int, slots: int) -> None:
    """Send every peer its tiles, and take theirs.

    Args:
        party: this block.
        num_tiles: of this block, the same for block b of every device.
        most_tiles: of any block.
        slots: places for each peer's tiles in an inbox.
    """
    peers, ahead = party.num_devices, slots - 1
    is_scarce = slots < most_tiles  # places must be used again

    def send(tile: Any) -> None:
        if is_scarce:
            party.when(tile >= slots, lambda: party.wait("free", peers))
        party.write(tile, tile % slots)
        party.repeat(peers, lambda p: party.signal("arrived", p))

    def receive(tile: Any) -> None:
        total = None
        for peer in range(peers):  # in order, so that sums are the same everywhere
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
