"""Convert trees of arrays to dictionaries from dotted path to leaf, and back."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxzero._sharding import is_stored


class NamedLeaves(NamedTuple):
    """The leaves of a tree by dotted path."""

    leaves: dict[str, Any]  # in the order of the tree
    rebuild: Callable[[Mapping[str, Any]], Any]  # path -> new leaf, to a tree of this structure


def named_leaves(tree: Any) -> NamedLeaves:
    """Name the leaves of a tree: `layers.0.up.kernel`.

    Dictionary keys, positions in lists, and attributes (of Equinox modules, say) are joined by
    dots. An `nnx.Param` or other variable of Flax is named by its place, without `value`.

    Raises:
        ValueError: a leaf is not an array, or two have one name.
    """
    leaves: dict[str, Any] = {}
    paths = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, nnx.Variable) or is_stored(x)
    )
    for path, found in paths:
        is_variable = isinstance(found, nnx.Variable)
        value = jax.tree.leaves(found, is_leaf=is_stored)[0] if is_variable else found
        name = ".".join(str(_key(entry)) for entry in path)
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise ValueError(
                f"The leaf `{name}` is not an array; got {type(value).__name__}. Keep functions "
                "and settings out of the tree (`nnx.split`, `equinox.filter`)."
            )
        if name in leaves:
            raise ValueError(f"Two leaves of the tree are called `{name}`: keys must hold no dots.")
        leaves[name] = value
    treedef = jax.tree.structure(tree)

    def rebuild(others: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(treedef, [others[name] for name in leaves])

    return NamedLeaves(leaves, rebuild)


def _key(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry
