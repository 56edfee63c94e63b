"""Find the leaves of an `eqx.Module` or `nnx.Module` that are trained; unbox arrays of Flax Linen.

Equinox and Flax NNX register their modules as pytrees whose leaves are not all parameters. Equinox
has activation functions and Python numbers among the leaves, and trains the inexact arrays. NNX has
batch statistics and random keys among the leaves, and trains each `nnx.Param`. Both libraries
are looked up in `sys.modules`, so that importing this module imports neither.

Flax's fp8 layers keep scales and histories of maxima in the collection `_overwrite_with_gradient`
(`flax.linen.fp8_ops`). The gradient of such a leaf is its next value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .stored_array import flatten, is_array, is_stored, path_name

_OVERWRITTEN = "_overwrite_with_gradient"
# The variables of `Fp8DotGeneralBase`, for a part of a tree that is given without the collection.
_HISTORIES = {f"{x}_amax_history" for x in ("input", "kernel", "output_grad")}
_FP8_STATE = {*_HISTORIES, *(f"{x}_scale" for x in ("input", "kernel", "output_grad"))}


def trained_leaves(tree: Any) -> list[bool | None]:
    """Return, for each leaf, whether its module trains it; None for a leaf outside of modules.

    Raises:
        ValueError: an `nnx.Module` holds one `Variable` in two places.
    """
    trained: list[bool | None] = []
    for part in jax.tree.leaves(
        tree, is_leaf=lambda x: is_stored(x) or _is_nnx(x) or _is_equinox(x)
    ):
        if _is_nnx(part):
            trained += _trained_by_nnx(part)
        elif _is_equinox(part):
            trained += [_is_inexact(leaf) for leaf in flatten(part)[1]]
        else:
            trained.append(None)
    return trained


def overwritten_leaves(tree: Any) -> list[bool]:
    """Return, for each leaf, whether its gradient is its next value, as in Flax's fp8 layers.

    Such a leaf is recognized by its collection `_overwrite_with_gradient`, by the type of its
    `nnx.Variable`, or by its name if it is beside the other variables of an fp8 layer.
    """
    overwritten: list[bool] = []
    names: list[list[str]] = []
    for path, variable in _pairs(tree, _is_variable):
        is_typed = _is_variable(variable) and _is_overwritten_type(type(variable))
        keys = path_name(path).split(".")
        num = len(flatten(variable)[1])
        overwritten += [is_typed or _OVERWRITTEN in keys] * num
        names += [keys] * num
    beside: dict[tuple[str, ...], set[str]] = {}
    for *parent, name in names:
        beside.setdefault(tuple(parent), set()).add(name)
    return [
        is_found or (name in _FP8_STATE and beside[tuple(parent)] >= _HISTORIES)
        for is_found, (*parent, name) in zip(overwritten, names, strict=True)
    ]


def unboxed(tree: Any, specs: Any, axes: Collection[str]) -> tuple[Any, Any]:
    """Replace the `nn.Partitioned` boxes of Flax Linen in a tree by the arrays that they hold.

    Args:
        tree: the tree.
        specs: the user's tree prefix of `PartitionSpec`s; None: the user gave none.
        axes: the mesh axes that specs made here may name.

    Returns:
        The tree without boxes; and `specs`, or if the user gave none, the specs that the boxes name
        for GSPMD, restricted to `axes`. None if there are no boxes either.
    """
    meta = sys.modules.get("flax.core.meta")
    if meta is None:
        return tree, specs

    def is_leaf(x: Any) -> bool:
        return is_stored(x) or isinstance(x, meta.Partitioned)

    def spec(x: Any) -> PartitionSpec:
        names = x.names if isinstance(x, meta.Partitioned) else ()
        entries = [(name,) if isinstance(name, str) else name or () for name in names]
        kept = [tuple(name for name in entry if name in axes) for entry in entries]
        return PartitionSpec(*(entry or None for entry in kept))

    boxes = [x for x in jax.tree.leaves(tree, is_leaf=is_leaf) if isinstance(x, meta.Partitioned)]
    if not boxes:
        return tree, specs
    if specs is None and axes:
        specs = jax.tree.map(spec, tree, is_leaf=is_leaf)
    return jax.tree.map(
        lambda x: x.value if isinstance(x, meta.Partitioned) else x, tree, is_leaf=is_leaf
    ), specs


def plain_arrays(tree: Any) -> list[str]:
    """Return the paths of floating-point arrays of an `nnx.Module` that are in no `Variable`."""
    return [
        path_name((*outer, *path))
        for outer, part in _pairs(tree, _is_nnx)
        if _is_nnx(part)
        for path, x in _pairs(part, _is_variable)
        if not _is_variable(x) and _is_inexact(x)
    ]


def mutated_leaf(
    before: Mapping[str, ModuleLeaf], after: Mapping[str, ModuleLeaf], returned: Collection[int]
) -> tuple[str, str] | None:
    """Return a leaf of NNX objects that a call of a function has replaced, and then lost.

    Args:
        before: the leaves before the call, from `nnx_leaves`.
        after: the leaves after the call.
        returned: `id`s of the values that the function returned. A leaf that was replaced by one of
            them is not lost, and does not count.

    Returns:
        The path of the first such leaf, and the type of its variable; None if there is none.
    """
    for path, leaf in before.items():
        now = after.get(path, leaf).value
        if now is not leaf.value and id(now) not in returned:
            return path, leaf.kind
    return None


class ModuleLeaf(NamedTuple):
    """A leaf of an NNX object: its value, and the type of its variable.

    Attributes:
        value: the leaf itself.
        kind: the type of its variable, as a user writes it, such as `nnx.BatchStat`.
    """

    value: Any
    kind: str


def nnx_leaves(tree: Any) -> dict[str, ModuleLeaf]:
    """Return the leaves of every NNX object that a function may change in place, by path.

    These objects are `nnx.Module`s and `nnx.Rngs`. An `nnx.State` is not included: a function
    that changes one returns it.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return {}
    leaves = {}
    for outer, part in _pairs(tree, lambda x: isinstance(x, nnx.Pytree)):
        variables = _pairs(part, _is_variable) if isinstance(part, nnx.Pytree) else []
        for path, variable in variables:
            kind = type(variable).__name__
            kind = f"nnx.{kind}" if hasattr(nnx, kind) else kind
            for inner, leaf in jax.tree_util.tree_flatten_with_path(variable)[0]:
                leaves[path_name((*outer, *path, *inner))] = ModuleLeaf(leaf, kind)
    return leaves


