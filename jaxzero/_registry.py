"""Which trees a `Zero` has laid out, for what the leaves of a tree cannot say of themselves.

A leaf that is stored padded or encoded carries its layout (`StoredArray`). Any other is a plain
array in its own shape, and its layout follows from that shape. So every tree can be laid out from
its leaves alone; a tree met before is also known to be one of parameters, and not a batch, and
the mesh axes that the user has given in `specs` are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ._config import ZeroConfig
from ._partition import layout_of_leaf
from ._paths import path_name
from ._program import is_traced
from ._simulate import AnyMesh, physical
from ._stored_array import StoredArray, flatten, is_array, is_stored
from ._tree_plan import TreePlan, plan_as_stored, without_layout


class Registry:
    """The plans of all trees laid out so far.

    Args:
        mesh: that they are laid out on.
        config: that says how.
    """

    def __init__(self, mesh: AnyMesh, config: ZeroConfig):
        self._mesh = mesh
        self._devices = set(physical(mesh).devices.flat)
        self._config = config
        self._plans: dict[Any, list[TreePlan]] = {}
        self._split_shapes: set[tuple[int, ...]] = set()

    def add(self, plan: TreePlan) -> TreePlan:
        """Remember `plan`. A copy of a known tree, laid out without `specs`, takes its `specs`."""
        known = self._plans.setdefault(plan.treedef, [])
        alike = next((old for old in known if old.shapes == plan.shapes), None)
        if alike is not None:
            known.remove(alike)
            if not any(leaf.other_axes for leaf in plan.leaves):
                plan = _with_other_axes_of(alike, plan)
        known.append(plan)
        self._split_shapes |= {leaf.shape for leaf in plan.leaves if leaf.layout}
        return plan

    def find(self, tree: Any) -> TreePlan | None:
        """The plan of a tree that was laid out, with the dtypes that it has now; or None."""
        _, leaves, treedef = flatten(tree)
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        shapes = tuple(tuple(x.shape) for x in arrays)
        for plan in self._plans.get(treedef, ()):
            if plan.shapes != shapes or len(plan.statics) != len(leaves):
                continue
            pairs = list(zip(plan.leaves, arrays, strict=True))
            if all(leaf.is_plain != is_stored(x) for leaf, x in pairs):
                now = (
                    x.leaf(leaf.path)
                    if isinstance(x, StoredArray)
                    else dataclasses.replace(leaf, dtype=x.dtype)
                    for leaf, x in pairs
                )
                return dataclasses.replace(plan, leaves=tuple(now))
        return None

    def plan_of(self, tree: Any) -> TreePlan:
        """How a tree is stored, whether it was met before or not.

        Raises:
            ValueError: an array in it was not laid out by this `Zero`.
        """
        known = self.find(tree)
        if known is None:
            known = plan_as_stored(tree, self._mesh, self._config)
            self._check_is_laid_out(tree)
        self.check_is_ours(known)
        return known

    def plan_of_parts(self, tree: Any) -> TreePlan | None:
        """How a tree is stored that may hold sharded arrays and others, such as statistics.

        An array is taken to be cut if it is a `StoredArray`, if its sharding says so, or, where a
        traced array has none, if one of its shape was laid out: then it is gathered where it is
        used. Others are whole on every device.

        Returns:
            None if no array is taken to be cut.

        Raises:
            ValueError: a `StoredArray` was laid out by a `Zero` with another mesh or config.
        """
        arrays = [leaf for leaf in flatten(tree)[1] if is_array(leaf)]
        is_cut = [
            is_stored(x)
            or self._is_split_as_ours(x)
            or (is_traced(x) and tuple(x.shape) in self._split_shapes)
            for x in arrays
        ]
        if not any(is_cut):
            return None
        plan = plan_as_stored(tree, self._mesh, self._config)
        self.check_is_ours(plan)
        pairs = zip(plan.leaves, is_cut, strict=True)
        leaves = tuple(leaf if cut else without_layout(leaf) for leaf, cut in pairs)
        return dataclasses.replace(plan, leaves=leaves)

    def knows(self, tree: Any) -> bool:
        """Whether a tree is known to be one that was laid out, or a part of one.

        It is if it was laid out as a whole, or holds a `StoredArray`, or an array whose sharding
        is that of a parameter. Traced arrays have one on explicit meshes only.
        """
        arrays = [leaf for leaf in flatten(tree)[1] if is_array(leaf)]
        if any(is_stored(x) or self._is_split_as_ours(x) for x in arrays):
            return True
        return self.find(tree) is not None

    def _is_split_as_ours(self, x: Any) -> bool:
        """Whether an array is split over the config's axes in their order.

        A batch is split in the other order. Over one axis the two cannot be told apart.
        """
        axes = tuple(axis for axis in self._config.axes if self._mesh.shape[axis] > 1)
        return len(axes) > 1 and bool(x.shape) and _is_split_over(x, axes)

    def _check_is_laid_out(self, tree: Any) -> None:
        """Raise `ValueError` for an array that is on other devices than the mesh's."""
        paths, leaves, treedef = flatten(tree)
        for path, x in zip(paths, leaves, strict=True):
            if not is_array(x) or is_stored(x) or is_traced(x) or not x.shape:
                continue
            devices = getattr(getattr(x, "sharding", None), "device_set", None)
            if devices != self._devices:
                where = f"on {len(devices)} devices" if devices else "not on any device"
                raise ValueError(
                    f"the leaf `{path_name(path)}`, {x.dtype}{tuple(x.shape)}, is {where}, and the "
                    f"mesh has {len(self._devices)}. {self._known_shape(treedef, path)}Lay the "
                    "tree out with `zero.init` or `zero.shard` first."
                )

    def _known_shape(self, treedef: Any, path: Any) -> str:
        for plan in self._plans.get(treedef, ()):
            for leaf in plan.leaves:
                if leaf.path == path_name(path):
                    return f"A tree like this was laid out with {leaf.shape} there. "
        return ""

    def check_is_ours(self, plan: TreePlan) -> None:
        """Raise `ValueError` for a leaf that a `Zero` with another mesh or config has laid out."""
        for leaf in plan.leaves:
            if leaf.is_plain:
                continue
            ours = layout_of_leaf(leaf, self._mesh, self._config, leaf.other_axes)
            if ours != leaf.layout:
                raise ValueError(
                    f"the leaf `{leaf.path}` was laid out by a `Zero` with another mesh or config: "
                    f"{leaf.layout}, where this one has {ours}. Take `zero.unshard(tree)` of that "
                    "one, and `zero.shard` it with this one."
                )


def _with_other_axes_of(known: TreePlan, plan: TreePlan) -> TreePlan:
    pairs = zip(plan.leaves, known.leaves, strict=True)
    leaves = (
        dataclasses.replace(old, dtype=new.dtype) if old.other_axes else new for new, old in pairs
    )
    return dataclasses.replace(plan, leaves=tuple(leaves))


def _is_split_over(x: Any, axes: Sequence[str]) -> bool:
    sharding = jax.typeof(x).sharding if is_traced(x) else getattr(x, "sharding", None)
    entries = [entry for entry in getattr(sharding, "spec", ()) if isinstance(entry, tuple)]
    return any(tuple(name for name in entry if name in axes) == tuple(axes) for entry in entries)
