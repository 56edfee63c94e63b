"""Trace an optimizer's update on leaves of their true shapes, and compute some of its values.

The trees of an update are gradients, optimizer state and parameters. Their arrays are padded and
split over devices, but the traced program takes them in full and in their true shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from .._mesh import with_automatic_axes
from .._program import Atom, Block, Constant, Operation, Value, operations_for, trace
from .._sharding import DimSharding, LeafSpec, TreeLayout, flatten, is_array


@dataclasses.dataclass(frozen=True)
class UpdateLayouts:
    """The layouts of the trees of an update, in which every array is split over `axes`.

    Attributes:
        gradients: the layout of the gradients.
        state: the layout of the optimizer state.
        params: the layout of the trained parameters; the gradients have the same paths.
        mesh: the mesh that all trees are laid out on.
        axes: the mesh axes that split their arrays.
    """

    gradients: TreeLayout
    state: TreeLayout
    params: TreeLayout
    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        """The leaves of gradients, state and parameters, in this order."""
        return (*self.gradients.leaves, *self.state.leaves, *self.params.leaves)

    def owners(self) -> list[int | None]:
        """Return, for each of `leaves`, the index of the parameter that it belongs to, or None.

        A leaf of the state belongs to a parameter if its path ends with the parameter's path, and
        its shape and layout are the parameter's. Other leaves of the state (counters, factored
        statistics) belong to none.

        Raises:
            ValueError: the gradients are not those of the parameters.
        """
        params = self.params.leaves
        if [x.path for x in self.gradients.leaves] != [x.path for x in params]:
            given, trained = (
                {x.path for x in layout.leaves} for layout in (self.gradients, self.params)
            )
            raise ValueError(
                "`grads` must be a tree like the trained parameters; the leaves "
                f"{sorted(given ^ trained)} are in only one of them."
            )
        by_path = {leaf.path: i for i, leaf in enumerate(params)}
        of_state = [self._owner(leaf, by_path) for leaf in self.state.leaves]
        return [*range(len(params)), *of_state, *range(len(params))]

    def _owner(self, leaf: LeafSpec, by_path: Mapping[str, int]) -> int | None:
        keys = leaf.path.split(".")
        for i in range(len(keys) + 1):
            owner = by_path.get(".".join(keys[i:]) or ".")
            if owner is not None:
                param = self.params.leaves[owner]
                if (leaf.shape, _split(leaf)) == (param.shape, _split(param)):
                    return owner
        return None

    def spec(self, leaf: LeafSpec) -> PartitionSpec:
        """Return the spec of a leaf's array in a `shard_map` over the mesh axes of ZeRO."""
        return leaf.spec(self.axes, manual_only=True)


def _split(leaf: LeafSpec) -> DimSharding | None:
    """Return how a leaf is split; None if one device has all of it.

    On a single device, leaves in host memory have a layout, and leaves in device memory have none
    (`in_memory`). Both give None here, so that their splits compare as equal.
    """
    return leaf.layout if leaf.layout and leaf.layout.num_shards > 1 else None


@dataclasses.dataclass(frozen=True)
class UpdateProgram:
    """`tx.update` and `optax.apply_updates` as one list of operations.

    Attributes:
        block: its inputs are gradients, state, parameters and the arrays among the extra
            arguments; its outputs are the new state and the new parameters.
    """

    block: Block

    def producer(self, value: Value) -> Operation | None:
        """Return the operation that computes a value; None for an input."""
        return self.block.makers.get(value)

    def run(self, wanted: Sequence[Atom], known: Mapping[Value, Any]) -> list[Any]:
        """Compute the values `wanted` from the full arrays in `known`."""
        env = dict(known)
        for operation in operations_for(self.block, wanted, env):
            inputs = [_read(atom, env) for atom in operation.inputs]
            env.update(zip(operation.outputs, operation.bind(inputs), strict=True))
        return [_read(atom, env) for atom in wanted]


