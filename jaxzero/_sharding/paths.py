"""Name leaves by their tree path, and expand tree prefixes to one entry for each leaf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import jax


class StoredKey:
    """The last entry in the path of a `StoredArray`'s data; it prints as the empty string.

    So `jax.tree_util.keystr(path)` gives the path of the parameter, with one more separator at its
    end if a separator is set. Code that reads `path[-1].key` fails instead of getting a wrong name.
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
    """A tree path as text, such as `layers.0.kernel`; the root is `.`."""
    named = tuple(key for key in path if not isinstance(key, StoredKey))
    return jax.tree_util.keystr(named, simple=True, separator=".") or "."


def path_endings(path: tuple[Any, ...]) -> Iterator[str]:
    """The names of a path and of all its ends, the longest first.

    In an optimizer's state, the path of an array that belongs to a parameter ends with its path.
    """
    return (path_name(path[i:]) for i in range(len(path) + 1))


def spread_prefix(prefix: Any, tree: Any, kind: type) -> list[Any]:
    """For each leaf of `tree`, the leaf of a tree prefix that covers it.

    Args:
        prefix: a tree prefix of `tree`, with leaves of type `kind`.
        tree: the full tree.
        kind: type of the prefix's leaves; they count as leaves even if JAX would flatten them.

    Raises:
        ValueError: `prefix` is not a tree prefix of `tree`.
    """

    def is_leaf(x: Any) -> bool:
        return isinstance(x, kind)

    spread = jax.tree.map(
        lambda leaf, subtree: jax.tree.map(lambda _: leaf, subtree), prefix, tree, is_leaf=is_leaf
    )
    return jax.tree.leaves(spread, is_leaf=is_leaf)
