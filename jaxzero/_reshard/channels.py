"""`Channel`: the devices of an all-gather between processes, connected to send one way only.

Gloo exchanges large messages in turn if two devices send to each other on one connection: a host
says that it is ready to receive behind the data that it sends. XLA connects devices anew for each
order that a mesh has them in. So each line of devices, one from each node, has two channels, the
second with the devices in another order. The first carries rows to the nodes less than half way
around, the second to those further on. Of those exactly half way around, each carries one half:

    nodes 0, 1          first: 0 to 1               second: 1 to 0
    nodes 0, 1, 2, 3    first: i to i+1, i to i+2   second: i to i+2, i to i+3
                                         (i = 0, 1)         (i = 2, 3)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from .digits import groups
from .in_memory import Pieces

_LINE = PartitionSpec("line")


@dataclasses.dataclass(frozen=True)
class Hop:
    """What devices of a line send at once, to the nodes at some distance.

    Attributes:
        distance: how many nodes further.
        pairs: the numbers of each sender and of the device that it sends to.
    """

    distance: int
    pairs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Channel:
    """Connections of a line of devices.

    Attributes:
        devices: their numbers, in the order that tells XLA's connections apart.
        hops: what is sent, one after the other.
    """

    devices: tuple[int, ...]
    hops: tuple[Hop, ...]

    def local(self, mesh: Mesh) -> dict[int, Any]:
        """The devices of this process, by number in `mesh`."""
        found = {i: mesh.devices.flat[i] for i in self.devices}
        return {i: x for i, x in found.items() if x.process_index == jax.process_index()}


@functools.lru_cache(maxsize=64)
def channels(digits: tuple[str, ...], mesh: Mesh) -> tuple[Channel, ...]:
    """The channels of an all-gather over the axes `digits` of `mesh`, two for each line."""
    found = []
    for line in groups(digits, mesh).tolist():
        num, hops = len(line), []
        for distance in range(1, num):
            pairs = tuple((line[i], line[(i + distance) % num]) for i in range(num))
            is_mutual = 2 * distance == num
            halves = (pairs[:distance], pairs[distance:]) if is_mutual else (pairs,)
            hops += [Hop(distance, each) for each in halves]
        half = len(hops) // 2
        found.append(Channel(tuple(line), tuple(hops[:half])))
        found.append(Channel((*line[1:], line[0]), tuple(hops[half:])))
    return tuple(found)


def gives_zeros(digits: tuple[str, ...], mesh: Mesh) -> bool:
    """Whether each device has a hop in which it receives nothing: XLA gives it a row of zeros."""
    return groups(digits, mesh).shape[1] % 2 == 0


@functools.lru_cache(maxsize=512)
def submesh(mesh: Mesh, channel: Channel) -> Mesh:
    """The devices of a channel in their order."""
    return Mesh(mesh.devices.ravel()[list(channel.devices)], ("line",))


@functools.lru_cache(maxsize=512)
def hop_program(mesh: Mesh, channel: Channel, hop: Hop) -> Callable[[jax.Array], jax.Array]:
    """The jitted program of a hop, over the devices of its line."""
    place = {device: i for i, device in enumerate(channel.devices)}
    pairs = [(place[source], place[to]) for source, to in hop.pairs]

    def on_device(row: Array) -> Array:
        return lax.ppermute(row, "line", pairs)

    shard_map = jax.shard_map(
        on_device, mesh=submesh(mesh, channel), in_specs=_LINE, out_specs=_LINE, check_vma=False
    )
    return jax.jit(shard_map)


def send(mesh: Mesh, channel: Channel, hop: Hop, messages: Pieces) -> Pieces:
    """Run one hop, and wait until its messages to this process have arrived.

    Args:
        mesh: the digits of all devices.
        channel: the connections.
        hop: one of its hops.
        messages: of this process's devices of the line; those that receive only give theirs for
            its shape.

    Returns:
        What devices of this process received.
    """
    line = submesh(mesh, channel)
    own = [i for i in channel.devices if i in messages]
    shape = (line.size * messages[own[0]].size,)
    stack = jax.make_array_from_single_device_arrays(
        shape, NamedSharding(line, _LINE), [messages[i] for i in own]
    )
    made = jax.block_until_ready(hop_program(mesh, channel, hop)(stack))
    receivers = {to for _, to in hop.pairs}
    return {i: made.addressable_data(k) for k, i in enumerate(own) if i in receivers}


@functools.cache  # evicted in one process alone, it would leave others waiting
def connect(mesh: Mesh, channel: Channel) -> None:
    """Connect the devices of a channel, at the first call, by messages of one byte.

    That holds a lock of the process until the others do the same: all must connect channels in one
    order, and send nothing meanwhile.
    """
    own = {i: jnp.zeros(1, jnp.int8, device=x) for i, x in channel.local(mesh).items()}
    for hop in channel.hops:
        send(mesh, channel, hop, own)
