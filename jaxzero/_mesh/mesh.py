"""Two-level meshes: `node` is the slow link between nodes, `local` the fast one inside."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from .._processes import hosts, process_count
from .gloo_workaround import uses_gloo, with_workaround
from .loop_order import in_order, in_turn
from .mesh_kinds import (
    LOCAL,
    NODE,
    STAGE,
    AnyMesh,
    NodeMesh,
    SimulatedMesh,
    is_one_node,
    without_node,
)
from .per_device import without_mesh
from .tokens import TOKENS, check_tokens_axis

AXES = (NODE, LOCAL)  # the batch is split in this order, so that a host's rows are contiguous
REDUCTION_HOPS = (LOCAL, NODE)  # so that only sums over a node cross between nodes

_microbatch: contextvars.ContextVar[Array | None] = contextvars.ContextVar(
    "jaxzero_microbatch", default=None
)


@overload
def make_mesh(
    nodes: int | None = None,
    *,
    devices: Sequence[Any] | None = None,
    axis_type: AxisType = AxisType.Auto,
    simulate: None = None,
    stages: int | None = None,
    tokens: int | None = None,
) -> Mesh: ...


@overload
def make_mesh(
    nodes: int | None = None,
    *,
    devices: Sequence[Any] | None = None,
    simulate: int,
    stages: int | None = None,
) -> SimulatedMesh: ...


def make_mesh(
    nodes: int | None = None,
    *,
    devices: Sequence[Any] | None = None,
    axis_type: AxisType = AxisType.Auto,
    simulate: int | None = None,
    stages: int | None = None,
    tokens: int | None = None,
) -> Mesh | SimulatedMesh:
    """Arrange devices as `(node, local)`.

    Args:
        nodes: number of nodes. By default each slice is a node if the devices belong to several
            slices (pods of TPUs, GPUs that share NVLink); otherwise each host is a node, with all
            its processes. All processes must then make this call, since they exchange host names.
            With a number, devices are ordered by `(process_index, id)`, and a node is a run of
            neighbours.
        devices: the devices to use; by default all of them.
        axis_type: `AxisType.Auto` or `AxisType.Explicit`, for `node` and `local`.
        simulate: make a mesh of this many simulated devices. Every array then lies whole on the
            first of `devices`, which does the arithmetic of every device, with the same
            collectives. Use it to study the effect of quantization or small batches on training;
            it shows nothing about memory or speed.
        stages: for a config with `jz.Stages`: divide the nodes into this many runs of neighbours,
            each of which runs one stage of a pipeline. By default each node is a stage then.
        tokens: split long rows over this many neighbouring devices of a node, along a third axis
            of type Auto. Rows are then split over `node` and `local`, the tokens of each row over
            `tokens` (`jz.split_tokens`, `jz.attention`), and parameters over all devices.

    Returns:
        A mesh of shape `(nodes, devices / nodes)` with axes `("node", "local")`; with `stages`, of
        shape `(stages, nodes / stages, devices / nodes)`, with `"stage"` before them; with `tokens`
        of shape `(nodes, devices / nodes / tokens, tokens)`, with `"tokens"` after them. A mesh
        made by `jax.make_mesh` can be used as well, if it has these two axes; further axes
        (tensor parallelism) are not touched. With `simulate` only `Zero` accepts the mesh;
        `zero.mesh` is then a mesh of the one device, for shardings.

    Raises:
        TypeError: `devices` is a number.
        ValueError: `nodes` does not divide the number of devices, `stages` does not divide the
            number of nodes, `tokens` does not divide the number of devices of a node, or hosts have
            different numbers of devices.
    """
    if isinstance(devices, numbers.Number):
        raise TypeError(
            "`devices` must be the devices to use, such as `jax.devices()[:4]`, and not their "
            f"number; got {devices!r}."
        )
    if simulate is not None:
        devices = jax.local_devices() if devices is None else devices
        if tokens is not None:
            raise ValueError(
                f"A simulated mesh has no axis `{TOKENS}`, which would change no number. Leave out "
                f"`tokens`; got {tokens}."
            )
        mesh = _simulated(1 if nodes is None else nodes, simulate, devices[0], axis_type)
        return mesh if stages is None else with_stages(mesh, stages)
    devices = list(jax.devices() if devices is None else devices)
    devices.sort(key=lambda device: (device.process_index, device.id))
    if nodes is None:
        groups = _by_node(devices)
        nodes, devices = len(groups), [device for group in groups for device in group]
    if nodes < 1 or len(devices) % nodes:
        raise ValueError(
            f"`nodes` must divide the number of devices, {len(devices)}; got {nodes}. "
            "Pass `devices=` to use fewer."
        )
    grid = np.array(devices).reshape(nodes, -1)
    if tokens is None:
        mesh = Mesh(grid, AXES, axis_types=(axis_type,) * 2)
    else:
        mesh = _with_tokens(grid, tokens, axis_type)
    return mesh if stages is None else with_stages(mesh, stages)


def _with_tokens(grid: np.ndarray, tokens: int, axis_type: AxisType) -> Mesh:
    """Make a mesh of a grid `[nodes, devices of a node]`, with the axis `tokens` in a node."""
    nodes, size = grid.shape
    if tokens < 1 or size % tokens:
        raise ValueError(
            f"`tokens` must divide the number of devices of a node, {size}; got {tokens}. The "
            "devices that share a row exchange keys and values in every layer, so they belong to "
            "one node; with `nodes=` a node may be larger."
        )
    types = (axis_type, axis_type, AxisType.Auto)
    return Mesh(grid.reshape(nodes, -1, tokens), (*AXES, TOKENS), axis_types=types)


def with_stages(mesh: Any, stages: int | None = None) -> Any:
    """Return a mesh with the axis `stage` before `node`; by default each node is a stage.

    A mesh that already has the axis is returned as it is.

    Raises:
        ValueError: `stages` does not divide the number of nodes.
    """
    if STAGE in mesh.shape:
        return mesh
    nodes = mesh.shape[NODE]
    num = nodes if stages is None else stages
    if num < 1 or nodes % num:
        raise ValueError(
            f"`stages` must divide the number of nodes, {nodes}; got {num}. Every stage of a "
            "pipeline has as many nodes."
        )
    at = mesh.axis_names.index(NODE)
    names = (*mesh.axis_names[:at], STAGE, *mesh.axis_names[at:])
    sizes = list(mesh.shape.values())
    sizes[at : at + 1] = num, nodes // num
    if isinstance(mesh, SimulatedMesh):
        return SimulatedMesh(names, tuple(sizes), mesh.device)
    # `stage` has the type of `node`, of which it is a part.
    types = (*mesh.axis_types[:at], mesh.axis_types[at], *mesh.axis_types[at:])
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=types)


def _by_node(devices: Sequence[Any]) -> list[list[Any]]:
    """Group devices by slice if they are of several slices, otherwise by host.

    Groups have the order of their first devices in `devices`.
    """
    slices = {getattr(device, "slice_index", None) for device in devices}
    groups: dict[str, list[Any]] = {}
    for device in devices:
        if len(slices) > 1:
            name = f"slice {device.slice_index}"
        elif process_count() > 1:
            name = hosts()[device.process_index]
        else:  # one process, or the devices of a topology description
            name = f"process {device.process_index}"
        groups.setdefault(name, []).append(device)
    if len({len(group) for group in groups.values()}) > 1:
        sizes = ", ".join(f"{len(group)} on {name}" for name, group in groups.items())
        raise ValueError(
            f"Nodes must have equally many devices; there are {sizes}. Pass `devices=` to use "
            "fewer of some, or `nodes=` to group them differently."
        )
    return list(groups.values())


def _simulated(nodes: int, num_devices: int, device: Any, axis_type: AxisType) -> SimulatedMesh:
    if nodes < 1 or num_devices < 1 or num_devices % nodes:
        raise ValueError(
            f"`nodes` must divide the number of simulated devices, {num_devices}; got {nodes}. "
            "Give `simulate` a multiple of it."
        )
    if axis_type != AxisType.Auto:
        raise ValueError("A simulated mesh has no explicit axes. Leave out `axis_type`.")
    return SimulatedMesh(AXES, (nodes, num_devices // nodes), device)


def map_devices(function: Callable, mesh: AnyMesh, in_specs: Any, out_specs: Any) -> Callable:
    """Wrap `function` to run on every device's shards of global arrays.

    This is `jax.shard_map`, or its simulation for a `SimulatedMesh`. For a `NodeMesh` it runs on
    the devices of one node.
    """
    devices = mesh.mesh if isinstance(mesh, NodeMesh) else mesh
    if isinstance(devices, SimulatedMesh):
        assert not isinstance(mesh, Mesh)
        return mesh.map(function, in_specs, out_specs)
    if uses_gloo(devices):
        function = with_workaround(function)
    # Only XLA for CPUs needs the tokens of `loop_order`.
    if devices.devices.flat[0].platform != "cpu":
        return _mapped(without_mesh(function), mesh, in_specs, out_specs)
    everywhere = PartitionSpec()  # of tokens
    program = without_mesh(function, in_order)
    run = _mapped(program, mesh, (everywhere, *in_specs), (everywhere, out_specs))
    return functools.partial(in_turn, run)


def _mapped(function: Callable, mesh: AnyMesh, in_specs: Any, out_specs: Any) -> Callable:
    if not isinstance(mesh, Mesh):
        return mesh.map(function, in_specs, out_specs)
    check_context(mesh)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={*AXES, STAGE} & {*mesh.axis_names},
        # With the check, a scan whose carry begins as a constant is a type error, and so code
        # written for one device would not run. Every value counts as different on each device.
        check_vma=False,
    )


def with_automatic_axes(function: Callable, out_shardings: Any, mesh: Mesh) -> Callable:
    """Wrap `function` to run with automatic axes, because explicit axes split dims only evenly."""
    context = mesh.abstract_mesh
    if is_one_node():
        context = jax.sharding.get_abstract_mesh()
        out_shardings = jax.tree.map(
            lambda x: NamedSharding(context, without_node(x.spec)), out_shardings
        )
    types = zip(context.axis_names, context.axis_types, strict=True)
    explicit = tuple(name for name, kind in types if kind == AxisType.Explicit)
    return jax.jit(jax.sharding.auto_axes(function, axes=explicit, out_sharding=out_shardings))


def check_context(mesh: Mesh) -> None:
    """Raise `ValueError` if `jax.set_mesh` has set another mesh than `mesh`."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and context != mesh.abstract_mesh:
        raise ValueError(
            f"This program runs on {_shown(mesh.abstract_mesh)}, and is called under "
            f"`jax.set_mesh` of {_shown(context)}. Call it outside of that, or set the mesh of "
            "`zero`: `with jax.set_mesh(zero.mesh)`."
        )


