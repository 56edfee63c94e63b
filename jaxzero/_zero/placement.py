"""Convert arrays of true shapes to their stored form (padded or encoded, and sharded), and back."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from .._collectives import from_stored, to_stored
from .._mesh import (
    axes_of_dims,
    check_context,
    is_one_node,
    is_traced,
    map_specs,
    memory_kind_of,
    to_device,
    to_host,
    without_node,
)
from .._sharding import LeafSpec, StoredArray, TreeLayout
from .host_memory import in_parts
from .programs import Programs
from .transfers import InTransfer, Placed, Transfers, copy_slices, finished


def auto_mesh(mesh: Mesh) -> Mesh:
    """Return `mesh` with all axes of type `Auto`, for programs that the compiler partitions."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def run_automatic(function: Any, out_shardings: Any, programs: Programs, *args: Any) -> Any:
    """Run a function under `jit` with automatic axes; return outputs sharded on the original mesh.

    Args:
        function: a function of trees of arrays.
        out_shardings: shardings of its outputs, over `auto_mesh(mesh)`.
        programs: the cache of compiled programs, with the mesh to run on. Arguments that are
            sharded on this mesh are passed without a copy.
        args: arguments of `function`.
    """
    mesh = programs.mesh
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        check_context(mesh)  # arrays that were made under it name its axes in their types
    auto = auto_mesh(mesh)
    args = jax.tree.map(lambda x: on_mesh(x, auto) if _is_on(x, mesh) else x, args)
    with jax.sharding.use_abstract_mesh(auto.abstract_mesh):
        outputs = programs.run(function, *args, out_shardings=out_shardings)
    if any(map(is_traced, jax.tree.leaves(outputs))):
        if AxisType.Explicit in mesh.axis_types:
            raise ValueError(
                "Arrays cannot be laid out inside `jax.jit` on a mesh with explicit axes. Make "
                "them outside of it: this runs a compiled program of its own."
            )
        return outputs
    return jax.tree.map(lambda x: on_mesh(x, mesh), outputs)


