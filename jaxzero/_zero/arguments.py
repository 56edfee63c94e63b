"""Classify each argument of a call: as sharded parameters, as the batch, or as replicated.

Mistakes that can be seen without tracing are errors that name the argument and the tree path.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from .._mesh import AXES, AnyMesh, is_one_node
from .._program import OF_MUTABLE, is_mutable
from .._sharding import (
    Registry,
    Static,
    TreeLayout,
    arrays_of,
    axes_of,
    flatten,
    is_array,
    is_stored,
    named_leaves,
    of_arrays,
    path_name,
    rebuild,
    split_dim,
    spread_prefix,
    statics_of,
    trained_leaves,
    unwrapped,
)
from .batch_choice import (
    BatchArgnums,
    asked_batches,
    find_batch,
    is_split,
    rows_of,
    warn_of_no_batch,
)

BATCH = PartitionSpec(AXES)


def node_microbatches(microbatches: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Return each node's micro-batches by its share; the largest share runs `microbatches`."""
    return tuple(microbatches * share // max(shares) for share in shares)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options given to `value_and_grad`, or (`has_gradients` False) to `apply`."""

    argnums: tuple[int, ...]
    has_aux: bool = False
    microbatches: int = 1
    weighted: bool = False
    reduce: tuple[tuple[str, ...], Any] | None = None  # reductions of outputs: names, treedef
    has_gradients: bool = True
    shares: tuple[int, ...] | None = None  # of each node, divided by their gcd; None: all equal
    halves: bool = False  # whether gradients of two half-batches are compared
    # Reductions of gradients: names, treedef; None: "max" for `overwritten_leaves`, else "mean".
    gradient_reduce: tuple[tuple[str, ...], Any] | None = None
    row_statistics: str | None = None  # "device": no warning of statistics over a device's rows

    @property
    def node_microbatches(self) -> tuple[int, ...] | None:
        """How many micro-batches the devices of each node run; None if all run `microbatches`."""
        return self.shares and node_microbatches(self.microbatches, self.shares)


def argument_numbers(argnums: Any, name: str = "argnums") -> tuple[int, ...]:
    """Return `argnums` as a tuple of integers. Error messages call it `name`.

    Raises:
        ValueError: `argnums` is neither an integer nor a sequence of integers.
    """
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(numbers, Sequence) or not all(isinstance(x, int) for x in numbers):
        raise ValueError(
            f"`{name}` must be the position of an argument, or several; got {argnums!r}. Of an "
            "`nnx.Module` every `nnx.Param` is differentiated, without a filter."
        )
    return tuple(numbers)


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a call, without its arrays.

    Attributes:
        name: the argument's name in error messages.
        treedef: the argument's structure, in which a `StoredArray` counts as one leaf.
        statics: for each leaf, its value as a `Static` if it is not an array; None if it is one.
        layout: the layouts of a sharded tree; None if the argument holds no sharded arrays.
        specs: for each array, its `PartitionSpec` over `node` and `local`; unused with a layout.
        module_trains: for each array, whether the `eqx.Module` or `nnx.Module` that holds it trains
            it; None if it is in no module.
    """

    name: str
    treedef: Any
    statics: tuple[Static | None, ...]
    layout: TreeLayout | None
    specs: tuple[PartitionSpec, ...]
    module_trains: tuple[bool | None, ...]

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether each leaf of `layout` gets a gradient if the argument is differentiated."""
        leaves = self.layout.leaves if self.layout else ()
        return tuple(
            jnp.issubdtype(leaf.dtype, jnp.inexact) and kind is not False
            for leaf, kind in zip(leaves, self.module_trains, strict=self.layout is not None)
        )

    def where(self, i: int) -> str:
        """Return the argument's name and the tree path of its `i`-th array, for error messages."""
        leaves = named_leaves(jax.tree.unflatten(self.treedef, range(len(self.statics))))
        pairs = zip(leaves, self.statics, strict=True)
        path = [path for (path, _), static in pairs if static is None][i]
        return self.name if path == "." else f"{self.name}, leaf `{path}`"

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Build the argument from new values of its arrays. The result has no `StoredArray`s."""
        return rebuild(self.treedef, unwrapped(self.statics), arrays)


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call. Keyword arguments come last; `keywords` are their names."""

    arguments: tuple[Argument, ...]
    num_positional: int
    keywords: tuple[str, ...]

    def sharded(self) -> Iterator[tuple[int, int, Argument, TreeLayout]]:
        """Yield `(position, index of first leaf, argument, layout)` of each sharded argument."""
        start = 0
        for number, argument in enumerate(self.arguments):
            if argument.layout is not None:
                yield number, start, argument, argument.layout
                start += len(argument.layout.leaves)

    def split(self, arrays: Sequence[Sequence[Any]]) -> Iterator[tuple[Argument, Any, int]]:
        """Yield `(argument, array, index in the argument)` for each array of the batch."""
        for argument, leaves in zip(self.arguments, arrays, strict=True):
            if argument.layout is None:
                for i, (x, spec) in enumerate(zip(leaves, argument.specs, strict=True)):
                    if split_dim(spec) is not None:
                        yield argument, x, i

    def rebuild(self, arrays: Sequence[Sequence[Any]]) -> tuple[list[Any], dict[str, Any]]:
        """Build the positional and the keyword arguments from the arrays of each argument."""
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
    batch_argnums: BatchArgnums,
    in_specs: Sequence[Any] | None,
    registry: Registry,
    states: Registry,
    num_devices: int,
) -> tuple[Call, list[list[Any]]]:
    """Classify each argument of a call as a sharded parameter tree, the batch, or replicated.

    Args:
        function: the user's function; messages take the names of arguments from its signature.
        args: positional arguments.
        kwargs: keyword arguments.
        argnums: positions of arguments that must be sharded parameter trees.
        batch_argnums: positions or names of the batch arguments; None to find the batch.
        in_specs: for each position, None or a tree prefix of `PartitionSpec`s.
        registry: looks up the layouts of parameter trees.
        states: looks up the layouts of optimizer states.
        num_devices: number of devices that share the batch.

    Returns:
        The classified arguments, and for each argument its arrays in stored form (padded or
        encoded, if it is a parameter tree).

    Raises:
        ValueError: an argument of `argnums` is not a sharded tree, the batch is ambiguous, or
            `batch_argnums` or `in_specs` do not fit the arguments.
    """
    parameters = _parameter_names(function)
    names = _names(parameters, len(args)) + [f"`{key}` (keyword)" for key in kwargs]
    for number in argnums:
        if not 0 <= number < len(args):
            raise ValueError(
                f"`argnums` asks for argument {number}, but {len(args)} positional arguments "
                "were given. Pass parameters by position."
            )
    given = _spec_for_each(in_specs, len(args), argnums) + [None] * len(kwargs)
    values = [*args, *kwargs.values()]
    _check_mutable(values, names)
    _check_specs(given, values, names, registry)
    asked = asked_batches(batch_argnums, len(args), tuple(kwargs), parameters)
    is_told = asked is not None or in_specs is not None
    if asked is None:
        asked = find_batch(values, names, given, argnums, registry, states)
    _fill_in_batches(asked, values, names, given, argnums)
    layouts = [
        _layout_of(i, value, given[i], argnums, names, registry) for i, value in enumerate(values)
    ]
    pairs = zip(names, values, layouts, given, strict=True)
    resolved = [_argument(*entry) for entry in pairs]
    arguments = tuple(argument for argument, _ in resolved)
    if not asked and not is_told:
        warn_of_no_batch(num_devices)
    return Call(arguments, len(args), tuple(kwargs)), [leaves for _, leaves in resolved]