def _shown(mesh: AbstractMesh) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    kinds = ", ".join(dict.fromkeys(kind.name for kind in mesh.axis_types))
    return f"a mesh ({sizes}) with axes of type {kinds}"


def check_mesh(mesh: Any) -> None:
    """Check that `mesh` has the axes `node` and `local`.

    Raises:
        ValueError: `mesh` is no mesh, or lacks one of the two axes.
        NotImplementedError: `mesh` has an axis `tokens` that is not automatic.
    """
    if not isinstance(mesh, Mesh | SimulatedMesh | NodeMesh):
        raise ValueError(
            f"`mesh` must be a mesh of devices, such as `jz.make_mesh()`; got {mesh!r}."
        )
    missing = [axis for axis in AXES if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"`mesh` needs the axes {AXES}; {missing} missing from {tuple(mesh.shape)}. "
            "Make one with `jz.make_mesh(nodes=...)`, or name the axes of yours so."
        )
    check_tokens_axis(mesh)


@contextlib.contextmanager
def microbatch_index(index: Array | None) -> Iterator[None]:
    """Give `fold_in_device` the index of the micro-batch that is traced in this context."""
    token = _microbatch.set(index)
    try:
        yield
    finally:
        _microbatch.reset(token)


def current_microbatch() -> Array | None:
    """Return the index given by `microbatch_index`; None outside of its context."""
    return _microbatch.get()


def device_index(axes: tuple[str, ...] = AXES) -> Array:
    """Return this device's index over `axes`, uint32. Call it only inside a per-device program."""
    return lax.axis_index(axes).astype(jnp.uint32)


def fold_in_device(key: Shaped[Array, "*key"]) -> Shaped[Array, "*key"]:
    """Derive a key that is different on every device, and for every micro-batch.

    Call it inside a function given to `zero.value_and_grad` or `zero.apply`, on a key that is
    equal on all devices, before dropout and the like. Without it all devices drop the same
    positions.

    Args:
        key: a typed key (`jax.random.key`) or a raw one (`jax.random.PRNGKey`).

    Raises:
        ValueError: it is called outside of such a function.
    """
    try:
        index = lax.axis_index(AXES)
    except NameError as error:
        raise ValueError(
            "`fold_in_device` must be called inside a function given to "
            "`zero.value_and_grad` or `zero.apply`; there are no mesh axes "
            f"{AXES} here. Outside, use `jax.random.fold_in`."
        ) from error
    key = jax.random.fold_in(key, index)
    microbatch = _microbatch.get()
    return key if microbatch is None else jax.random.fold_in(key, microbatch)
