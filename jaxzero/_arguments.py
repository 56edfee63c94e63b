"""What each argument of a call is: parameters, batch, replicated; and whether it fits.

All mistakes that can be seen without tracing are found here, and named by argument and
tree path.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._mesh import AXES
from ._partition import TreePlan, axes_of, path_name, spread_prefix
from ._registry import Registry
from ._simulate import AnyMesh

BATCH = PartitionSpec(AXES)


@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf that is no array (a string, a function, a Python number): passed on as it is."""

    value: Any

    def __eq__(self, other: object) -> bool:  # 1 == True == 1.0, but they trace differently
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return self.value == other.value

    def __hash__(self):
        return hash((type(self.value), self.value))


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a call: everything but its arrays."""

    name: str
    treedef: Any
    statics: tuple[Static | None, ...]  # for each leaf; None: an array
    plan: TreePlan | None  # a tree that `Zero` laid out
    specs: tuple[PartitionSpec, ...]  # for each array, over `node` and `local`

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """The argument, with these arrays as its leaves."""
        remaining = iter(arrays)
        leaves = [next(remaining) if s is None else s.value for s in self.statics]
        return jax.tree.unflatten(self.treedef, leaves)


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call, hashable, so that programs can be kept by it."""

    arguments: tuple[Argument, ...]
    num_positional: int
    keywords: tuple[str, ...]

    def rebuild(self, arrays: Sequence[Sequence[Any]]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments from the arrays of each."""
        pairs = zip(self.arguments, arrays, strict=True)
        values = [argument.rebuild(leaves) for argument, leaves in pairs]
        keywords = zip(self.keywords, values[self.num_positional :], strict=True)
        return values[: self.num_positional], dict(keywords)


def resolve(
    function: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    argnums: Sequence[int],
    in_specs: Sequence[Any] | None,
    registry: Registry,
) -> tuple[Call, list[list[Any]]]:
    """Decide what every argument is.

    Args:
        function: the user's; gives names to positions.
        args: positional arguments.
        kwargs: keyword arguments; replicated.
        argnums: positions that must be sharded parameter trees.
        in_specs: for each position None or a tree prefix of `PartitionSpec`s.
        registry: knows the trees that were laid out.

    Returns:
        The call, and the arrays of each argument.

    Raises:
        ValueError: see the messages.
    """
    names = _names(function, len(args)) + [f"`{key}` (keyword)" for key in kwargs]
    for number in argnums:
        if not 0 <= number < len(args):
            raise ValueError(
                f"`argnums` asks for argument {number}, but {len(args)} positional arguments "
                "were given. Pass parameters by position."
            )
    given = _spec_for_each(in_specs, len(args), argnums) + [None] * len(kwargs)
    values = [*args, *kwargs.values()]
    plans = [registry.find(value) for value in values]
    for i, spec in enumerate(given):
        if spec is not None and not is_array(values[i]) and plans[i] is not None:
            raise ValueError(
                f"`in_specs[{i}]` is for {names[i]}, a tree that `Zero` lays out itself. Give "
                "`None` there."
            )
        plans[i] = plans[i] if spec is None else None
    for number in argnums:
        if plans[number] is None and jax.tree.leaves(values[number]):
            raise ValueError(f"{names[number]}: {registry.explain(values[number])}")
    batch = _find_batch(values[: len(args)], plans, given, argnums)
    if batch is not None:
        _check_equal_rows(names[batch], values[batch])
        plans[batch], given[batch] = None, BATCH
    elif in_specs is None:
        _check_no_keyword_batch(names[len(args) :], values[len(args) :], plans[len(args) :])
    pairs = zip(names, values, plans, given, strict=True)
    resolved = [_argument(*each) for each in pairs]
    arguments = [argument for argument, _ in resolved]
    arrays = [leaves for _, leaves in resolved]
    if batch is not None:
        _check_for_second_batch(batch, arguments, arrays, given)
    return Call(tuple(arguments), len(args), tuple(kwargs)), arrays


def is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _find_batch(
    values: Sequence[Any],
    plans: Sequence[TreePlan | None],
    given: Sequence[Any],
    argnums: Sequence[int],
) -> int | None:
    """The first argument with rows that is neither a sharded tree nor has a spec.

    There is none behind one that `in_specs` splits. If all are sharded trees, a bare array that has
    the shape of a sharded one is the batch after all.
    """
    free = []
    for i, value in enumerate(values):
        specs = jax.tree.leaves(given[i], is_leaf=lambda x: isinstance(x, PartitionSpec))
        if any(split_dim(spec) is not None for spec in specs):
            break
        if given[i] is None and i not in argnums and _has_rows(value):
            free.append(i)
    unplanned = [i for i in free if plans[i] is None]
    bare = [i for i in free if is_array(values[i])]
    return next(iter(unplanned or bare), None)


def _check_equal_rows(name: str, value: Any) -> None:
    """The rows of a batch are its examples, so all its leaves have as many."""
    paths = jax.tree_util.tree_flatten_with_path(value)[0]
    rows = {path_name(path): x.shape[0] for path, x in paths if is_array(x) and len(x.shape)}
    if len(set(rows.values())) > 1:
        first, other = next((a, b) for a in rows for b in rows if rows[a] != rows[b])
        raise ValueError(
            f"{name} is taken as the batch, whose dim 0 is split over all devices, but its leaf "
            f"`{first}` has {rows[first]} rows and `{other}` has {rows[other]}. Say with "
            "`in_specs`, one entry for each positional argument, what is split: "
            "`zero.batch_spec` or `PartitionSpec()`, or a tree of them."
        )


def _check_no_keyword_batch(
    names: Sequence[str], values: Sequence[Any], plans: Sequence[TreePlan | None]
) -> None:
    for name, value, plan in zip(names, values, plans, strict=True):
        if plan is None and _has_rows(value):
            raise ValueError(
                f"{name} would be given whole to every device, and no positional argument is the "
                "batch. Pass the batch by position."
            )


def _has_rows(value: Any) -> bool:
    return any(is_array(leaf) and len(leaf.shape) > 0 for leaf in jax.tree.leaves(value))


def _names(function: Callable, num: int) -> list[str]:
    try:
        parameters = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # built-in functions have no signature
        parameters = []
    known = [f"`{name}` (argument {i})" for i, name in enumerate(parameters[:num])]
    return known + [f"argument {i}" for i in range(len(known), num)]


def _spec_for_each(in_specs: Any, num: int, argnums: Sequence[int]) -> list[Any]:
    if in_specs is None:
        return [None] * num
    if isinstance(in_specs, PartitionSpec) or not isinstance(in_specs, Sequence):
        raise ValueError(
            "`in_specs` must be a sequence with one entry for each positional argument; "
            f"got {in_specs!r}. Use `None` for an argument that needs no spec."
        )
    if len(in_specs) > num:
        raise ValueError(
            f"`in_specs` has {len(in_specs)} entries for {num} positional arguments. Give one "
            "for each, `None` where the default will do."
        )
    for i in argnums:
        if i < len(in_specs) and in_specs[i] is not None:
            raise ValueError(
                f"`in_specs[{i}]` is for a differentiated argument, which `Zero` lays out "
                "itself. Give `None` there."
            )
    return [*in_specs, *[None] * (num - len(in_specs))]


def _argument(
    name: str, value: Any, plan: TreePlan | None, spec: Any
) -> tuple[Argument, list[Any]]:
    leaves, treedef = jax.tree.flatten(value)
    for leaf in leaves:
        if not is_array(leaf) and not isinstance(leaf, Hashable):
            raise ValueError(
                f"{name} holds a {type(leaf).__name__}, which is neither an array nor hashable. "
                "Close over it, or register its type as a pytree."
            )
    statics = tuple(None if is_array(leaf) else Static(leaf) for leaf in leaves)
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    specs = [PartitionSpec()] * len(leaves)
    if plan is None and spec is not None:
        try:
            specs = spread_prefix(spec, value, PartitionSpec)
        except ValueError as error:
            raise ValueError(
                f"`in_specs` does not fit {name}: {error}. Give a `PartitionSpec`, or a tree "
                "of them that is a prefix of the argument."
            ) from error
    array_specs = tuple(
        s if len(leaf.shape) else PartitionSpec()
        for s, leaf, static in zip(specs, leaves, statics, strict=True)
        if static is None
    )
    return Argument(name, treedef, statics, plan, array_specs), arrays


def _check_for_second_batch(
    batch: int,
    arguments: Sequence[Argument],
    arrays: Sequence[Sequence[Any]],
    given: Sequence[Any],
) -> None:
    """A second argument of the batch's length is a label far more often than a table."""
    num_rows = next(leaf.shape[0] for leaf in arrays[batch] if len(leaf.shape))
    for i, (argument, leaves) in enumerate(zip(arguments, arrays, strict=True)):
        if argument.plan is not None or given[i] is not None:
            continue
        for leaf in leaves:
            if len(leaf.shape) and leaf.shape[0] == num_rows and num_rows > 1:
                raise ValueError(
                    f"{argument.name} has {num_rows} rows like the batch, "
                    f"{arguments[batch].name}, but would be given whole to every device. Say which "
                    "is meant with `in_specs`, one entry for each positional argument: "
                    "`zero.batch_spec` splits it, `PartitionSpec()` does not. Or put both in "
                    "one argument."
                )


def check_rows(
    call: Call, arrays: Sequence[Sequence[Any]], mesh: AnyMesh, microbatches: int
) -> None:
    """Raise `ValueError` unless everything split over our axes divides evenly."""
    for argument, leaves in zip(call.arguments, arrays, strict=True):
        if argument.plan is not None:
            continue
        value = argument.rebuild(leaves)
        paths = [
            path_name(path)
            for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]
            if is_array(leaf)
        ]
        for path, leaf, spec in zip(paths, leaves, argument.specs, strict=True):
            dim = split_dim(spec)
            if dim is None:
                continue
            names = [axis for axis in axes_of(PartitionSpec(spec[dim])) if axis in AXES]
            num = math.prod(mesh.shape[axis] for axis in names) * microbatches
            if dim >= len(leaf.shape) or leaf.shape[dim] % num:
                raise ValueError(
                    f"{argument.name}, leaf `{path}`: dim {dim} of shape {tuple(leaf.shape)} is "
                    f"split over {num // microbatches} devices x {microbatches} micro-batches "
                    f"and must be a multiple of {num}. Pad or drop rows, or say with "
                    "`in_specs` that it is not split (`PartitionSpec()`)."
                )


