"""Look up the layout of a tree by its structure and shapes, among the trees laid out before.

A leaf that is stored padded or encoded carries its layout (`StoredArray`). Any other leaf is a
plain array in its own shape, and its layout follows from the shape. So the layout of every tree
can be found from its leaves. The registry adds what leaves do not show: that a tree is one of
parameters and not a batch, and over which further mesh axes the user split it (`specs`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .._mesh import AnyMesh, NodeMesh, axes_of_dims, is_traced, physical
from .config import ZeroConfig
from .layout import DimSharding, LeafSpec, axes_of, layout_of_leaf, split_over_stages
from .stored_array import StoredArray, array_leaves, flatten, is_array, is_stored, path_name
from .tree import TreeLayout, as_placed, layout_as_stored, without_layout


class Registry:
    """The `TreeLayout` of every tree laid out so far.

    Args:
        mesh: the mesh that the trees are laid out on.
        config: gives axes, stage and the persistence threshold.
    """

    def __init__(self, mesh: AnyMesh, config: ZeroConfig):
        self._mesh = mesh
        self._devices = set(physical(mesh).devices.flat)
        self._config = config
        self._num_shards = config.num_shards(mesh)
        self._layouts: dict[Any, list[TreeLayout]] = {}
        self._split: set[tuple[tuple[int, ...], Any]] = set()  # shape and dtype of split leaves

    def add(self, layout: TreeLayout) -> TreeLayout:
        """Store `layout` and return it.

        If `layout` was made without `specs`, and an earlier layout of equal structure and shapes
        was made with `specs`, the result has the splits of the earlier layout.
        """
        alike = self._layouts.setdefault(layout.treedef, [])
        equal = next((old for old in alike if old.shapes == layout.shapes), None)
        if equal is not None:
            alike.remove(equal)
            if not any(leaf.other_axes for leaf in layout.leaves):
                layout = _with_other_axes_of(equal, layout)
        alike.append(layout)
        self._split |= {(leaf.shape, leaf.dtype) for leaf in layout.leaves if leaf.layout}
        return layout

    def find(self, tree: Any) -> TreeLayout | None:
        """Return the layout of a stored tree that was laid out before; None if it was not.

        The layout has the dtypes and the kinds of memory that the arrays of `tree` have now.
        """
        _, leaves, treedef = flatten(tree)
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        shapes = tuple(tuple(x.shape) for x in arrays)
        for layout in self._layouts.get(treedef, ()):
            if layout.shapes != shapes or len(layout.statics) != len(leaves):
                continue
            pairs = list(zip(layout.leaves, arrays, strict=True))
            if all(leaf.is_plain != is_stored(x) for leaf, x in pairs):
                now = (
                    x.leaf(leaf.path)
                    if isinstance(x, StoredArray)
                    else as_placed(dataclasses.replace(leaf, dtype=x.dtype), x, self._num_shards)
                    for leaf, x in pairs
                )
                return dataclasses.replace(layout, leaves=tuple(now))
        return None

    def layout_of(self, tree: Any) -> TreeLayout:
        """Return the layout of a stored tree: from `find`, or else inferred from its leaves.

        Raises:
            ValueError: an array of the tree was not laid out by this `Zero`.
        """
        known = self.find(tree)
        layout = layout_as_stored(tree, self._mesh, self._config) if known is None else known
        self._check_is_laid_out(tree, known is not None)
        self.check_is_ours(layout)
        return layout

    def layout_of_parts(self, tree: Any) -> TreeLayout | None:
        """Return the layout of a tree in which only some arrays are sharded.

        An array counts as sharded if it is a `StoredArray`, if its sharding is that of a parameter,
        or, for a traced array without sharding, if an array of its shape and dtype was laid out
        sharded. Sharded arrays are gathered where they are used.

        Returns:
            The layout, in which arrays that do not count as sharded are replicated; None if no
            array counts as sharded.

        Raises:
            ValueError: a `StoredArray` was laid out by a `Zero` with another mesh or config.
        """
        arrays = array_leaves(tree)
        is_sharded = [
            is_stored(x) or self._is_split_as_ours(x) or (is_traced(x) and self._has_one_like(x))
            for x in arrays
        ]
        if not any(is_sharded):
            return None
        layout = layout_as_stored(tree, self._mesh, self._config)
        self.check_is_ours(layout)
        pairs = zip(layout.leaves, is_sharded, strict=True)
        leaves = tuple(leaf if sharded else without_layout(leaf) for leaf, sharded in pairs)
        return dataclasses.replace(layout, leaves=leaves)

    def holds_laid_out(self, tree: Any) -> bool:
        """Return whether a tree certainly holds an array that a `Zero` has laid out.

        Such an array is a `StoredArray`, or has the sharding of a parameter. A traced array has a
        sharding on explicit meshes only; on others, it does not count.
        """
        arrays = array_leaves(tree)
        return any(is_stored(x) or self._is_split_as_ours(x) for x in arrays)

    def is_placed_otherwise(self, tree: Any, layout: TreeLayout) -> bool:
        """Return whether a tree certainly has other shardings than `layout`, which has its shapes.

        The result is True if no array is traced, and at least one is a NumPy array, or a
        `jax.Array` whose sharding is not that of the layout.
        """
        arrays = array_leaves(tree)
        is_otherwise = [
            self._is_elsewhere(x, leaf) for x, leaf in zip(arrays, layout.leaves, strict=True)
        ]
        return None not in is_otherwise and any(is_otherwise)

    def _is_elsewhere(self, x: Any, leaf: LeafSpec) -> bool | None:
        """Return whether the sharding of `x` differs from that of `leaf`.

        None: that is not known, since `x` is traced or a struct.
        """
        if is_traced(x) or isinstance(x, jax.ShapeDtypeStruct):
            return None
        if not isinstance(x, jax.Array):
            return True
        mesh, kind = physical(self._mesh), x.sharding.memory_kind
        # Below stage 3 weights are whole on every device, and moments are split.
        axes = (self._config.axes,) if self._config.stage == 3 else (self._config.axes, ())
        ours = [NamedSharding(mesh, leaf.spec(each), memory_kind=kind) for each in axes]
        return not any(x.sharding.is_equivalent_to(each, x.ndim) for each in ours)

    def may_hold_parts(self, tree: Any) -> bool:
        """Return whether a tree is possibly a part of a tree that was laid out before.

        It is if each of its arrays has the shape and dtype of an array that was laid out sharded,
        and is on the mesh, or traced (a traced array does not show where it is).
        """
        arrays = array_leaves(tree)
        return bool(arrays) and all(
            self._has_one_like(x) and (is_traced(x) or self._devices_of(x) == self._devices)
            for x in arrays
        )

    def _devices_of(self, x: Any) -> Any:
        """Return the devices that an array is on; None if it is on the host."""
        sharding = getattr(x, "sharding", None)
        on = getattr(sharding, "mesh", None)
        if isinstance(on, AbstractMesh):  # a struct in the host memory of devices that are absent
            return self._devices if on == physical(self._mesh).abstract_mesh else None
        return getattr(sharding, "device_set", None)

    def _has_one_like(self, x: Any) -> bool:
        """Return whether an array of the shape and dtype of `x` was laid out sharded."""
        return (tuple(x.shape), x.dtype) in self._split

    def _is_split_as_ours(self, x: Any) -> bool:
        """Return whether an array's sharding names the config's axes, in their order, on one dim.

        Axes of size 1 count too. The order distinguishes parameters from a batch, which is split
        over both axes in the other order.
        """
        sharding = jax.typeof(x).sharding if is_traced(x) else getattr(x, "sharding", None)
        axes = self._config.axes
        dims = axes_of_dims(getattr(sharding, "spec", PartitionSpec()))
        return any(of_dim[: len(axes)] == axes for of_dim in dims)

    def _check_is_laid_out(self, tree: Any, is_known: bool) -> None:
        """Raise `ValueError` if an array is on other devices than those of the mesh.

        If `is_known`, the tree's layout was looked up; then an array may also be on the host, or
        uncommitted on one device, since JAX moves it.
        """
        paths, leaves, treedef = flatten(tree)
        for path, x in zip(paths, leaves, strict=True):
            if not is_array(x) or is_stored(x) or is_traced(x) or not x.shape:
                continue
            devices = self._devices_of(x)
            # `load_decoder` and `load_into` return tensors that are still in files.
            is_in_file = not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
            is_movable = is_known and not is_in_file and not getattr(x, "committed", False)
            if devices != self._devices and not is_movable:
                num = len(devices or ())
                where = "on no device" if not num else f"on {num} device{'s' * (num > 1)}"
                raise ValueError(
                    f"the leaf `{path_name(path)}`, {x.dtype}{tuple(x.shape)}, is {where}, and "
                    f"must be split over the {len(self._devices)} of the mesh. "
                    f"{self._known_shape(treedef, path, x.shape)}Make the tree with `zero.init`, "
                    "or shard it: `zero.shard(tree)`. Of a loss, the first argument is taken for "
                    "the parameters, unless `argnums` names another."
                )

    def _known_shape(self, treedef: Any, path: Any, shape: tuple[int, ...]) -> str:
        for layout in self._layouts.get(treedef, ()):
            for leaf in layout.leaves:
                if leaf.path == path_name(path) and leaf.shape != tuple(shape):
                    return f"A tree of this structure was sharded with {leaf.shape} there. "
        return ""

    def check_is_ours(self, layout: TreeLayout) -> None:
        """Raise `ValueError` if a leaf was laid out by a `Zero` with another mesh or config."""
        for leaf in layout.leaves:
            if leaf.is_plain:
                continue
            ours = self._splits(leaf)
            if ours != [leaf.layout, leaf.stages]:
                if isinstance(self._mesh, NodeMesh):
                    raise ValueError(
                        f"the leaf `{leaf.path}` is laid out over all nodes, and a step inside "
                        "`local_steps` sees the arrays of one node: only `params` and `opt_state` "
                        "that it is given. Put the tree into one of these; frozen weights (LoRA) "
                        "belong into `opt_state`, where they are not exchanged."
                    )
                raise ValueError(
                    f"the leaf `{leaf.path}` was laid out by a `Zero` with another mesh or config: "
                    f"{_named(leaf.layout, leaf.stages)}, where this one has {_named(*ours)}. "
                    "Move it: `zero.shard(jz.reshard(tree, other, specs=PartitionSpec()))`, with "
                    "the `Zero` that made it as `other`; or save and restore with `Checkpoints`."
                )

    def _splits(self, leaf: LeafSpec) -> list[DimSharding | None]:
        """Return the splits of a leaf on this mesh, over the config's axes and over stages.

        The list is empty if the mesh lacks an axis that splits the leaf.
        """
        other = leaf.other_axes
        if not self._mesh.shape.keys() >= {*axes_of(other)}:
            return []
        layout = layout_of_leaf(leaf, self._mesh, self._config, other)
        return [layout, split_over_stages(leaf.shape, other, self._mesh)]


def _named(layout: DimSharding | None = None, stages: DimSharding | None = None) -> str:
    return str(layout) if stages is None else f"{layout} and, over stages, {stages}"


def _with_other_axes_of(known: TreeLayout, layout: TreeLayout) -> TreeLayout:
    pairs = zip(layout.leaves, known.leaves, strict=True)
    leaves = (
        dataclasses.replace(old, dtype=new.dtype) if old.other_axes else new for new, old in pairs
    )
    return dataclasses.replace(layout, leaves=tuple(leaves))
