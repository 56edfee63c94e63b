"""Programs that run on every node by itself: `node` is bound, and only explicit exchanges cross it.

`map_nodes` runs a function on each node's part of global arrays. Inside it, arrays are global over
the devices of one node, as under `jit`, and a `NodeMesh` takes the place of the mesh: a program for
it runs on `local` only, so that nothing in it crosses between nodes.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .simulated import SimulatedMesh

NODE = "node"
LOCAL = "local"

_is_one_node: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxzero_is_one_node", default=False
)


@dataclasses.dataclass(frozen=True)
class NodeMesh:
    """The devices of one node of `mesh`, for functions that `map_nodes` traces."""

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
        """Run `function` on every device's shards of the arrays of its node."""
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
            return mapped(*jax.tree.map(_split_all, in_specs, args, is_leaf=_is_spec))

        return on_split


AnyMesh = Mesh | SimulatedMesh | NodeMesh


def physical(mesh: AnyMesh) -> Mesh:
    """The mesh of real devices that arrays lie on: `mesh` itself unless it is simulated."""
    if isinstance(mesh, NodeMesh):
        return physical(mesh.mesh)
    return mesh.physical if isinstance(mesh, SimulatedMesh) else mesh


def map_nodes(
    function: Callable, mesh: Mesh | SimulatedMesh, in_specs: Any, out_specs: Any
) -> Callable:
    """Run `function` on every node's part of global arrays; specs are over `node` only.

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
    """Whether the program being traced runs on one node by itself."""
    return _is_one_node.get()


def program_axes(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    """The axes among `axes` that the program being traced runs over."""
    names = (axes,) if isinstance(axes, str) else axes
    return tuple(name for name in names if not (name == NODE and is_one_node()))


def without_node(specs: Any) -> Any:
    """A tree of `PartitionSpec`s without the axis `node`."""

    def change(spec: PartitionSpec) -> PartitionSpec:
        entries = [(x,) if isinstance(x, str) else tuple(x or ()) for x in spec]
        rest = [tuple(name for name in names if name != NODE) for names in entries]
        return PartitionSpec(*(names or None for names in rest))

    return jax.tree.map(change, specs, is_leaf=_is_spec)


def split_if_explicit(x: Any, spec: PartitionSpec) -> Any:
    """Split a traced array of one node as `spec` says, if `local` is an explicit axis.

    Only then does its type say how it is split, so that a loop or a `shard_map` may refuse it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if LOCAL not in mesh.axis_names or mesh.axis_types[mesh.axis_names.index(LOCAL)] != (
        AxisType.Explicit
    ):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _split_all(spec: PartitionSpec, tree: Any) -> Any:
    return jax.tree.map(lambda x: split_if_explicit(x, spec), tree)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
