"""Two kinds of meshes beside JAX's own: `SimulatedMesh` and `NodeMesh`.

A `SimulatedMesh` stands for many devices on one real device. The function that `shard_map` would
run on every device runs under one `vmap` for each mesh axis instead, with the same axis names, so
that collectives have the same meaning. A global array is an ordinary array on one device. This
reproduces the arithmetic of many devices (rounding of codecs, noise of small batches), but not
their memory or speed. A few collectives are wrong under `vmap` (JAX 0.10 to 0.12): `all_gather`,
`psum_scatter` and `ppermute` over several axes at once, and `all_to_all` of a value that is equal
on all devices. The replacements in this module run over one axis after the other.

A `NodeMesh` stands for the devices of one node. `map_nodes` runs a function on each node's part of
global arrays: `node` is bound, and only explicit exchanges cross it. Inside, arrays are global over
the devices of one node, as under `jit`, and a `NodeMesh` takes the place of the mesh: a program for
it runs on `local` only, so that nothing in it crosses between nodes.
"""

from __future__ import annotations

import contextvars
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from .per_device import equations_inside

# The axes of the simulated mesh whose program is being traced.
_axis_names: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "jaxzero_simulated_axes", default=()
)
STAGE = "stage"
NODE = "node"
LOCAL = "local"

EXCHANGES = {"all_gather", "reduce_scatter", "ppermute", "all_to_all"}

_is_one_node: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxzero_is_one_node", default=False
)