def split_dim(spec: PartitionSpec) -> int | None:
    """The dim that a spec splits over our axes."""
    for dim, entry in enumerate(spec):
        names = (entry,) if isinstance(entry, str) else entry or ()
        if any(name in AXES for name in names):
            return dim
    return None


def check_differentiable(argument: Argument, leaves: Sequence[Any], allow_int: bool) -> None:
    """Raise `ValueError` for a leaf that has no gradient."""
    for leaf in argument.plan.leaves if argument.plan else ():
        if leaf.codec is not None:
            raise ValueError(
                f"{argument.name}, leaf `{leaf.path}`: it is stored as messages of "
                f"{leaf.codec}, which cannot be trained. Pass it in an argument that is not in "
                "`argnums`."
            )
    paths = jax.tree_util.tree_flatten_with_path(argument.rebuild(leaves))[0]
    for path, leaf in paths:
        if is_array(leaf) and (allow_int or jnp.issubdtype(leaf.dtype, jnp.inexact)):
            continue
        kind = leaf.dtype if is_array(leaf) else type(leaf).__name__
        raise ValueError(
            f"{argument.name}, leaf `{path_name(path)}`: cannot differentiate with respect to "
            f"{kind}. Pass it in an argument that is not in `argnums`, or use "
            "`allow_int=True`."
        )
