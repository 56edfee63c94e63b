"""Run windows of `RingMove`s so that the link is busy while devices cut and join arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._mesh import gloo_workaround
from .ring import RingMove, process_of, rows_of

Window = tuple[tuple[RingMove, ...], Sequence[jax.Array]]
_NO_MESH = AbstractMesh((), ())


def run_overlapped(mesh: Mesh, windows: Iterable[Window]) -> Iterator[list[jax.Array]]:
    """Move the arrays of windows; yield each window's stacks of shards, in order.

    JAX executes programs while Python goes on. A window is cut while the last one is on its way,
    and the one after it only when that has arrived: rows of two windows are held at a time.

    Args:
        mesh: the digits of the devices.
        windows: their moves, with the stored arrays.
    """
    under_way = None
    for moves, arrays in windows:
        rows = across(mesh, moves)(
            *(_each(mesh, move, "start", x) for move, x in zip(moves, arrays, strict=True))
        )
        if under_way is not None:
            yield jax.block_until_ready(_finished(mesh, *under_way))
        under_way = moves, rows
        del rows
    if under_way is not None:
        yield _finished(mesh, *under_way)


def _finished(
    mesh: Mesh, moves: tuple[RingMove, ...], rows: Sequence[jax.Array]
) -> list[jax.Array]:
    return [_each(mesh, move, "finish", x) for move, x in zip(moves, rows, strict=True)]


@functools.lru_cache(maxsize=512)
def across(mesh: Mesh, moves: tuple[RingMove, ...]) -> Callable[..., list[jax.Array]]:
    """The program over all devices that fills the rows of each move."""
    axes = [move.across.digits for move in moves]

    def on_device(*rows: jax.Array) -> list[jax.Array]:
        return [gloo_workaround.fill_rows(x, over) for x, over in zip(rows, axes, strict=True)]

    spec = PartitionSpec(mesh.axis_names)
    function = jax.shard_map(
        on_device, mesh=mesh, in_specs=spec, out_specs=[spec] * len(moves), check_vma=False
    )
    jitted = jax.jit(function, donate_argnums=tuple(range(len(moves))))

    def run(*rows: jax.Array) -> list[jax.Array]:
        # The user's own mesh, in whose context this may run, is not that of the program.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jitted(*rows)

    return run


@functools.lru_cache(maxsize=4096)
def on_one_device(
    mesh: Mesh, move: RingMove, part: str, device: int
) -> tuple[tuple[int, ...], Callable[..., jax.Array]]:
    """The program of a device for `start` or `finish`, and the devices whose arrays it takes."""
    takes = (move.sources if part == "start" else move.givers)(device, mesh)
    function = getattr(move, part)

    def on_device(*arrays: jax.Array) -> jax.Array:
        return function(dict(zip(takes, arrays, strict=True)), device, mesh)

    return takes, jax.jit(on_device)


def _each(mesh: Mesh, move: RingMove, part: str, x: jax.Array) -> jax.Array:
    """Run the programs of all devices of this process on the shards of `x`; a stack of results."""
    number_of = {device: number for number, device in enumerate(mesh.devices.flat)}
    shards = {number_of[shard.device]: shard.data for shard in x.addressable_shards}
    made = []
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        for number in sorted(shards):
            takes, program = on_one_device(mesh, move, part, number)
            device = mesh.devices.flat[number]
            made.append(program(*(_seen_by(device, shards[i]) for i in takes)))
    block = made[0].shape
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.size * block[0], *block[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, made)


def _seen_by(device: jax.Device, x: jax.Array) -> jax.Array:
    """The same memory as an array of another device of the process."""
    if x.devices() == {device}:
        return x
    return jax.device_put(np.asarray(x), device, may_alias=True)
