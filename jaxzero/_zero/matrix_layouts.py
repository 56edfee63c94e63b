"""The two layouts of a stack of matrices: the stored one, and one that splits it by layer.

In the stored layout, devices share the rows or columns of each matrix. Split by layer, each device
holds the whole matrices of some layers, which an optimizer such as Muon can multiply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._mesh import LOCAL, STAGE, axes_of_dims, is_one_node, without_node
from .._program import Atom, Constant, Value
from .._sharding import DimSharding, LeafSpec
from .placement import constrain


class Forms(NamedTuple):
    """The layout in which a stack of matrices is stored, and its layout split by layer."""

    stored: LeafSpec
    by_layer: LeafSpec


def may_be_split_stack(leaf: LeafSpec) -> bool:
    """Return whether a parameter may be a stack of matrices that can be split by layer.

    It has three or more dims, and is stored split along another dim than dim 0. If pipeline stages
    divide its layers, the devices of a stage must divide the layers of the stage evenly.
    """
    if len(leaf.shape) < 3 or not _is_split(leaf) or leaf.layout is None or leaf.layout.dim == 0:
        return False
    if leaf.stages is not None and leaf.other_axes == PartitionSpec(STAGE):
        return leaf.shape[0] % (leaf.stages.num_shards * leaf.layout.num_shards) == 0
    return not axes_of_dims(PartitionSpec(*leaf.other_axes, *[None] * len(leaf.shape)))[0]


def may_be_split_matrix(leaf: LeafSpec) -> bool:
    """Return whether a parameter may be a matrix, or a stack, that is worth splitting by layer.

    It has two or more dims and is stored split. With pipeline stages, it is a stack.
    """
    if leaf.stages is not None:
        return may_be_split_stack(leaf)
    return len(leaf.shape) >= 2 and _is_split(leaf)


def _is_split(leaf: LeafSpec) -> bool:
    if leaf.layout is None or leaf.layout.num_shards == 1 or leaf.memory_kind is not None:
        return False
    # Experts are split over `local` themselves, so an exchange over it would gather them.
    return LOCAL not in leaf.other_axes


def by_layer_of(stack: LeafSpec, num_shards: int) -> LeafSpec:
    """Return the layout of a stack whose layers (dim 0) are split into `num_shards` shards."""
    return dataclasses.replace(stack, layout=DimSharding(0, stack.shape[0], num_shards))


def forms_of_layers(stack: LeafSpec, num_shards: int, axes: tuple[str, ...]) -> Forms:
    """Return the two layouts of a parameter that is itself a stack: as stored, and split by layer.

    With pipeline stages, the layers of a stage are shared by the devices of that stage only.

    Args:
        stack: the layout in which the parameter is stored.
        num_shards: how many devices share the layers (of a stage, if there are stages).
        axes: the mesh axes that split the parameter.
    """
    if stack.stages is None:
        return Forms(stack, by_layer_of(stack, num_shards))
    split = PartitionSpec((STAGE, *axes))
    return Forms(stack, dataclasses.replace(stack, layout=None, stages=None, other_axes=split))


def forms_of_stack(leaf: LeafSpec, num: int, num_shards: int) -> Forms:
    """Return the two layouts of a stack that is made of `num` leaves, one for each layer.

    Args:
        leaf: the layout in which each of the leaves is stored; its dtype does not matter.
        num: the number of leaves, which become the layers of the stack.
        num_shards: how many devices share the layers.
    """
    layout = None if leaf.layout is None else leaf.layout.moved(leaf.layout.dim + 1)
    other_axes = PartitionSpec(None, *leaf.other_axes)
    shape = (num, *leaf.shape)
    stack = dataclasses.replace(leaf, shape=shape, layout=layout, other_axes=other_axes)
    return Forms(stack, by_layer_of(stack, num_shards))


class Layouts:
    """The arrays of a program's values: each value as stored, split by layer, or in both layouts.

    A value that an operation needs in a layout that it does not have is converted, and then kept
    in both.

    Args:
        forms: the two layouts of a value; the compiler chooses the layouts of all other values.
        mesh: the mesh of the layouts.
        axes: the mesh axes that split the values.

    Attributes:
        arrays: for each value its arrays, keyed by whether they are split by layer.
        finished: an array that must be computed before another value is split by layer; None if no
            value has to wait.
    """

    def __init__(self, forms: Mapping[Value, Forms], mesh: Mesh, axes: tuple[str, ...]):
        self._forms, self._mesh, self._axes = forms, mesh, axes
        self.arrays: dict[Value, dict[bool, Any]] = {}
        self.finished: Any = None

    def set(self, x: Value, array: Any, by_layer: bool) -> None:
        self.arrays[x] = {by_layer: array}

    def get(self, x: Atom, by_layer: bool | None) -> Any:
        """Return the array of `x`, converted if needed.

        Args:
            x: a value of the program.
            by_layer: whether the array is split by layer or as stored; None accepts either.
        """
        if isinstance(x, Constant):
            return x.value
        by_form = self.arrays[x]
        forms = self._forms.get(x)
        if forms is None or by_layer is None:
            return next(iter(by_form.values()))
        if by_layer not in by_form:
            # With a constraint on both sides the compiler converts here, and does not propagate the
            # new layout to the operations before.
            source = by_form[not by_layer]
            if by_layer and self.finished is not None:
                # `finished` passes too: XLA drops a barrier one of whose results is not used.
                source, self.finished = jax.lax.optimization_barrier((source, self.finished))
            source = self.constrained(source, forms[not by_layer])
            by_form[by_layer] = self.constrained(source, forms[by_layer])
        return by_form[by_layer]

    def constrained(self, x: Any, leaf: LeafSpec) -> Any:
        """Constrain an array of true shape to the layout of `leaf`."""
        spec, mesh = leaf.spec(self._axes), self._mesh
        if AxisType.Explicit not in mesh.axis_types:
            return constrain(x, mesh, spec)
        context = jax.sharding.get_abstract_mesh()  # with automatic axes
        spec = without_node(spec) if is_one_node() else spec
        return jax.lax.with_sharding_constraint(x, NamedSharding(context, spec))