def _check_mutable(values: Sequence[Any], names: Sequence[str]) -> None:
    """Raise `ValueError` if an argument holds a `jax.Ref`: devices would change it differently."""
    for name, value in zip(names, values, strict=True):
        for path, x in named_leaves(value):
            if is_mutable(x):
                raise ValueError(
                    f"{name}, leaf `{path}`: it is a mutable array (`jax.Ref`) "
                    f"{x.dtype}{list(x.shape)}. {OF_MUTABLE}"
                )


def _fill_in_batches(
    batches: Sequence[int],
    values: Sequence[Any],
    names: Sequence[str],
    given: list[Any],
    argnums: Sequence[int],
) -> None:
    """Set `given[i]` to a tree of `PartitionSpec`s for each position `i` in `batches`."""
    for i in batches:
        if i in argnums or given[i] is not None:
            other = "`argnums`" if i in argnums else "`in_specs`"
            raise ValueError(f"{names[i]} is named by `batch_argnums` and by {other}. Use one.")
        given[i] = _batch_specs(names[i], values[i])


def _layout_of(
    i: int, value: Any, spec: Any, argnums: Sequence[int], names: Sequence[str], registry: Registry
) -> TreeLayout | None:
    """Return the layouts of argument `i`, if it holds sharded arrays; None if not."""
    if spec is not None:
        return None
    is_strict = i in argnums or registry.find(value) is not None
    try:
        return registry.layout_of(value) if is_strict else registry.layout_of_parts(value)
    except ValueError as error:
        raise ValueError(f"{names[i]}: {error}") from error


