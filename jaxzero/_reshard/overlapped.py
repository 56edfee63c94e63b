"""Run windows of `RingMove`s so that the link is busy while devices cut and join arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._mesh import gloo_workaround
from .parcels import Received, finish, givers, pack, parcels, senders, sources
from .ring import RingMove

Moves = tuple[RingMove, ...]
Shards = dict[int, jax.Array]  # of an array on the devices of this process, by number


def run_overlapped(
    mesh: Mesh, windows: Iterable[tuple[Moves, Sequence[jax.Array]]]
) -> Iterator[list[jax.Array]]:
    """Move the arrays of windows; yield each window's stacks of shards, in order.

    JAX executes programs while Python goes on. A window is cut while the last one is on its way,
    and the one after it only when that has arrived and is joined: two are held at a time.

    Args:
        mesh: the digits of the devices.
        windows: their moves, with the stored arrays.
    """
    under_way = None
    for moves, arrays in windows:
        stored = [_shards(mesh, x) for x in arrays]
        # The program alone holds what is sent, and frees it when it has been.
        received = _sent(mesh, moves, _started(mesh, moves, stored))
        if under_way is not None:
            yield jax.block_until_ready(_finished(mesh, *under_way))
        under_way = moves, stored, received
        del stored, received
    if under_way is not None:
        yield jax.block_until_ready(_finished(mesh, *under_way))


@functools.lru_cache(maxsize=512)
def start_program(mesh: Mesh, moves: Moves, device: int) -> Callable[..., Any]:
    """A device's program that cuts and packs what it sends."""

    def on_device(shards: list[Shards]) -> Any:
        return pack(mesh, moves, shards, device)

    return jax.jit(on_device)


@functools.lru_cache(maxsize=512)
def across(mesh: Mesh, moves: Moves) -> Callable[..., Any]:
    """The program over all devices that sends all messages of a window."""

    def on_device(sent: list[list[jax.Array]]) -> list[list[jax.Array]]:
        return [
            [
                gloo_workaround.permute(messages[each.slot], mesh.axis_names, each.pairs)
                for each in parcel.permutations
            ]
            for parcel, messages in zip(parcels(mesh, moves), sent, strict=True)
        ]

    spec = PartitionSpec(mesh.axis_names)
    function = gloo_workaround.with_workaround(on_device)
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False)
    )


@functools.lru_cache(maxsize=512)
def finish_program(mesh: Mesh, moves: Moves, device: int) -> Callable[..., list[jax.Array]]:
    """A device's program that makes its parts of the results."""

    def on_device(shards: list[Shards], received: Received) -> list[jax.Array]:
        return finish(mesh, moves, shards, received, device)

    return jax.jit(on_device)


def _started(mesh: Mesh, moves: Moves, stored: Sequence[Shards]) -> list[list[jax.Array]]:
    made = []
    for number in stored[0]:
        shards = [
            _seen_by(mesh, number, x, sources(mesh, move, senders(mesh, move, number)))
            for move, x in zip(moves, stored, strict=True)
        ]
        with _alone(mesh, number):
            made.append(start_program(mesh, moves, number)(shards))
    return jax.tree.map(lambda *shards: _stack(mesh, shards), *made)


def _sent(mesh: Mesh, moves: Moves, messages: list[list[jax.Array]]) -> list[list[jax.Array]]:
    # The user's own mesh, in whose context this may run, is not that of the program.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return across(mesh, moves)(messages)


def _finished(
    mesh: Mesh, moves: Moves, stored: Sequence[Shards], received: list[list[jax.Array]]
) -> list[jax.Array]:
    arrived = jax.tree.map(lambda x: _shards(mesh, x), received)
    made = []
    for number in stored[0]:
        shards = [
            _seen_by(mesh, number, x, sources(mesh, move, givers(mesh, move, number)))
            for move, x in zip(moves, stored, strict=True)
        ]
        messages = [
            [_seen_by(mesh, number, x, parcel.givers(mesh, moves, number)) for x in by_distance]
            for parcel, by_distance in zip(parcels(mesh, moves), arrived, strict=True)
        ]
        with _alone(mesh, number):
            made.append(finish_program(mesh, moves, number)(shards, messages))
    return [_stack(mesh, shards) for shards in zip(*made, strict=True)]


def _alone(mesh: Mesh, number: int) -> Any:
    """A context for a program of one device: that of the user's own mesh is for all devices."""
    device = np.array([mesh.devices.flat[number]])
    return jax.set_mesh(Mesh(device, ("one",), axis_types=(AxisType.Auto,)))


def _shards(mesh: Mesh, x: jax.Array) -> Shards:
    number_of = {device: number for number, device in enumerate(mesh.devices.flat)}
    shards = {number_of[shard.device]: shard.data for shard in x.addressable_shards}
    return dict(sorted(shards.items()))


def _stack(mesh: Mesh, shards: Sequence[jax.Array]) -> jax.Array:
    """An array made of one shard for each device of this process, in their order."""
    block = shards[0].shape
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.size * block[0], *block[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))


def _seen_by(mesh: Mesh, number: int, shards: Shards, of: tuple[int, ...]) -> Shards:
    """The same memory, of some devices of the process, as arrays of one of them."""
    device = mesh.devices.flat[number]
    return {
        i: shards[i]
        if i == number
        else jax.device_put(np.asarray(shards[i]), device, may_alias=True)
        for i in of
    }
