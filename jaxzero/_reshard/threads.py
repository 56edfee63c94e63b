"""`Threads`: one for each channel of a process, which send and receive messages in turn.

XLA's CPU runtime has a thread for each core. Programs that wait for other hosts would hold them, so
that nothing else is computed. A program of one device of the process that does no arithmetic and
whose arguments are ready is executed by the thread that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import jax
from jax.sharding import Mesh

from .channels import Channel, connect, send
from .in_memory import Pieces
from .parcels import Moves, Received, parcels

Arrived = dict[int, Pieces]  # by distance


class Threads:
    """A context manager of this process's sending threads, one for each channel.

    Leaving it ends them.

    Args:
        mesh: the digits of the devices.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._of: dict[tuple[int, ...], ThreadPoolExecutor] = {}

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        # After an error, a send whose peer is gone goes on until Gloo gives up.
        for thread in self._of.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def connect(self, windows: Sequence[Moves]) -> None:
        """Connect the channels of all windows, in the order of their devices."""
        found = {
            channel
            for moves in windows
            for parcel in parcels(self._mesh, moves)
            for channel in parcel.channels
            if channel.local(self._mesh)
        }
        for channel in sorted(found, key=lambda x: (x.devices, len(x.hops))):
            self._thread(channel).submit(connect, self._mesh, channel).result()

    def send(self, moves: Moves, messages: Sequence[Pieces]) -> Callable[[], Received]:
        """Send the messages of a window, after those of earlier windows.

        Args:
            moves: of the window.
            messages: for each parcel, those of the devices of this process.

        Returns:
            A function that waits until all have arrived, and returns what was received.
        """
        under_way = []
        for parcel, of_parcel in zip(parcels(self._mesh, moves), messages, strict=True):
            sends = [
                self._thread(channel).submit(_send, self._mesh, channel, of_parcel)
                for channel in parcel.channels
                if channel.local(self._mesh)
            ]
            under_way.append((parcel.distances, sends))
        return lambda: [_joined(num, sends) for num, sends in under_way]

    def _thread(self, channel: Channel) -> ThreadPoolExecutor:
        # Channels of the same devices share connections, and so their thread.
        if channel.devices not in self._of:
            self._of[channel.devices] = ThreadPoolExecutor(1, "jaxzero-reshard")
        return self._of[channel.devices]


def _send(mesh: Mesh, channel: Channel, messages: Pieces) -> Arrived:
    """Send the message of each device of a line to all others."""
    own = jax.block_until_ready({i: messages[i] for i in channel.local(mesh)})
    return {hop.distance: send(mesh, channel, hop, own) for hop in channel.hops}


def _joined(distances: int, sends: Sequence[Future[Arrived]]) -> list[Pieces]:
    """For each distance, what devices received on any of their channels."""
    found: list[Pieces] = [{} for _ in range(distances)]
    for each in wait(sends, return_when=FIRST_EXCEPTION).done:
        each.result()  # raises an error of one channel while another still waits
    for each in sends:
        for distance, arrived in each.result().items():
            found[distance - 1] |= arrived
    return found
