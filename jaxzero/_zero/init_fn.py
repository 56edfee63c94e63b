"""Run a function that makes parameters or optimizer state under `jit`, which returns only arrays.

An Equinox or NNX module also holds functions and Python values, which are kept aside.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from .._sharding import flatten, is_array, rebuild, statics_of, trained_leaves


class Initializer:
    """A function that calls `init_fn` and returns the list of its arrays, so that `jit` can run it.

    Leaves of an `eqx.Module` or `nnx.Module` that are not arrays are returned by `shapes` only.
    Elsewhere a Python number becomes an array, as it does when `jit` returns it.
    """

    def __init__(self, init_fn: Callable):
        self.init_fn = init_fn
        self._context = jax.sharding.get_abstract_mesh()

    def __call__(self, *args: Any) -> list[Any]:
        # Without the mesh of the program, if the caller has none: where Flax Linen finds a mesh, it
        # asks for the axes that `nn.with_partitioning` names.
        has_none = self._context.empty
        with jax.sharding.use_abstract_mesh(self._context) if has_none else nullcontext():
            tree = self.init_fn(*args)
        leaves = flatten(numbers_as_arrays(tree))[1]
        return [x for x in leaves if is_array(x)]

    def shapes(self, *args: Any) -> Any:
        """The tree that `init_fn` returns, with `ShapeDtypeStruct`s for its arrays."""
        _check_arrays(args)
        kept: dict[str, Any] = {}

        def run(*args: Any) -> list[Any]:
            tree = numbers_as_arrays(self.init_fn(*args))
            _, leaves, treedef = flatten(tree)
            kept.update(treedef=treedef, statics=statics_of(leaves))
            return [x for x in leaves if is_array(x)]

        arrays = jax.eval_shape(run, *args)
        if "Tracer(" in str(kept["treedef"]):
            raise ValueError(
                "`init_fn` returns a module that holds an array as a static attribute, as an "
                "`nnx.Module` does in `jax.jit` with a plain array (`self.w = array`). Make it "
                "`nnx.Param(array)` to train it, or `nnx.Variable(array)`; or lay out a module "
                "that is made outside of `jit`: `zero.shard(Model(...))`."
            )
        return rebuild(kept["treedef"], kept["statics"], arrays)


def numbers_as_arrays(tree: Any) -> Any:
    """The tree with arrays for its Python numbers, except those in a module."""
    _, leaves, treedef = flatten(tree)
    pairs = zip(leaves, trained_leaves(tree), strict=True)
    return jax.tree.unflatten(
        treedef,
        [
            jnp.asarray(x) if kind is None and isinstance(x, int | float | complex) else x
            for x, kind in pairs
        ],
    )


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
