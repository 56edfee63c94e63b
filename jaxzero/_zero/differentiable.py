"""Check that a differentiated argument can have gradients, and that its module trains something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._sharding import flatten, is_array, path_name, plain_arrays, trained_leaves
from .._warnings import warn
from .arguments import Argument


def check_differentiable(argument: Argument, leaves: Sequence[Any], allow_int: bool) -> None:
    """Raise `ValueError` if a leaf of a differentiated argument cannot have a gradient."""
    for leaf in argument.plan.leaves if argument.plan else ():
        if leaf.codec is not None:
            raise ValueError(
                f"{argument.name}, leaf `{leaf.path}`: it is stored as messages of "
                f"{leaf.codec}, which cannot be trained. Pass it in an argument that is not in "
                "`argnums`."
            )
    value = argument.rebuild(leaves)
    _check_is_trained(argument, plain_arrays(value))
    paths, found, _ = flatten(value)
    for path, leaf, kind in zip(paths, found, trained_leaves(value), strict=True):
        if kind is not None:  # in a module: leaves that it does not train get None as gradient
            continue
        if is_array(leaf) and (allow_int or jnp.issubdtype(leaf.dtype, jnp.inexact)):
            continue
        shown = leaf.dtype if is_array(leaf) else type(leaf).__name__
        raise ValueError(
            f"{argument.name}, leaf `{path_name(path)}`: cannot differentiate with respect to "
            f"{shown}. Pass it in an argument that is not in `argnums`, or use "
            "`allow_int=True`."
        )


def _check_is_trained(argument: Argument, plain: Sequence[str]) -> None:
    """Raise `ValueError` if a module trains none of its leaves; warn if it has plain arrays.

    Args:
        argument: the differentiated argument.
        plain: the paths of arrays that its `nnx.Module`s hold, and not in an `nnx.Variable`.
    """
    kinds = argument.module_trains
    is_trained = not kinds or any(kind is not False for kind in kinds)
    if is_trained and not plain:
        return
    of_plain = (
        f" Among them are plain arrays, `{plain[0]}` the first of {len(plain)}: make those to be "
        "trained `nnx.Param(array)`, and others `nnx.Variable(array)`."
    )
    if not is_trained:
        raise ValueError(
            f"{argument.name} holds no leaf that its module trains, so nothing would get a "
            "gradient. Of an `nnx.Module` each `nnx.Param` of floats is trained, of an "
            f"`eqx.Module` each array of floats.{of_plain if plain else ''}"
        )
    warn(
        f"{argument.name}: an `nnx.Module` trains its `nnx.Param`s, and the gradient of other "
        f"leaves is None.{of_plain}"
    )
