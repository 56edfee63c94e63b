"""What devices send for a window of `RingMove`s: the rows of arrays, packed into large messages.

A message takes about a millisecond before it flows, in which the link may idle. So all rows of a
window that are of one type and go the same way are one message. Nothing here sends; `overlapped`
does.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from .channels import Channel, channels
from .in_memory import Pieces, needed
from .ring import RingMove, row_shape

Moves = tuple[RingMove, ...]
Received = list[list[Pieces]]  # for each parcel and distance, what devices received


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Arrays of a window that are sent together.

    Attributes:
        members: their indices in the window.
        channels: how they are sent.
    """

    members: tuple[int, ...]
    channels: tuple[Channel, ...]

    @property
    def distances(self) -> int:
        """How many other nodes send to each device."""
        return len(self.channels[0].devices) - 1

    def givers(self, mesh: Mesh, moves: Moves, device: int) -> tuple[int, ...]:
        """The devices whose messages decide what a device has of these arrays in the end."""
        return tuple(sorted({i for k in self.members for i in givers(mesh, moves[k], device)}))


@functools.lru_cache(maxsize=512)
def parcels(mesh: Mesh, moves: Moves) -> tuple[Parcel, ...]:
    """The parcels of a window."""
    found: dict[object, list[int]] = {}
    for i, move in enumerate(moves):
        found.setdefault((move.across.digits, row_shape(move, mesh).dtype), []).append(i)
    return tuple(
        Parcel(tuple(members), channels(moves[members[0]].across.digits, mesh))
        for members in found.values()
    )


def givers(mesh: Mesh, move: RingMove, device: int) -> tuple[int, ...]:
    """The devices of whose rows a device makes its part of the result."""
    return tuple(sorted(needed([device], move.after, mesh)))


def sources(mesh: Mesh, move: RingMove, devices: tuple[int, ...]) -> tuple[int, ...]:
    """The devices of whose shards the rows of `devices` are cut."""
    return tuple(sorted(needed(devices, move.before, mesh)))


def pack(
    mesh: Mesh, moves: Moves, shards: list[Pieces], device: int
) -> list[Shaped[Array, " row"]]:
    """The message of a device for each parcel.

    Args:
        mesh: the digits of the devices.
        moves: of the window.
        shards: for each move, those of the stored array on the `sources` of the device.
        device: its number.
    """
    rows = [move.rows(x, (device,), mesh)[0] for move, x in zip(moves, shards, strict=True)]
    return [jnp.concatenate([rows[i] for i in x.members]) for x in parcels(mesh, moves)]


def finish(
    mesh: Mesh, moves: Moves, shards: list[Pieces], received: Received, device: int
) -> list[Shaped[Array, ...]]:
    """A device's part of each result.

    Args:
        mesh: the digits of the devices.
        moves: of the window.
        shards: for each move, those of the stored array on the `sources` of the `givers`.
        received: for each parcel and distance, what its `givers` received.
        device: its number.
    """
    made = {}
    for parcel, messages in zip(parcels(mesh, moves), received, strict=True):
        start = 0
        for i in parcel.members:
            move, end = moves[i], start + row_shape(moves[i], mesh).size
            rows = {
                giver: [message[giver][start:end] for message in messages]
                for giver in givers(mesh, move, device)
            }
            made[i] = move.result(shards[i], rows, device, mesh)
            start = end
    return [made[i] for i in range(len(moves))]
