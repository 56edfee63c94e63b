"""The outer optimizer's state: laid out like the parameters, and cut into fragments like them.

A leaf of the state that has the path and shape of a parameter (momentum) is laid out and cut like
it. Any other leaf (a counter) is kept once for each fragment, because every fragment has its own
turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from .._sharding import path_endings, path_name

AsTree = Callable[[Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True)
class OuterPlan:
    """How an outer optimizer's state is laid out.

    Attributes:
        tx: the optimizer.
        as_tree: builds the tree that the optimizer sees, from one value for each exchanged leaf.
        treedef: the structure of its state.
        owners: for each leaf of the state, the exchanged leaf that it belongs to, or None.
        fragments: the number of fragments.
    """

    tx: optax.GradientTransformation
    as_tree: AsTree
    treedef: Any
    owners: tuple[int | None, ...]
    fragments: int

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformation,
        as_tree: AsTree,
        full: Sequence[jax.ShapeDtypeStruct],
        parts: Sequence[jax.ShapeDtypeStruct],
        fragments: int,
    ) -> OuterPlan:
        """Plan the state of `tx` for leaves that are like `full`, with fragments like `parts`.

        Raises:
            ValueError: for a fragment, `tx` keeps an array that is not a part of the one that it
                keeps for all.
        """
        paths = jax.tree_util.tree_flatten_with_path(as_tree(full))[0]
        leaves = {path_name(path): i for i, (path, _) in enumerate(paths)}
        state = jax.eval_shape(tx.init, as_tree(full))
        named, treedef = jax.tree_util.tree_flatten_with_path(state)
        of_part = jax.tree.leaves(jax.eval_shape(tx.init, as_tree(parts)))
        owners = []
        for (path, x), part in zip(named, of_part, strict=True):
            found = (leaves[name] for name in path_endings(path) if name in leaves)
            is_like = jnp.issubdtype(x.dtype, jnp.floating)  # a counter is not, whatever its name
            owner = next((i for i in found if is_like and full[i].shape == x.shape), None)
            expected = x.shape if owner is None else parts[owner].shape
            if part.shape != expected:
                raise ValueError(
                    f"`outer` keeps an array of shape {x.shape} as `{path_name(path)}`, and one of "
                    f"{part.shape} for a fragment, which is no part of it. Take `fragments=1`, or "
                    "an optimizer that keeps arrays of the parameters' shapes, such as `optax.sgd`."
                )
            owners.append(owner)
        return cls(tx, as_tree, treedef, tuple(owners), fragments)

    def init(self, anchors: Sequence[Array]) -> list[Array]:
        """The leaves of the state before the first round."""
        state = jax.tree.leaves(self.tx.init(self.as_tree(anchors)))
        return [
            jnp.broadcast_to(x, (self.fragments, *jnp.shape(x))) if owner is None else x
            for x, owner in zip(state, self.owners, strict=True)
        ]

    def update(
        self, gradients: Sequence[Array], state: Sequence[Array], anchors: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """The new outer parameters and the new state of a fragment."""
        params = self.as_tree(anchors)
        old = jax.tree.unflatten(self.treedef, state)
        updates, new = self.tx.update(self.as_tree(gradients), old, params)
        return jax.tree.leaves(optax.apply_updates(params, updates)), jax.tree.leaves(new)