def trace_update(
    tx: optax.GradientTransformation, layouts: UpdateLayouts, extra_args: Mapping[str, Any]
) -> tuple[UpdateProgram, list[Any]]:
    """Trace `tx.update` and `optax.apply_updates` on trees of the given layouts.

    Returns:
        The program, and the arrays among `extra_args`, which are the program's last inputs. Padded
        arrays are `StoredArray`s.

    Raises:
        ValueError: the update returns a tree of another structure, or arrays of other shapes.
    """
    update = optax.with_extra_args_support(tx).update
    trees = (layouts.gradients, layouts.state, layouts.params)
    _, extras, structure = flatten(extra_args)
    traced = [i for i, x in enumerate(extras) if is_array(x)]

    def flat(*arrays: Any) -> list[Any]:
        remaining = iter(arrays)
        gradients, state, params = (
            layout.whole([next(remaining) for _ in layout.leaves]) for layout in trees
        )
        values = dict(zip(traced, remaining, strict=True))
        arguments = jax.tree.unflatten(structure, [values.get(i, x) for i, x in enumerate(extras)])
        updates, new_state = update(gradients, state, params, **arguments)
        new_params = optax.apply_updates(params, updates)
        return [
            *_arrays_like(layouts.state, new_state, "state"),
            *_arrays_like(layouts.params, new_params, "parameters"),
        ]

    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layouts.leaves]
    given = [extras[i] for i in traced]
    structs += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
    no_mesh = AbstractMesh((), ())  # rather than one that the user may have set
    with jax.sharding.use_abstract_mesh(no_mesh):
        block, _ = trace(flat, *structs)
    return UpdateProgram(block), given


def _arrays_like(layout: TreeLayout, tree: Any, what: str) -> list[Any]:
    """Return the arrays of `tree`, in the order of the arrays of `layout`.

    `what` names the tree in errors.

    Raises:
        ValueError: the new tree has another structure, or arrays of other shapes.
    """
    try:
        arrays = layout.flatten_like(tree)
    except ValueError as error:
        raise ValueError(
            f"The optimizer returns {what} of another structure than it was given: {error}"
        ) from error
    for leaf, x in zip(layout.leaves, arrays, strict=True):
        if tuple(getattr(x, "shape", ())) != leaf.shape:
            raise ValueError(
                f"The optimizer returns {what} whose leaf `{leaf.path}` has the shape "
                f"{tuple(x.shape)}; it was given {leaf.shape}."
            )
    return arrays


def _read(atom: Atom, env: Mapping[Value, Any]) -> Any:
    return atom.value if isinstance(atom, Constant) else env[atom]


class FullValues:
    """Computes values of an update on global arrays, as without offload.

    The values are scalars, and the new arrays of leaves that are not in host memory. Every call
    computes them from the values that `add` has made known: inputs of the program, and results of
    reductions. If several calls run the same operations, XLA merges them.
    """

    def __init__(self, program: UpdateProgram, layouts: UpdateLayouts):
        self._program = program
        self._layouts = layouts
        self._known: dict[Value, tuple[Array, LeafSpec | None]] = {}

    def add(self, value: Value, x: Array, leaf: LeafSpec | None = None) -> None:
        """Make a value known: `x` is its array, in the stored form of `leaf`, or a scalar."""
        self._known[value] = (x, leaf)

    def scalars(self, wanted: Sequence[Atom]) -> list[Array]:
        """Compute scalars, replicated on every device."""
        return self.compute(wanted, [None] * len(wanted))

    def compute(self, wanted: Sequence[Atom], leaves: Sequence[LeafSpec | None]) -> list[Array]:
        """Compute values, each in the stored form of its leaf, or replicated if that is None."""
        if not wanted:
            return []
        known = [leaf for _, leaf in self._known.values()]

        def run(arrays: list[Array]) -> list[Any]:
            pairs = zip(arrays, known, strict=True)
            whole = [leaf.unpad(x) if leaf else x for x, leaf in pairs]
            values = self._program.run(wanted, dict(zip(self._known, whole, strict=True)))
            return [
                leaf.pad(jnp.asarray(x)) if leaf else x
                for x, leaf in zip(values, leaves, strict=True)
            ]

        mesh = self._layouts.mesh
        if AxisType.Explicit in mesh.axis_types:
            axes = self._layouts.axes
            shardings = [
                NamedSharding(mesh, PartitionSpec() if leaf is None else leaf.spec(axes))
                for leaf in leaves
            ]
            run = with_automatic_axes(run, shardings, mesh)
        return run([x for x, _ in self._known.values()])
