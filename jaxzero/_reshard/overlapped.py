"""Run windows of `RingMove`s so that the link is busy while devices cut and join arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._mesh import gloo_workaround
from .ring import RingMove, permutations

Window = tuple[tuple[RingMove, ...], Sequence[jax.Array]]
Shards = dict[int, jax.Array]  # of an array on the devices of this process, by number
_NO_MESH = AbstractMesh((), ())


def run_overlapped(mesh: Mesh, windows: Iterable[Window]) -> Iterator[list[jax.Array]]:
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
        sent = [_start(mesh, move, x) for move, x in zip(moves, stored, strict=True)]
        received = across(mesh, moves)(sent)
        del sent
        if under_way is not None:
            yield jax.block_until_ready(_finished(mesh, *under_way))
        under_way = moves, stored, received
        del stored, received
    if under_way is not None:
        yield _finished(mesh, *under_way)


@functools.lru_cache(maxsize=512)
def across(
    mesh: Mesh, moves: tuple[RingMove, ...]
) -> Callable[[list[list[jax.Array]]], list[list[jax.Array]]]:
    """The program over all devices that sends the rows of each move, one stack for each distance."""

    def on_device(sent: list[list[jax.Array]]) -> list[list[jax.Array]]:
        return [
            [
                gloo_workaround.permute(x, mesh.axis_names, each.pairs)
                for x, each in zip(rows, permutations(move.across, mesh), strict=True)
            ]
            for move, rows in zip(moves, sent, strict=True)
        ]

    spec = PartitionSpec(mesh.axis_names)
    function = jax.shard_map(
        gloo_workaround.with_workaround(on_device),
        mesh=mesh,
        in_specs=(spec,),
        out_specs=spec,
        check_vma=False,
    )
    jitted = jax.jit(function)

    def run(sent: list[list[jax.Array]]) -> list[list[jax.Array]]:
        # The user's own mesh, in whose context this may run, is not that of the program.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jitted(sent)

    return run


@functools.lru_cache(maxsize=4096)
def start_program(
    mesh: Mesh, move: RingMove, device: int
) -> tuple[tuple[int, ...], Callable[..., list[jax.Array]]]:
    """A device's program for `start`, and the devices whose shards it takes."""
    senders = tuple(each.rows[device] for each in permutations(move.across, mesh))
    takes = move.sources(senders, mesh)

    def on_device(shards: list[jax.Array]) -> list[jax.Array]:
        return move.start(dict(zip(takes, shards, strict=True)), senders, mesh)

    return takes, jax.jit(on_device)


@functools.lru_cache(maxsize=4096)
def finish_program(
    mesh: Mesh, move: RingMove, device: int
) -> tuple[tuple[int, ...], tuple[int, ...], Callable[..., jax.Array]]:
    """A device's program for `finish`, and whose shards and received rows it takes."""
    givers = move.givers(device, mesh)
    takes = move.sources(givers, mesh)

    def on_device(shards: list[jax.Array], received: list[list[jax.Array]]) -> jax.Array:
        own = dict(zip(takes, shards, strict=True))
        return move.finish(own, dict(zip(givers, received, strict=True)), device, mesh)

    return takes, givers, jax.jit(on_device)


def _start(mesh: Mesh, move: RingMove, shards: Shards) -> list[jax.Array]:
    made = []
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        for number in shards:
            takes, program = start_program(mesh, move, number)
            made.append(program([_seen_by(mesh, number, shards[i]) for i in takes]))
    return [_stack(mesh, x) for x in zip(*made, strict=True)]


def _finished(
    mesh: Mesh,
    moves: tuple[RingMove, ...],
    stored: Sequence[Shards],
    received: Sequence[Sequence[jax.Array]],
) -> list[jax.Array]:
    made = []
    for move, shards, stacks in zip(moves, stored, received, strict=True):
        rows = [_shards(mesh, x) for x in stacks]
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            made.append(_stack(mesh, [_finish(mesh, move, i, shards, rows) for i in shards]))
    return made


def _finish(
    mesh: Mesh, move: RingMove, number: int, shards: Shards, rows: Sequence[Shards]
) -> jax.Array:
    takes, givers, program = finish_program(mesh, move, number)
    own = [_seen_by(mesh, number, shards[i]) for i in takes]
    return program(own, [[_seen_by(mesh, number, x[i]) for x in rows] for i in givers])


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


def _seen_by(mesh: Mesh, number: int, x: jax.Array) -> jax.Array:
    """The same memory as an array of another device of the process."""
    device = mesh.devices.flat[number]
    if x.devices() == {device}:
        return x
    return jax.device_put(np.asarray(x), device, may_alias=True)