def _check_specs(
    given: Sequence[Any], values: Sequence[Any], names: Sequence[str], registry: Registry
) -> None:
    for i, spec in enumerate(given):
        if spec is None:
            continue
        if any(map(is_stored, flatten(values[i])[1])) or (
            not is_array(values[i]) and registry.find(values[i]) is not None
        ):
            raise ValueError(
                f"`in_specs[{i}]` is for {names[i]}, a tree that `Zero` lays out itself. Give "
                "`None` there."
            )


def _batch_specs(name: str, value: Any) -> Any:
    """Return `PartitionSpec`s for a batch: rows are split, keys and scalars replicated."""
    if any(map(is_stored, flatten(value)[1])):
        raise ValueError(
            f"{name} is to be the batch, but holds parameters that `Zero` has laid out. Say with "
            "`batch_argnums=` which argument is the batch."
        )
    num_rows = rows_of(name, value)
    if is_array(value):  # an array that is named as the batch is split, whatever it looks like
        return BATCH
    return jax.tree_util.tree_map_with_path(
        lambda path, x: BATCH if is_split(path_name(path), x, num_rows) else PartitionSpec(), value
    )


def _parameter_names(function: Callable) -> list[str]:
    """Return the names of a function's positional parameters; none for built-in functions."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in by_position]


def _names(parameters: Sequence[str], num: int) -> list[str]:
    known = [f"`{name}` (argument {i})" for i, name in enumerate(parameters[:num])]
    return known + [f"argument {i}" for i in range(len(known), num)]


def _spec_for_each(in_specs: Any, num: int, argnums: Sequence[int]) -> list[Any]:
    """Check `in_specs`; return it with `num` entries, where missing ones at the end are None."""
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
    name: str, value: Any, layout: TreeLayout | None, spec: Any
) -> tuple[Argument, list[Any]]:
    _, leaves, treedef = flatten(value)
    specs = [PartitionSpec()] * len(leaves)
    if layout is None and spec is not None:
        try:
            specs = spread_prefix(spec, value, PartitionSpec)
        except ValueError as error:
            raise ValueError(
                f"`in_specs` does not fit {name}: {error}. Give a `PartitionSpec`, or a tree "
                "of them that is a prefix of the argument."
            ) from error
    pairs = zip(specs, leaves, strict=True)
    array_specs = [s if leaf.shape else PartitionSpec() for s, leaf in pairs if is_array(leaf)]
    argument = Argument(
        name,
        treedef,
        statics_of(leaves),
        layout,
        tuple(array_specs),
        tuple(of_arrays(value, trained_leaves(value))),
    )
    return argument, arrays_of(value)


def check_rows(
    call: Call, arrays: Sequence[Sequence[Any]], mesh: AnyMesh, microbatches: int
) -> None:
    """Raise `ValueError` unless every dim that is split over devices divides evenly."""
    for argument, x, i in call.split(arrays):
        spec = argument.specs[i]
        dim = split_dim(spec)
        assert dim is not None
        names = [axis for axis in axes_of(PartitionSpec(spec[dim])) if axis in AXES]
        num = math.prod(mesh.shape[axis] for axis in names) * microbatches
        if dim >= len(x.shape) or x.shape[dim] % num:
            raise ValueError(
                f"{argument.where(i)}: dim {dim} of shape {tuple(x.shape)} is split over "
                f"{num // microbatches} devices x {microbatches} micro-batches and must be a "
                f"multiple of {num}. Pad it with `jz.pad_batch`, drop rows, or say with "
                "`batch_argnums=` or `in_specs` what is split."
            )


def check_meshes(call: Call, arrays: Sequence[Sequence[Any]], mesh: Mesh) -> None:
    """Raise `ValueError` if an array to be split is on a mesh of explicit axes other than `mesh`.

    The type of such an array names its mesh, so a program of `mesh` cannot take it. Nothing is
    checked in a program of one node, where types name a part of `mesh`.
    """
    if is_one_node():
        return
    for argument, leaves in zip(call.arguments, arrays, strict=True):
        for i, x in enumerate(leaves):
            sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
            if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
                continue
            is_split = argument.layout is not None or any(argument.specs[i]) or any(sharding.spec)
            if is_split and sharding.mesh != mesh.abstract_mesh:
                raise ValueError(
                    f"{argument.where(i)}: it is laid out as {sharding.spec} on another mesh with "
                    "explicit axes. Put it on that of `zero`: a batch by `jax.device_put(batch, "
                    "NamedSharding(zero.mesh, zero.batch_spec))`, parameters by `zero.shard(tree)`."
                )
