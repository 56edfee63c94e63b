"""`reshard`: turn the shards that `Zero` holds into ordinary arrays of any sharding.

One program moves all arrays of a window, on all devices. Its arguments and results are stacks of
the devices' shards on dim 0. An array of any sharding can be viewed as such a stack without a copy,
so the program does not depend on the meshes that users name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._codecs import Codec
from .._mesh import gloo_workaround, is_traced
from .._sharding import (
    LeafSpec,
    TreeLayout,
    arrays_of,
    axes_of,
    check_codec,
    rebuild,
    spread_prefix,
)
from .._zero import Zero
from .move import Move
from .report import ReshardReport, make_report
from .resharding import (
    Options,
    Resharding,
    make_resharding,
    sent_dtype,
    spec_without_padding,
    uneven_dims,
)

_WINDOW_BYTES = 2**26  # takes far longer to send than to launch; little beside a device's memory


def reshard(
    params: Any,
    zero: Zero,
    *,
    specs: Any,
    mesh: Mesh | None = None,
    dtype: Any = None,
    codec: Codec | None = None,
    window_bytes: int = _WINDOW_BYTES,
) -> Any:
    """Move a tree from the shards of `Zero` to any other sharding, such as tensor parallelism.

    Use it to sample from a model between training steps, or to hand its parameters to a program
    that is partitioned by the compiler. Between meshes of the same devices, explicit collectives
    move the arrays, and each byte enters a node once, however many of its devices need it. For
    tensor parallelism inside a node, an all-to-all over `local` is followed by an all-gather over
    `node` of each device's part. `reshard_report` tells the bytes beforehand. Arrays are moved in
    windows: a device holds its part of the result, and at most about one array more.

    If the new split does not fit the old one (a padded dim is split again, or devices are in a
    shuffled order), all devices gather all rows, a window at a time, and keep the rows of their
    part. `jax.device_put` moves arrays to a mesh of other devices.

    Args:
        params: parameters, gradients or optimizer state of `zero`, or a part of one of these trees:
            concrete arrays, in device or host memory. They are not changed.
        zero: the `Zero` that laid out `params`.
        specs: a tree prefix of `PartitionSpec`s over the axes of `mesh`; `PartitionSpec()` gives
            every device the full array. For the models of `jaxzero.models`:
            `models.tensor_parallel_specs`.
        mesh: the mesh of the result; by default `zero.mesh`.
        dtype: cast floats to this type before they are sent.
        codec: encodes floats of at least `config.min_quantized_size` elements before they are sent;
            they are decoded where they arrive. Every device then has decoded numbers, even of its
            own shard.
        window_bytes: smaller arrays are moved together, up to so many bytes at a time.

    Returns:
        The tree with `jax.Array`s in their true shapes, of sharding `NamedSharding(mesh, spec)` in
        device memory. They are always copies.

    Raises:
        ValueError: `params` are traced, without an array, or not of this `zero`; `specs` is not a
            tree prefix of `params`, names an axis that `mesh` lacks, or does not divide a dim;
            `dtype` is not a float type.
        NotImplementedError: `mesh` has other devices than `zero.mesh`, and JAX cannot copy between
            them: CPUs of several processes.

    Example:
        >>> specs = models.tensor_parallel_specs(graph, params, size=zero.mesh.shape["local"])
        >>> served = jz.reshard(params, zero, specs=specs, dtype=jnp.bfloat16)

    References:
        https://arxiv.org/abs/2112.01075, redistribution by portable collectives.
    """
    arrays = arrays_of(params)
    if any(is_traced(x) for x in arrays):
        raise ValueError(
            "`params` must be arrays with values; got traced ones. Call `reshard` outside of "
            "`jax.jit`: it runs programs of its own, one for each window."
        )
    tree, resharding, options = planned(params, zero, specs, mesh, dtype, codec, window_bytes)
    results = _moved(resharding, arrays)
    for i, move in enumerate(resharding.moves):
        if move is None:
            results[i] = _put(
                arrays[i],
                resharding.leaves[i],
                resharding.sources[i],
                resharding.targets[i],
                options,
            )
    return tree.whole([results[i] for i in range(len(arrays))])


def _moved(resharding: Resharding, arrays: Sequence[Any]) -> dict[int, jax.Array]:
    """Run the moves of a resharding; return the new arrays, by index of the array."""
    by_index, mesh = {}, resharding.digits.mesh
    for window, moves in zip(resharding.windows, resharding.programs, strict=True):
        stacks = [
            _viewed(_in_place(arrays[i], resharding.sources[i]), *_stack(move, mesh))
            for i, move in zip(window, moves, strict=True)
        ]
        # The user may have set another mesh, with which the program would be refused.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            results = _program(mesh, moves)(*stacks)
        for i, x in zip(window, results, strict=True):
            by_index[i] = _viewed(x, resharding.leaves[i].shape, resharding.targets[i])
    return by_index


def reshard_report(
    params: Any,
    zero: Zero,
    *,
    specs: Any,
    mesh: Mesh | None = None,
    dtype: Any = None,
    codec: Codec | None = None,
    window_bytes: int = _WINDOW_BYTES,
) -> ReshardReport:
    """Count the bytes that `reshard` with these arguments would send and hold, without running it.

    Nothing is compiled either.

    Args:
        params: as for `reshard`; or structs from `zero.abstract`, also of absent devices.
        zero: as for `reshard`.
        specs: as for `reshard`.
        mesh: as for `reshard`.
        dtype: as for `reshard`.
        codec: as for `reshard`.
        window_bytes: as for `reshard`.

    Returns:
        A report to `print`, with the bytes between nodes and into devices, the least bytes that any
        method needs for each of them, and the peak of a device's memory.

    Raises:
        ValueError, NotImplementedError: as `reshard`.
    """
    return make_report(planned(params, zero, specs, mesh, dtype, codec, window_bytes)[1])


def planned(
    params: Any,
    zero: Zero,
    specs: Any,
    mesh: Mesh | None = None,
    dtype: Any = None,
    codec: Codec | None = None,
    window_bytes: int = _WINDOW_BYTES,
) -> tuple[TreeLayout, Resharding, Options]:
    """Check the arguments of `reshard`, and plan it; run nothing.

    Returns:
        The layout of the tree, the moves of its arrays, and the options by which they are sent.
    """
    check_options(zero, mesh, dtype, codec, window_bytes)
    mesh = zero.mesh if mesh is None else mesh
    _check_devices(set(zero.mesh.devices.flat), set(mesh.devices.flat))
    tree, shardings = zero.stored_layout(params)
    if not tree.leaves:
        raise ValueError("`params` must hold an array; got a tree without any.")
    of_leaves = _spread(specs, tree)
    for leaf, spec in zip(tree.leaves, of_leaves, strict=True):
        _check_spec(leaf, spec, mesh)
    sources = tuple(NamedSharding(zero.mesh, x.spec) for x in shardings)
    targets = tuple(NamedSharding(mesh, spec) for spec in of_leaves)
    options = Options(dtype, codec, zero.config.min_quantized_size, window_bytes)
    return tree, make_resharding(tree.leaves, sources, targets, options), options


def check_options(zero: Any, mesh: Any, dtype: Any, codec: Any, window_bytes: Any) -> None:
    """Raise `ValueError` if an option of `reshard` has the wrong type or value."""
    if not isinstance(zero, Zero):
        raise ValueError(f"`zero` must be the `jz.Zero` that made `params`; got {zero!r}.")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"`mesh` must be a `jax.sharding.Mesh` or None; got {mesh!r}.")
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`dtype` must be a float type, such as `jnp.bfloat16`; got {dtype!r}.")
    if codec is not None:
        check_codec("codec", "reshard", codec)
    if not isinstance(window_bytes, int) or window_bytes < 1:
        raise ValueError(f"`window_bytes` must be a positive integer; got {window_bytes!r}.")


def _check_devices(before: Set[Any], after: Set[Any]) -> None:
    """Raise `NotImplementedError` if `jax.device_put` cannot copy from `before` to `after`."""
    processes = {device.process_index for device in before | after}
    on_cpus = {device.platform for device in before | after} == {"cpu"}
    if before == after or len(processes) == 1 or not on_cpus:
        return
    raise NotImplementedError(
        f"`mesh` has the devices {sorted(x.id for x in after)} and `zero.mesh` "
        f"{sorted(x.id for x in before)}, CPUs of {len(processes)} processes: JAX cannot "
        "copy arrays between different sets of them. Give a mesh of all devices of `zero.mesh`, or "
        "save the parameters with `jz.Checkpoints` and restore them in the other processes."
    )


def _spread(specs: Any, tree: TreeLayout) -> list[PartitionSpec]:
    """Return the spec of each array of a tree, from a tree prefix of specs."""
    numbers = rebuild(tree.treedef, [None] * len(tree.statics), list(range(len(tree.statics))))
    try:
        spread = spread_prefix(specs, numbers, PartitionSpec)
    except ValueError as error:
        raise ValueError(
            f"`specs` must be a tree prefix of `params`, with a `PartitionSpec` for each array or "
            f"for each sub-tree. {error}"
        ) from error
    wrong = next((x for x in spread if not isinstance(x, PartitionSpec)), None)
    if wrong is not None:
        raise ValueError(
            f"`specs` must hold `PartitionSpec`s only; got {wrong!r}. `PartitionSpec()` leaves an "
            "array whole."
        )
    return [x for x, s in zip(spread, tree.statics, strict=True) if s is None]


def _check_spec(leaf: LeafSpec, spec: PartitionSpec, mesh: Mesh) -> None:
    """Raise `ValueError` unless a spec splits the leaf evenly over axes of the mesh."""
    where = f"`specs` gives {spec} to `{leaf.path}` of shape {leaf.shape}"
    unknown = [axis for axis in axes_of(spec) if axis not in mesh.shape]
    if unknown:
        raise ValueError(
            f"{where}, and `mesh` has no axis {unknown[0]!r}, only {tuple(mesh.shape)}. Name one "
            "of these, or pass another `mesh`."
        )
    if len(set(axes_of(spec))) < len(axes_of(spec)):
        raise ValueError(
            f"{where}, which names an axis twice. An axis can split one dim only: "
            "leave it out of the others."
        )
    if len(spec) > len(leaf.shape):
        raise ValueError(
            f"{where}, which has {len(spec)} entries for {len(leaf.shape)} dims. "
            "Give one entry for each dim at most."
        )
    for dim, parts in uneven_dims(leaf.shape, spec, mesh):
        raise ValueError(
            f"{where}: its dim {dim} of size {leaf.shape[dim]} does not divide into {parts} "
            "equal parts. Split another dim, use fewer devices, or leave it whole."
        )


def _in_place(x: Any, source: NamedSharding) -> jax.Array:
    """Return a stored array in the sharding `source`, in device memory; copy it only if needed."""
    now = getattr(x, "sharding", None)
    is_there = (
        now is not None
        and now.memory_kind == source.memory_kind
        and now.is_equivalent_to(source, x.ndim)
    )
    return x if is_there else jax.device_put(x, source)


def _put(
    x: Any, leaf: LeafSpec, source: NamedSharding, target: NamedSharding, options: Options
) -> jax.Array:
    """Move an array that has no `Move`, by `jax.device_put`.

    Such an array goes to other devices, holds random keys, or has no elements.

    Args:
        x: the stored array.
        leaf: the layout of the stored array.
        source: the sharding of the stored array, in device memory.
        target: the sharding of the result.
        options: how the array is sent.
    """
    if not math.prod(leaf.shape):
        return jax.device_put(jnp.zeros(leaf.shape, sent_dtype(leaf, options.dtype)), target)
    x = _in_place(x, source)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jax.device_put(x, target)
    # `jax.device_put` does not know of padding and messages: they are removed before it.
    own = NamedSharding(source.mesh, spec_without_padding(leaf, source))
    resharding = make_resharding(
        (leaf,), (source,), (own,), dataclasses.replace(options, codec=None)
    )
    return jax.device_put(_moved(resharding, [x])[0], target)


@functools.lru_cache(maxsize=512)
def _program(mesh: Mesh, moves: tuple[Move, ...]) -> Callable[..., list[jax.Array]]:
    """Return the jitted program of some moves, which takes and returns stacks of shards.

    The program is cached, so that moving a tree again compiles nothing.
    """
    specs = [_stack(move, mesh)[1].spec for move in moves]

    def on_device(*blocks: jax.Array) -> list[jax.Array]:
        pairs = zip(moves, blocks, strict=True)
        return [move.run(x.reshape(move.block), mesh) for move, x in pairs]

    function = on_device
    if gloo_workaround.uses_gloo(mesh):
        function = gloo_workaround.with_workaround(function)
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=specs, check_vma=False)
    )


def _stack(move: Move, mesh: Mesh) -> tuple[tuple[int, ...], NamedSharding]:
    """Return the shape and sharding of the stack of the shards that a move starts from.

    Shards without dims are equal on all devices, and are not stacked.
    """
    if not move.block:
        return (), NamedSharding(mesh, PartitionSpec())
    shape = (mesh.size * move.block[0], *move.block[1:])
    return shape, NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def lowered(resharding: Resharding) -> list[jax.stages.Lowered]:
    """Lower the program of each window, to compile it and not to run it."""
    mesh, programs = resharding.digits.mesh, []
    for moves in resharding.programs:
        stacks = [_stack(move, mesh) for move in moves]
        structs = [
            jax.ShapeDtypeStruct(shape, move.leaf.stored.dtype, sharding=sharding)
            for move, (shape, sharding) in zip(moves, stacks, strict=True)
        ]
        programs.append(_program(mesh, moves).lower(*structs))  # pyright: ignore[reportFunctionMemberAccess]
    return programs


def _viewed(x: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """View the shards of an array, each on its device, as an array of another shape and sharding.

    Nothing is copied.
    """
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    assert isinstance(sharding.mesh, Mesh)
    ordered = [shards[device] for device in sharding.mesh.devices.flat if device in shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, ordered)
