"""Names of leaves: tree paths as text, and tree prefixes spread over the leaves they stand for."""

from __future__ import annotations

from typing import Any

import jax


class StoredKey:
    """The last entry of the path to the data of a `StoredArray`. It has no name and no index.

    So the path of a padded leaf prints like that of any other leaf, and code that reads
    `path[-1].key` fails rather than reading a wrong name.
    """

    def __str__(self) -> str:
        return ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredKey)

    def __hash__(self) -> int:
        return hash(StoredKey)


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as a person writes it: `layers.0.kernel`; the root is `.`."""
    named = tuple(key for key in path if not isinstance(key, StoredKey))
    return jax.tree_util.keystr(named, simple=True, separator=".") or "."


def spread_prefix(prefix: Any, tree: Any, kind: type) -> list[Any]:
    """For each leaf of `tree`, the leaf of a tree prefix that stands for it.

    Args:
        prefix: its leaves are of type `kind`.
        tree: what it is a prefix of.
        kind: of the prefix's leaves, even where JAX would take them apart.

    Raises:
        ValueError: it is no prefix of `tree`.
    """

    def is_leaf(x: Any) -> bool:
        return isinstance(x, kind)

    spread = jax.tree.map(
        lambda leaf, subtree: jax.tree.map(lambda _: leaf, subtree), prefix, tree, is_leaf=is_leaf
    )
    return jax.tree.leaves(spread, is_leaf=is_leaf)