def other_variables(tree: Any) -> dict[str, str]:
    """Return the variables beside `nnx.Param`s, outside of modules, whose arrays have gradients.

    An `nnx.State` of a whole module has them: batch statistics, buffers. Nothing says that they are
    not trained, as a module does.

    Returns:
        The type of each variable by its path; nothing if no variable is an `nnx.Param`.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return {}
    variables = [
        (path_name(path), variable)
        for path, variable in _pairs(tree, lambda x: _is_nnx(x) or _is_variable(x))
        if _is_variable(variable) and any(map(_is_inexact, flatten(variable)[1]))
    ]
    if not any(isinstance(variable, nnx.Param) for _, variable in variables):
        return {}
    return {
        path: type(variable).__name__ for path, variable in variables if not _is_trained(variable)
    }


def rng_leaves(tree: Any) -> list[bool]:
    """Return, for each leaf, whether it is a key or counter of `nnx.Rngs`.

    These are equal on all devices.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return [False] * len(jax.tree.leaves(tree))
    parts = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [isinstance(part, nnx.RngState) for part in parts for _ in jax.tree.leaves(part)]


def _trained_by_nnx(module: Any) -> list[bool | None]:
    path_of: dict[int, str] = {}
    trained: list[bool | None] = []
    for path, variable in _pairs(module, _is_variable):
        name = path_name(path)
        if _is_variable(variable) and (first := path_of.setdefault(id(variable), name)) != name:
            raise ValueError(
                f"The module holds one variable as `{first}` and as `{name}`, and a pytree would "
                "make two of it. Split it, which keeps one: `graph, params = nnx.split(module)`, "
                "and `nnx.merge(graph, params)` in the function."
            )
        is_trained = _is_trained(variable)
        leaves = flatten(variable)[1]
        trained += [is_trained and _is_inexact(leaf) for leaf in leaves]
    return trained


def _is_trained(variable: Any) -> bool:
    """Return whether a module trains this variable: a parameter, or the state of an fp8 layer."""
    return isinstance(variable, sys.modules["flax.nnx"].Param) or _is_overwritten_type(
        type(variable)
    )


def _is_overwritten_type(kind: type) -> bool:
    """Return whether a variable type belongs to the collection `_overwrite_with_gradient`."""
    variablelib = sys.modules["flax.nnx"].variablelib
    known = variablelib.VariableTypeCache.get(_OVERWRITTEN)
    return any(base is known or base.__name__ == _OVERWRITTEN for base in kind.__mro__)


def _is_inexact(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _pairs(tree: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[Any, Any]]:
    """Return the paths and leaves of a tree, where a part that `is_leaf` accepts is one leaf."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: is_stored(x) or is_leaf(x))[
        0
    ]


def _is_variable(x: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Variable)


def _is_nnx(x: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module)


def _is_equinox(x: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(x, equinox.Module)
