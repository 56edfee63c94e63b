"""Run an initialization function under `jit`, which returns only arrays: modules are split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._sharding import flatten, is_array, rebuild, statics_of, trained_leaves


class Initializer:
    """Call `init_fn`; the result is the list of its arrays. `shapes` traces it once more.

    What an `eqx.Module` or `nnx.Module` holds besides is kept, and is part of `shapes`. Elsewhere
    a Python number becomes an array, as it does when `jit` returns it.
    """

    def __init__(self, init_fn: Callable):
        self.init_fn = init_fn

    def __call__(self, *args: Any) -> list[Any]:
        return [x for x in self._leaves(self.init_fn(*args)) if is_array(x)]

    def shapes(self, *args: Any) -> Any:
        """The tree that `init_fn` returns, with `ShapeDtypeStruct`s for its arrays."""
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