def stored_struct(leaf: LeafSpec, mesh: Mesh, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding of a leaf's stored array.

    The devices of a topology (an ahead-of-time target) have no memories, so JAX drops the memory
    kind of a sharding on their mesh. If the array is in host memory, its sharding is then on the
    abstract mesh, which keeps the memory kind.
    """
    sharding = leaf.sharding(mesh, axes)
    if sharding.memory_kind != leaf.memory_kind and leaf.memory_kind is not None:
        sharding = NamedSharding(mesh.abstract_mesh, sharding.spec, memory_kind=leaf.memory_kind)
    return jax.ShapeDtypeStruct(leaf.stored.shape, leaf.stored.dtype, sharding=sharding)


def make_leaves(
    function: Callable[..., list[Any]],
    leaves: Sequence[LeafSpec],
    programs: Programs,
    axes: tuple[str, ...],
    *args: Any,
) -> list[jax.Array]:
    """Run a function that makes one array for each leaf, with each device making its own shards.

    Offloaded leaves are made by further programs, a few leaves at a time, so that they need not fit
    into device memory together.

    Args:
        function: returns a stored array for each leaf; it runs once for each program.
        leaves: the layouts.
        programs: the cache of compiled programs, of the mesh that the arrays are sharded on.
        axes: the mesh axes that split the arrays.
        args: arguments of `function`.
    """
    mesh = programs.mesh
    by_index: dict[int, jax.Array] = {}
    for group in in_parts(leaves, mesh, axes):
        shardings = [leaves[i].sharding(auto_mesh(mesh), axes) for i in group]

        def part(*args: Any, group: list[int] = group) -> list[Any]:
            arrays = function(*args)
            return [arrays[i] for i in group]

        by_index |= zip(group, run_automatic(part, shardings, programs, *args), strict=True)
    return [by_index[i] for i in range(len(leaves))]


def _is_on(x: Any, mesh: Mesh) -> bool:
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def on_mesh(x: jax.Array, mesh: Mesh) -> jax.Array:
    """View `x` as sharded over `mesh`, without a copy. `x` must be on the same devices already."""
    assert isinstance(x.sharding, NamedSharding)
    memory_kind = memory_kind_of(x)
    sharding = NamedSharding(mesh, x.sharding.spec, memory_kind=memory_kind)
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


def pad_leaf(leaf: LeafSpec, x: Any) -> Any:
    """Convert an array of true shape to its stored form: padded; with a codec, also encoded."""
    return leaf.pad(x) if leaf.codec is None else to_stored(leaf.pad(x), leaf)


def unpad_leaf(leaf: LeafSpec, x: Any) -> Any:
    """Convert an array in stored form to its true shape; the reverse of `pad_leaf`."""
    full = x if leaf.codec is None else from_stored(x, leaf).join()
    return leaf.unpad(full)


def place(
    leaf: LeafSpec, source: Any, programs: Programs, axes: tuple[str, ...], transfers: Transfers
) -> Placed:
    """Shard one array over the mesh of `programs`, in stored form.

    Args:
        leaf: the layout to shard by.
        source: the full array of true shape; or an object with `shape`, `dtype` and `__getitem__`
            for a tuple of slices, such as a tensor in a file. Only the slices that this process's
            devices own are read. The object may have three more members. Slices from a method
            `borrow` may share memory with a file, and are copied before `transfers` ends. If
            `is_in_file` is true, all of `source` is borrowed once for all devices, so that each
            page of the file is mapped once. A method `astype` casts the object if its dtype is not
            that of the leaf.
        programs: the cache of compiled programs.
        axes: the mesh axes that split the array.
        transfers: the threads that copy to devices.
    """
    mesh = programs.mesh
    if leaf.codec is not None:
        plain = dataclasses.replace(leaf, codec=None)
        padded = finished(place(plain, source, programs, axes, transfers))
        sharding = leaf.sharding(auto_mesh(mesh), axes)
        return run_automatic(lambda x: to_stored(to_device(x), leaf), sharding, programs, padded)
    sharding = leaf.sharding(mesh, axes)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jax.device_put(source, sharding)
    if isinstance(source, jax.Array) and leaf.is_plain and _is_on(source, mesh):
        return _alone(jax.device_put(source, sharding))  # copied between devices, if at all
    if isinstance(source, jax.Array) and not source.is_fully_addressable:
        source = _without_explicit_axes(source)
        return _alone(
            programs.run(lambda x: pad_leaf(leaf, to_device(x)), source, out_shardings=sharding)
        )
    source = _without_explicit_axes(source)
    if hasattr(source, "borrow") and hasattr(source, "astype") and source.dtype != leaf.dtype:
        # A 64-bit tensor in a file, while JAX has 32 bits: a cast that refuses what does not fit.
        source = source.astype(leaf.dtype)
    # Arrays of 64-bit types are moved by the calling thread only: see `Transfers.put`.
    is_in_file = getattr(source, "is_in_file", False)
    if is_in_file and source.dtype == leaf.dtype and leaf.dtype.itemsize <= 4:
        return _place_map(leaf, source, sharding, transfers)
    return _place_slices(leaf, source, sharding, transfers)


def _without_explicit_axes(x: Any) -> Any:
    """View `x` with automatic axes, so that it can be sliced as if it were on one device."""
    sharding = getattr(x, "sharding", None) if isinstance(x, jax.Array) else None
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        assert isinstance(sharding.mesh, Mesh)
        return on_mesh(x, auto_mesh(sharding.mesh))
    return x


def _alone(x: jax.Array) -> jax.Array:
    """Return `x`. If other processes hold shards of `x`, wait first until `x` is computed.

    The program that computes such an array has collectives, and two programs with collectives in
    flight at once may deadlock on CPUs (JAX 0.10).
    """
    return x if x.is_fully_addressable else x.block_until_ready()


def _place_slices(
    leaf: LeafSpec, source: Any, sharding: NamedSharding, transfers: Transfers
) -> InTransfer:
    # Slice by slice. `jax.make_array_from_callback` reads the slices of all devices before it
    # transfers the first, so host memory would hold a stack of layers twice.
    get = getattr(source, "borrow", source.__getitem__)
    parts = []
    for index, targets in _targets(leaf, sharding):
        transfers.make_room()
        parts.append(transfers.put(_padded_slice(leaf, get, index), targets))
    return InTransfer(leaf.stored_shape, sharding, parts)


def _place_map(
    leaf: LeafSpec, source: Any, sharding: NamedSharding, transfers: Transfers
) -> concurrent.futures.Future[jax.Array]:
    # All slices from one map. Columns of a matrix are on all of its pages, and a map for each
    # device takes page faults for each; that took longer than transposing them.
    def move() -> jax.Array:
        whole = transfers.spread_rows(source.borrow((slice(None),) * len(leaf.shape)))
        get = functools.partial(_padded_slice, leaf, whole.__getitem__)
        return copy_slices(leaf.stored_shape, sharding, get)

    return transfers.run(move)


def _targets(
    leaf: LeafSpec, sharding: NamedSharding
) -> Iterator[tuple[tuple[slice, ...], list[SingleDeviceSharding]]]:
    """Yield each different slice that this process needs, and the device memories to put it in."""
    targets: dict[tuple[tuple[int | None, int | None], ...], list[SingleDeviceSharding]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.stored_shape).items():
        assert index is not None
        target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        targets.setdefault(tuple((s.start, s.stop) for s in index), []).append(target)
    for bounds, equal in targets.items():
        yield tuple(slice(*bound) for bound in bounds), equal


def _padded_slice(
    leaf: LeafSpec, get: Callable[[tuple[slice, ...]], Any], index: tuple[slice, ...]
) -> np.ndarray:
    """Return the slice `index` of the padded array. `get` returns slices of the true array."""
    bounds = [s.indices(n) for s, n in zip(index, leaf.stored_shape, strict=True)]
    inside = tuple(
        slice(min(start, n), min(stop, n))
        for (start, stop, _), n in zip(bounds, leaf.shape, strict=True)
    )
    data = np.asarray(get(inside), dtype=leaf.dtype)
    widths = [(0, stop - start - n) for (start, stop, _), n in zip(bounds, data.shape, strict=True)]
    return np.pad(data, widths) if any(after for _, after in widths) else data


def place_tree(
    layout: TreeLayout, leaves: list[Any], programs: Programs, axes: tuple[str, ...]
) -> list[Any]:
    """Shard the arrays of a tree over `axes`; traced arrays by constraints in the program.

    Args:
        layout: layouts of the tree.
        leaves: the full arrays of the tree; a `StoredArray` is padded or encoded already.
        programs: the cache of compiled programs, of the mesh to shard them on.
        axes: the mesh axes that shard them.

    Returns:
        The arrays in stored form.
    """
    placed = []
    with Transfers() as transfers:
        for leaf, array in zip(layout.leaves, leaves, strict=True):
            if isinstance(array, StoredArray) or is_traced(array):
                stored = array.data if isinstance(array, StoredArray) else pad_leaf(leaf, array)
                stored = constrain(stored, programs.mesh, leaf.spec(axes))
                placed.append(stored if leaf.memory_kind is None else to_host(stored))
            else:
                placed.append(place(leaf, array, programs, axes, transfers))
        return [finished(x) for x in placed]


def gather_full(layout: TreeLayout, leaves: list[Any], programs: Programs) -> list[Any]:
    """Gather every leaf, in full and in its true shape, on every device."""
    float0 = jax.dtypes.float0  # the gradient of an integer: nothing to gather
    arrays = [i for i, x in enumerate(leaves) if x.dtype != float0]
    given = [leaves[i] for i in arrays]

    def unpadded(leaves: list[Any]) -> list[Any]:
        pairs = zip(arrays, leaves, strict=True)
        return [unpad_leaf(layout.leaves[i], to_device(x)) for i, x in pairs]

    if any(is_traced(x) for x in given):
        full = unpadded([constrain(x, programs.mesh, PartitionSpec()) for x in given])
    else:
        replicated = NamedSharding(auto_mesh(programs.mesh), PartitionSpec())
        full = run_automatic(unpadded, replicated, programs, given)
    by_number = dict(zip(arrays, full, strict=True))
    return [
        by_number[i] if i in by_number else np.zeros(leaf.shape, float0)
        for i, leaf in enumerate(layout.leaves)
    ]


def constrain(x: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> Any:
    """Shard `x` by `spec`, in the memory that it is in. A traced array is sharded by a constraint.

    If the mesh has explicit axes, a traced array is resharded over these axes only, since its type
    cannot name other axes; the compiler chooses its layout over the rest. In a program of one node,
    `x` is split over the devices of that node.
    """
    if is_one_node():
        spec = without_node(spec)
        context = jax.sharding.get_abstract_mesh()
        mesh = mesh if context.empty else context  # empty: devices are simulated
    memory_kind = memory_kind_of(x)
    if not is_traced(x):
        return jax.device_put(x, NamedSharding(mesh, spec, memory_kind=memory_kind))
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit not in types.values():
        sharding = NamedSharding(mesh, spec, memory_kind=memory_kind)
        return jax.lax.with_sharding_constraint(x, sharding)
    explicit = [
        tuple(name for name in names if types[name] == AxisType.Explicit) or None
        for names in axes_of_dims(spec)
    ]
    sharding = NamedSharding(mesh, PartitionSpec(*explicit), memory_kind=memory_kind)
    return jax.sharding.reshard(x, sharding)


def constrain_tree(tree: Any, mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """Shard each array of a tree by `constrain`. `specs` is a tree prefix of `PartitionSpec`s."""
    return map_specs(lambda x, spec: constrain(x, mesh, spec), specs, tree)
