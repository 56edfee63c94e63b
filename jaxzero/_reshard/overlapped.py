"""Run windows of `RingMove`s so that the link is busy while devices cut and join arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .parcels import Moves, Received, finish, givers, pack, parcels, sources
from .threads import Threads

Shards = dict[int, jax.Array]  # of an array on the devices of this process, by number


def run_overlapped(
    mesh: Mesh, windows: Sequence[Moves], arrays: Iterable[Sequence[jax.Array]]
) -> Iterator[list[jax.Array]]:
    """Move the arrays of windows; yield each window's stacks of shards, in order.

    Threads send while this one cuts and joins. A window is cut while the last one is on its way,
    and the one after it only when that has arrived and is joined: two are held at a time.

    Args:
        mesh: the digits of the devices.
        windows: the moves of each.
        arrays: the stored arrays of each.
    """
    if not windows:
        return
    # Programs of the user may run on the same connections: they come first.
    earlier, under_way = _barrier(mesh), None
    with Threads(mesh) as threads:
        for moves, stored in zip(windows, arrays, strict=True):
            shards = [_shards(mesh, x) for x in stored]
            messages = _started(mesh, moves, shards)
            if under_way is None:
                jax.block_until_ready(earlier)
                threads.connect(windows)
            # The threads alone hold what is sent, and free it when it has been.
            received = threads.send(moves, messages)
            del messages
            if under_way is not None:
                yield jax.block_until_ready(_finished(mesh, *under_way))
            under_way = moves, shards, received
            del stored, shards, received
        assert under_way is not None
        yield jax.block_until_ready(_finished(mesh, *under_way))


@functools.lru_cache(maxsize=512)
def start_program(mesh: Mesh, moves: Moves, device: int) -> Callable[..., Any]:
    """A device's program that cuts and packs what it sends."""

    def on_device(shards: list[Shards]) -> Any:
        return pack(mesh, moves, shards, device)

    return jax.jit(on_device)


@functools.lru_cache(maxsize=512)
def finish_program(mesh: Mesh, moves: Moves, device: int) -> Callable[..., list[jax.Array]]:
    """A device's program that makes its parts of the results."""

    def on_device(shards: list[Shards], received: Received) -> list[jax.Array]:
        return finish(mesh, moves, shards, received, device)

    return jax.jit(on_device)


def _started(mesh: Mesh, moves: Moves, stored: Sequence[Shards]) -> list[Shards]:
    """The messages of each parcel."""
    made = {}
    for number in stored[0]:
        shards = [
            _seen_by(mesh, number, x, sources(mesh, move, (number,)))
            for move, x in zip(moves, stored, strict=True)
        ]
        with _alone(mesh, number):
            made[number] = start_program(mesh, moves, number)(shards)
    return [
        {number: messages[i] for number, messages in made.items()}
        for i in range(len(parcels(mesh, moves)))
    ]


def _finished(
    mesh: Mesh, moves: Moves, stored: Sequence[Shards], received: Callable[[], Received]
) -> list[jax.Array]:
    made, arrived = [], received()
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


@functools.lru_cache(maxsize=16)
def _barrier_program(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, mesh.axis_names),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )


def _barrier(mesh: Mesh) -> jax.Array:
    """An array that is ready when this process has executed all that was dispatched before."""
    ones = [
        jax.device_put(np.ones(1, np.int32), x)
        for x in mesh.devices.flat
        if x.process_index == jax.process_index()
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return _barrier_program(mesh)(_stack(mesh, ones))


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