@dataclasses.dataclass(frozen=True)
class SimulatedMesh:
    """A stand-in for `Mesh`, of shape `sizes`, whose simulated devices all run on `device`."""

    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    device: Any

    @property
    def shape(self) -> Mapping[str, int]:
        return dict(zip(self.axis_names, self.sizes, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    @property
    def physical(self) -> Mesh:
        """A mesh of the one real device, with the same axis names, for shardings."""
        grid = np.array([self.device]).reshape((1,) * len(self.sizes))
        return Mesh(grid, self.axis_names, axis_types=(AxisType.Auto,) * len(self.sizes))

    def map(
        self,
        function: Callable,
        in_specs: Any,
        out_specs: Any,
        axes: tuple[str, ...] | None = None,
    ) -> Callable:
        """Wrap `function` to run on every device's shards of global arrays: `jax.shard_map`.

        Args:
            function: takes and returns trees of arrays.
            in_specs: a tuple of tree prefixes of `PartitionSpec`s, one for each argument.
            out_specs: a tree prefix of `PartitionSpec`s; for an output that is not split, the
                first device's value is returned.
            axes: the mesh axes to run over; by default all. Specs may name no other axes.
        """
        names = self.axis_names if axes is None else axes

        def on_device(*args):
            token = _axis_names.set(self.axis_names)
            try:
                return function(*args)
            finally:
                _axis_names.reset(token)

        def run(*args):
            mapped = on_device
            for axis in reversed(names):  # the last `vmap` is the outermost: its dim is the first
                in_axes = map_specs(
                    lambda x, spec, axis=axis: 0 if _splits(spec, axis) else None, in_specs, args
                )
                mapped = jax.vmap(mapped, in_axes, axis_name=axis, axis_size=self.shape[axis])
            shards = mapped(*map_specs(self._cut, in_specs, args))
            return map_specs(lambda x, spec: self._join(x, spec, names), out_specs, shards)

        return run

    def _cut(self, x: Array, spec: PartitionSpec) -> Array:
        """Cut a global array into shards: a new leading dim for each mesh axis that splits it."""
        shape: list[int] = []
        for size, axes in zip(x.shape, axes_of_dims(spec, x.ndim), strict=True):
            counts = [self.shape[axis] for axis in axes]
            shape += [*counts, size // math.prod(counts)]
        dims = self._axis_dims(spec, x.ndim)
        return jnp.moveaxis(x.reshape(shape), dims, range(len(dims)))

    def _join(self, x: Array, spec: PartitionSpec, names: tuple[str, ...]) -> Array:
        """Join shards to the global array; `x` has a leading dim of shards for each of `names`."""
        x = x[tuple(slice(None) if _splits(spec, axis) else 0 for axis in names)]
        ndim = x.ndim - sum(_splits(spec, axis) for axis in names)
        dims = self._axis_dims(spec, ndim)
        shape = [
            size * math.prod(self.shape[axis] for axis in axes)
            for size, axes in zip(x.shape[len(dims) :], axes_of_dims(spec, ndim), strict=True)
        ]
        return jnp.moveaxis(x, range(len(dims)), dims).reshape(shape)

    def _axis_dims(self, spec: PartitionSpec, ndim: int) -> list[int]:
        """Return the dim of each mesh axis in a global array that is reshaped.

        The reshape turns every dim that is split into one dim for each of its mesh axes, and a last
        one for the shard.
        """
        order = [name for axes in axes_of_dims(spec, ndim) for name in (*axes, None)]
        return [order.index(axis) for axis in self.axis_names if axis in order]


def axes_of_dims(spec: PartitionSpec, ndim: int = 0) -> list[tuple[str, ...]]:
    """Return, for each of at least `ndim` dims, the mesh axes that split it, major first."""
    free = PartitionSpec.UNCONSTRAINED
    entries = [
        (entry,) if isinstance(entry, str) else tuple(() if entry is free else entry or ())
        for entry in spec
    ]
    return entries + [()] * (ndim - len(entries))


def _splits(spec: PartitionSpec, axis: str) -> bool:
    return any(axis in axes for axes in axes_of_dims(spec))


def map_specs(function: Callable, specs: Any, tree: Any) -> Any:
    """Apply `function(leaf, spec)` to every leaf of `tree`; `specs` is a tree prefix of it."""
    return jax.tree.map(
        lambda spec, subtree: jax.tree.map(lambda x: function(x, spec), subtree),
        specs,
        tree,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


# Collectives. They are correct under `shard_map` too, but may cost more there.


def is_simulating() -> bool:
    """Return whether the program being traced runs on simulated devices."""
    return bool(_axis_names.get())


def varying(x: Shaped[Array, ...], axes: str | tuple[str, ...]) -> Shaped[Array, ...]:
    """Give `x` a batch dim for `axes` under simulation, even if it is equal on all devices.

    Without one, `vmap` gives an `all_to_all` a wrong shape. On real devices this returns `x`.
    """
    return jnp.where(lax.axis_index(axes) >= 0, x, x) if is_simulating() else x


def gather_in_turn(
    x: Shaped[Array, ...], axes: tuple[str, ...], dim: int, tiled: bool
) -> Shaped[Array, ...]:
    """Do a `lax.all_gather` over several axes, one after the other, the minor axis first."""
    x = x if tiled else jnp.expand_dims(x, dim)
    for axis in reversed(axes):
        x = lax.all_gather(x, axis, axis=dim, tiled=True)
    return x


def scatter_in_turn(
    x: Shaped[Array, ...], axes: tuple[str, ...], dim: int, tiled: bool
) -> Shaped[Array, ...]:
    """Do a `lax.psum_scatter` over several axes, one after the other, the major axis first."""
    for axis in axes:
        x = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return x if tiled else jnp.squeeze(x, dim)


def permute(
    x: Shaped[Array, ...], axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]
) -> Shaped[Array, ...]:
    """Do a `lax.ppermute` by a gather: each device picks the value of its source, or zeros.

    As in `lax.ppermute`, devices are numbered in the mesh's order, whatever the order of `axes`.
    """
    axes = tuple(axis for axis in _axis_names.get() if axis in axes)
    source = np.full(math.prod(lax.axis_size(axis) for axis in axes), -1)
    for start, end in pairs:
        source[end] = start
    mine = jnp.asarray(source, jnp.int32)[lax.axis_index(axes)]
    everyone = gather_in_turn(x, axes, 0, tiled=False)
    picked = lax.dynamic_index_in_dim(everyone, jnp.maximum(mine, 0), keepdims=False)
    return jnp.where(mine >= 0, picked, jnp.zeros_like(picked))


def exchange_in_turn(name: str, x: Any, params: dict[str, Any]) -> Any:
    """Run a collective of the user's program, one of `EXCHANGES`, between simulated devices."""
    axes = params["axis_name"]
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    if params.get("axis_index_groups") is not None:
        raise NotImplementedError(
            f"`{name}` with `axis_index_groups` cannot be simulated. Use the mesh axes."
        )
    match name:
        case "all_gather":
            return gather_in_turn(x, axes, params["all_gather_dimension"], params["tiled"])
        case "reduce_scatter":
            return scatter_in_turn(x, axes, params["scatter_dimension"], params["tiled"])
        case "ppermute":
            return permute(x, axes, params["perm"])
    x = varying(x, axes)
    return lax.all_to_all(x, axes, params["split_axis"], params["concat_axis"], tiled=True)


def refuse_exchanges_inside(equation: Any) -> None:
    """Raise `NotImplementedError` if an equation contains collectives that `vmap` gets wrong."""
    for inner in equations_inside(equation):
        name, axes = inner.primitive.name, inner.params.get("axis_name", ())
        if name == "all_to_all" or (name in EXCHANGES and len(axes) > 1):
            raise NotImplementedError(
                f"`{name}` over {axes} inside `{equation.primitive.name}` cannot be simulated. "
                "Call it outside, or `all_gather` over one axis at a time."
            )


@dataclasses.dataclass(frozen=True)
class NodeMesh:
    """A stand-in for `mesh` with the devices of one node, for functions that `map_nodes` traces."""

    mesh: Mesh | SimulatedMesh

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self.mesh.axis_names)

    @property
    def shape(self) -> Mapping[str, int]:
        return {**self.mesh.shape, NODE: 1}

    @property
    def size(self) -> int:
        return self.mesh.size // self.mesh.shape[NODE]

    def map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Wrap `function` to run on every device's shards of arrays that are global in a node."""
        in_specs, out_specs = without_node(in_specs), without_node(out_specs)
        if isinstance(self.mesh, SimulatedMesh):
            return self.mesh.map(function, in_specs, out_specs, axes=(LOCAL,))
        mapped = jax.shard_map(
            function,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={LOCAL},
            check_vma=False,
        )

        # Below stage 3 parameters are whole on each device. Where the axis is explicit, their types
        # say so, and JAX 0.12 refuses to split them.
        def on_split(*args: Any) -> Any:
            return mapped(*map_specs(split_if_explicit, in_specs, args))

        return on_split


AnyMesh = Mesh | SimulatedMesh | NodeMesh


def physical(mesh: AnyMesh) -> Mesh:
    """Return the mesh of real devices that arrays are on: `mesh` itself unless it is simulated."""
    if isinstance(mesh, NodeMesh):
        return physical(mesh.mesh)
    return mesh.physical if isinstance(mesh, SimulatedMesh) else mesh


def map_nodes(
    function: Callable, mesh: Mesh | SimulatedMesh, in_specs: Any, out_specs: Any
) -> Callable:
    """Wrap `function` to run on every node's part of global arrays; specs name only `node`.

    Args:
        function: takes and returns trees of arrays. Only collectives over `node` in functions that
            `NodeMesh.map` runs cross between nodes.
        mesh: the mesh of all nodes.
        in_specs: a tuple of tree prefixes of `PartitionSpec`s, one for each argument.
        out_specs: a tree prefix of `PartitionSpec`s; an output that is not split must be equal on
            all nodes.
    """

    def on_node(*args: Any) -> Any:
        token = _is_one_node.set(True)
        try:
            return function(*args)
        finally:
            _is_one_node.reset(token)

    if isinstance(mesh, SimulatedMesh):
        return mesh.map(on_node, in_specs, out_specs, axes=(NODE,))
    return jax.shard_map(
        on_node,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={NODE},
        check_vma=False,
    )


def is_one_node() -> bool:
    """Return whether the program being traced runs on one node by itself."""
    return _is_one_node.get()


def program_axes(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return those of `axes` that the program being traced runs over."""
    names = (axes,) if isinstance(axes, str) else axes
    return tuple(name for name in names if not (name == NODE and is_one_node()))


def without_node(specs: Any) -> Any:
    """Return a tree of `PartitionSpec`s from which the axis `node` is removed."""

    def change(spec: PartitionSpec) -> PartitionSpec:
        rest = [tuple(name for name in names if name != NODE) for names in axes_of_dims(spec)]
        return PartitionSpec(*(names or None for names in rest))

    return jax.tree.map(change, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def split_if_explicit(x: Any, spec: PartitionSpec) -> Any:
    """Split a traced array of one node as `spec` says, if `local` is an explicit axis.

    An array's type says how it is split only for explicit axes. There, a loop or a `shard_map`
    refuses an array that is split otherwise.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if LOCAL not in mesh.axis_names or mesh.axis_types[mesh.axis_names.index(LOCAL)] != (
        AxisType.Explicit
    ):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))
