"""Which trees a `Zero` has laid out, so that a tree met later is known for what it is.

A stored tree is plain: global arrays, perhaps padded. Its true shapes are kept here,
found again by the tree's structure and stored shapes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ._partition import Leaf, TreePlan, path_name


def _first_difference(one: TreePlan, other: TreePlan) -> int | None:
    """The first leaf that is not the same array, stored in the same way."""
    pairs = zip(one.leaves, other.leaves, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if _content(a) != _content(b)), None)


def _content(leaf: Leaf) -> tuple:
    """What a stored array does not say of itself. Of messages that is the type, too."""
    return leaf.shape, leaf.codec, leaf.codec and leaf.dtype


def _with_known_specs(plan: TreePlan, known: TreePlan) -> TreePlan:
    """A copy of a tree that is laid out again without `specs` is laid out as the tree was."""
    if any(leaf.other_axes for leaf in plan.leaves):
        return plan
    pairs = zip(plan.leaves, known.leaves, strict=True)
    return TreePlan(
        plan.treedef, tuple(dataclasses.replace(old, dtype=new.dtype) for new, old in pairs)
    )


class Registry:
    """The plans of all trees laid out so far."""

    def __init__(self):
        self._plans: dict[Any, list[TreePlan]] = {}

    def add(self, plan: TreePlan) -> TreePlan:
        """Remember `plan`, changed if need be so that it can be told from the others.

        Two trees of the same structure may have different shapes that padding makes equal,
        or different codecs with equal messages. Then the later one is padded by one more unit.
        """
        known = self._plans.setdefault(plan.treedef, [])
        while True:
            alike = [old for old in known if old.stored_shapes == plan.stored_shapes]
            if not alike:
                known.append(plan)
                return plan
            new, differing = plan.leaves, _first_difference(alike[0], plan)
            if differing is None:
                plan = _with_known_specs(plan, alike[0])
                known[known.index(alike[0])] = plan
                return plan
            layout = new[differing].layout
            assert layout is not None  # whole leaves differ in their stored shapes
            layout = dataclasses.replace(layout, extra=layout.extra + 1)
            leaf = dataclasses.replace(new[differing], layout=layout)
            plan = TreePlan(plan.treedef, (*new[:differing], leaf, *new[differing + 1 :]))

    def find(self, tree: Any) -> TreePlan | None:
        """The plan of a stored tree, with the dtypes that the tree has now; or None."""
        leaves, treedef = jax.tree.flatten(tree)
        if not all(
            hasattr(leaf, "dtype") for leaf in leaves
        ):  # a number where an array was laid out
            return None
        shapes = tuple(tuple(leaf.shape) for leaf in leaves)
        for plan in self._plans.get(treedef, ()):
            if plan.stored_shapes == shapes:
                pairs = zip(plan.leaves, leaves, strict=True)
                now = (
                    dataclasses.replace(leaf, dtype=x.dtype) if leaf.codec is None else leaf
                    for leaf, x in pairs
                )
                return TreePlan(treedef, tuple(now))
        return None

    def explain(self, tree: Any) -> str:
        """How a tree that `find` does not know differs from those it does."""
        remedy = "Lay it out with `zero.init` or `zero.shard` first."
        if not self._plans:
            return f"this `Zero` has laid out no tree yet. {remedy}"
        paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
        given = {path_name(path): leaf for path, leaf in paths_and_leaves}
        if treedef in self._plans:
            plan = self._plans[treedef][-1]
            for leaf, (_, x) in zip(plan.leaves, paths_and_leaves, strict=True):
                if not hasattr(x, "dtype"):
                    return (
                        f"the leaf `{leaf.path}` is of type {type(x).__name__}, but was laid out "
                        f"as an array. {remedy}"
                    )
                shape = tuple(x.shape)
                if shape != leaf.stored_shape:
                    return (
                        f"the leaf `{leaf.path}` has shape {shape}, but it was laid out as "
                        f"{leaf.stored_shape} (true shape {leaf.shape}). The tree has changed "
                        f"since then. {remedy}"
                    )
        return f"{self._structure_difference(given)} {remedy}"

    def _structure_difference(self, given: dict[str, Any]) -> str:
        def distance(plan: TreePlan) -> int:
            return len(given.keys() ^ {leaf.path for leaf in plan.leaves})

        nearest = min((p for plans in self._plans.values() for p in plans), key=distance)
        known = {leaf.path for leaf in nearest.leaves}
        changes = [f"`{path}` is new" for path in given if path not in known]
        changes += [f"`{path}` is gone" for path in known if path not in given]
        what = ", ".join(changes[:3]) or "its containers are of other types"
        return f"the tree is none that this `Zero` has laid out; next to the nearest, {what}."
