"""Which trees a `Zero` has laid out, for what the leaves of a tree cannot say of themselves.

A leaf that is stored padded or encoded carries its layout (`StoredArray`). Any other is a plain
array in its own shape, and its layout follows from that shape. So every tree can be laid out from
its leaves alone; a tree met before is also known to be one of parameters, and not a batch, and
the mesh axes that the user has given in `specs` are known.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .._mesh import AnyMesh, is_traced, physical
from .config import ZeroConfig
from .layout import layout_of_leaf
from .paths import path_name
from .stored_array import StoredArray, flatten, is_array, is_stored
from .tree import TreePlan, plan_as_stored, without_layout


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
        self._split: set[tuple[tuple[int, ...], Any]] = set()  # shape and dtype of split leaves

    def add(self, plan: TreePlan) -> TreePlan:
        """Remember `plan`. A copy of a known tree, laid out without `specs`, takes its `specs`."""
        known = self._plans.setdefault(plan.treedef, [])
        alike = next((old for old in known if old.shapes == plan.shapes), None)
        if alike is not None:
            known.remove(alike)
            if not any(leaf.other_axes for leaf in plan.leaves):
                plan = _with_other_axes_of(alike, plan)
        known.append(plan)
        self._split |= {(leaf.shape, leaf.dtype) for leaf in plan.leaves if leaf.layout}
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
        plan = plan_as_stored(tree, self._mesh, self._config) if known is None else known
        self._check_is_laid_out(tree, known is not None)
        self.check_is_ours(plan)
        return plan

    def plan_of_parts(self, tree: Any) -> TreePlan | None:
        """How a tree is stored that may hold sharded arrays and others, such as statistics.

        An array is taken to be cut if it is a `StoredArray`, if its sharding says so, or, where a
        traced array has none, if one of its shape and dtype was laid out: then it is gathered where
        it is used. Others are whole on every device.

        Returns:
            None if no array is taken to be cut.

        Raises:
            ValueError: a `StoredArray` was laid out by a `Zero` with another mesh or config.
        """
        arrays = [leaf for leaf in flatten(tree)[1] if is_array(leaf)]
        is_cut = [
            is_stored(x) or self._is_split_as_ours(x) or (is_traced(x) and self._has_one_like(x))
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

    def may_hold_parts(self, tree: Any) -> bool:
        """Whether a tree may be a part of one that was laid out, as far as its arrays tell.

        It may if each has the shape and dtype of one that was laid out split, and is traced, so
        that nothing is known of its sharding, or lies on the mesh.
        """
        arrays = [leaf for leaf in flatten(tree)[1] if is_array(leaf)]
        return bool(arrays) and all(
            self._has_one_like(x) and (is_traced(x) or _devices_of(x) == self._devices)
            for x in arrays
        )

    def _has_one_like(self, x: Any) -> bool:
        """Whether an array of this shape and dtype was laid out split."""
        return (tuple(x.shape), x.dtype) in self._split

    def _is_split_as_ours(self, x: Any) -> bool:
        """Whether an array is split over the config's axes in their order, also axes of size 1.

        A batch is split over both axes in the other order.
        """
        sharding = jax.typeof(x).sharding if is_traced(x) else getattr(x, "sharding", None)
        entries = [
            (entry,) if isinstance(entry, str) else tuple(entry or ())
            for entry in getattr(sharding, "spec", ())
        ]
        axes = self._config.axes
        return any(entry[: len(axes)] == axes for entry in entries)

    def _check_is_laid_out(self, tree: Any, is_known: bool) -> None:
        """Raise `ValueError` for an array that is on other devices than the mesh's.

        In a tree that is known as a whole it may be on the host, or on a device that JAX moves it
        from.
        """
        paths, leaves, treedef = flatten(tree)
        for path, x in zip(paths, leaves, strict=True):
            if not is_array(x) or is_stored(x) or is_traced(x) or not x.shape:
                continue
            devices = _devices_of(x)
            is_movable = is_known and not getattr(x, "committed", False)
            if devices != self._devices and not is_movable:
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


def _devices_of(x: Any) -> Any:
    return getattr(getattr(x, "sharding", None), "device_set", None)
