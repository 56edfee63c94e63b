"""Compile and run the moves of a window: one program over all devices.

Shards enter and leave a program stacked on dim 0, one for each device. So the program does not
depend on the meshes that users name, and arrays are viewed as such stacks without a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._mesh import gloo_workaround
from .counts import AnyMove
from .plan import ReshardPlan


@functools.lru_cache(maxsize=512)
def program(mesh: Mesh, moves: tuple[AnyMove, ...]) -> Callable[..., list[jax.Array]]:
    """The jitted program that moves arrays; it takes and returns stacks of shards.

    It is kept, so that moving a tree again compiles nothing.
    """
    specs = [_spec(move.block, mesh) for move in moves]

    def on_device(*blocks: jax.Array) -> list[jax.Array]:
        pairs = zip(moves, blocks, strict=True)
        return [move.run(x.reshape(move.block), mesh) for move, x in pairs]

    function = on_device
    if gloo_workaround.uses_gloo(mesh):
        function = gloo_workaround.with_workaround(function)
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=specs, check_vma=False)
    )


def _spec(block: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The spec of a stack; shards without dims are all equal, and not stacked."""
    return PartitionSpec(mesh.axis_names) if block else PartitionSpec()


def _stacked(block: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    return (mesh.size * block[0], *block[1:]) if block else ()


def lowered(plan: ReshardPlan) -> list[jax.stages.Lowered]:
    """The program of each window, to be compiled and not run."""
    mesh, found = plan.digits.mesh, []
    for moves in plan.programs:
        structs = [
            jax.ShapeDtypeStruct(
                _stacked(move.block, mesh),
                move.leaf.stored.dtype,
                sharding=NamedSharding(mesh, _spec(move.block, mesh)),
            )
            for move in moves
        ]
        found.append(program(mesh, moves).lower(*structs))  # pyright: ignore[reportFunctionMemberAccess]
    return found


def run(mesh: Mesh, moves: tuple[AnyMove, ...], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Run a program on arrays, whatever mesh they are on; returns stacks of shards."""
    stacks = [
        viewed(x, _stacked(move.block, mesh), NamedSharding(mesh, _spec(move.block, mesh)))
        for move, x in zip(moves, arrays, strict=True)
    ]
    # The user's own mesh, in whose context this may run, is not that of the program.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return program(mesh, moves)(*stacks)


def viewed(x: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """An array made of the shards of another, each on its device; copies nothing."""
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    assert isinstance(sharding.mesh, Mesh)
    ordered = [shards[device] for device in sharding.mesh.devices.flat if device in shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, ordered)
