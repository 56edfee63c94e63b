"""Run a user's initialization function under `jit`, which can return only arrays.

An Equinox or NNX module also holds functions and Python values, which are kept aside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._sharding import flatten, is_array, rebuild, statics_of, trained_leaves


class Initializer:
    """A function that calls `init_fn` and returns the list of its arrays, so that `jit` can run it.

    Leaves of an `eqx.Module` or `nnx.Module` that are not arrays are returned by `shapes` only.
    Elsewhere a Python number becomes an array, as it does when `jit` returns it.
    """

    def __init__(self, init_fn: Callable):
        self.init_fn = init_fn

    def __call__(self, *args: Any) -> list[Any]:
        return [x for x in self._leaves(self.init_fn(*args)) if is_array(x)]

    def shapes(self, *args: Any) -> Any:
        """The tree that `init_fn` returns, with `ShapeDtypeStruct`s for its arrays."""
        _check_arrays(args)
        kept: dict[str, Any] = {}

        def run(*args: Any) -> list[Any]:
            tree = self.init_fn(*args)
            leaves = self._leaves(tree)
            kept.update(treedef=flatten(tree)[2], statics=statics_of(leaves))
            return [x for x in leaves if is_array(x)]

        arrays = jax.eval_shape(run, *args)
        return rebuild(kept["treedef"], kept["statics"], arrays)

    def _leaves(self, tree: Any) -> list[Any]:
        leaves = flatten(tree)[1]
        return [
            jax.numpy.asarray(x) if kind is None and isinstance(x, int | float | complex) else x
            for x, kind in zip(leaves, trained_leaves(tree), strict=True)
        ]


def _check_arrays(args: tuple[Any, ...]) -> None:
    """Raise `ValueError` unless all leaves are arrays and numbers, which `jit` can take."""
    for i, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg):
            is_number = isinstance(leaf, int | float | complex)
            if not is_number and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise ValueError(
                    f"Argument {i} for `init_fn` must hold arrays and numbers only; got {leaf!r}. "
                    "Bind other values first: `functools.partial(init_fn, ...)`."
                )
