"""Names of leaves: tree paths as text, and tree prefixes spread over the leaves they stand for."""

from __future__ import annotations

from typing import Any, NoReturn

import jax


class StoredKey:
    """The last entry of the path to the data of a `StoredArray`: the empty string when printed.

    `jax.tree_util.keystr(path)` is then that of any other leaf, but for a separator at its end
    where one is asked for. Code that reads `path[-1].key` fails rather than reading a wrong name.
    """

    def __str__(self) -> str:
        return ""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"The path of a parameter that `Zero` stores padded or encoded ends with an entry that "
            f"has no `{name}`: the entry before it is the last that names the parameter. Wrap an "
            "optimizer that reads paths: `tx = zero.optimizer(tx)`."
        )

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
