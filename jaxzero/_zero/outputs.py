"""Combine a function's outputs, and some gradients, over devices and micro-batches.

Outputs are reduced by mean, sum, max, first, stack or concat. In place of a gradient, a
`custom_vjp` may return the next value of a scale, of a history of maxima or of a counter. A mean
over devices would be wrong for such a value, and so would a codec. So the program returns these
gradients among its other outputs, and they are combined like outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._collectives import CommSpec, accumulator_dtype, labelled
from .._execute import REDUCTIONS, Parameters, combine
from .._mesh import AnyMesh, is_traced
from .._sharding import (
    LeafSpec,
    Static,
    ZeroConfig,
    is_array,
    overwritten_leaves,
    path_name,
    rebuild,
    rng_leaves,
    spread_prefix,
)
from .arguments import Call, Options

_Doubled = Callable[[], Sequence[tuple[int, ...]] | None]


class Outputs:
    """The outputs other than loss and gradients: their tree, and the reduction of each leaf.

    `record` is called while the function is traced, `part` in the program of each device, `join`
    outside of the `shard_map`.

    Args:
        options: the options of the call.
        rows: the number of rows that one call of the function gets: those of one micro-batch on one
            device; None if no argument is split as `batch_spec`.

    Attributes:
        treedef: the tree structure of the outputs.
        statics: for each leaf None if it is an array or a number, else the leaf as a `Static`.
        how: for each array or number its reduction, one of `REDUCTIONS`.
    """

    def __init__(self, options: Options, rows: int | None):
        self.options = options
        self.rows = rows
        self.treedef: Any = None
        self.statics: list[Static | None] = []
        self.how: list[str] = []

    def record(self, tree: Any, doubled: _Doubled | None = None) -> list[Any]:
        """Flatten what the user's function returned, and decide how devices combine each leaf.

        Leaves that are neither arrays nor numbers, such as functions, are kept here for `join`.

        Args:
            tree: the outputs.
            doubled: returns the shape that each leaf has with twice as many rows, or None if that
                is not known. It is called only if a leaf may have a value for each row.

        Returns:
            The arrays and numbers, as arrays.
        """
        pairs, self.treedef = jax.tree_util.tree_flatten_with_path(tree)
        self.statics = [None if _is_value(x) else Static(x) for _, x in pairs]
        entries = zip(pairs, self._asked(tree), rng_leaves(tree), strict=True)
        values = [entry for entry in entries if _is_value(entry[0][1])]
        paths = [path_name(path) for (path, _), _, _ in values]
        asked = [how or ("first" if is_rng else None) for _, how, is_rng in values]
        leaves = values_of(tree)
        self.how = [
            self._checked(how, path, leaf) if how else self._default(path, leaf)
            for how, path, leaf in zip(asked, paths, leaves, strict=True)
        ]
        if doubled is not None and any(map(self._may_be_rows, asked, leaves)):
            self._refuse_rows(paths, asked, leaves, doubled())
        if self.options.shares is not None:
            self._check_shares(paths)
        return leaves

    def _may_be_rows(self, asked: str | None, leaf: Array) -> bool:
        """Return whether a leaf may have a value for each row of the batch.

        It may if the size of a dim is a multiple of the number of rows: the dim counts rows, or
        rows merged with another dim. The answer is False if the user gives a reduction, `asked`.
        """
        if asked is not None or not self.rows:
            return False
        return any(size and size % self.rows == 0 for size in leaf.shape)

    def _refuse_rows(
        self,
        paths: Sequence[str],
        asked: Sequence[str | None],
        leaves: Sequence[Array],
        doubled: Sequence[tuple[int, ...]] | None,
    ) -> None:
        """Raise `ValueError` for a leaf with a value for each row, because a mean would mix rows.

        Args:
            paths: the path of each leaf.
            asked: the reduction that the user gives for each leaf; None if the user gives none.
            leaves: the arrays.
            doubled: the shape of each leaf with twice as many rows. If it is None (not known), a
                leaf is refused if its dim 0 has as many elements as there are rows.
        """
        for i, (path, how, leaf) in enumerate(zip(paths, asked, leaves, strict=True)):
            if not self._may_be_rows(how, leaf):
                continue
            in_dim_0 = leaf.shape[0] == self.rows
            if doubled is not None:
                in_dim_0 = doubled[i][:1] != leaf.shape[:1]
            if in_dim_0 or (doubled is not None and doubled[i] != leaf.shape):
                raise ValueError(
                    f"The aux leaf `{path}` ({leaf.dtype}{list(leaf.shape)}) has a value for each "
                    "row of a device's batch, and a mean over devices would mix rows. Say with "
                    "`aux_reduce` how it is combined: 'concat' joins the rows of all devices, in "
                    f"the order of the batch{'' if in_dim_0 else ', if rows are moved to dim 0'}."
                )

    def _check_shares(self, paths: Sequence[str]) -> None:
        for path, how in zip(paths, self.how, strict=True):
            if how in ("stack", "concat"):
                raise ValueError(
                    f"The aux leaf `{path}` is combined by {how!r}, and with `shares` devices "
                    "run different numbers of micro-batches. Return a sum or a mean over rows, "
                    f"and take 'sum', 'mean', 'max' or 'first' in `{self._argument}`."
                )

    def _checked(self, how: str, path: str, leaf: Array) -> str:
        if how == "concat" and (not leaf.ndim or self.rows is None):
            why = "it is a scalar" if not leaf.ndim else "no argument is split as `batch_spec`"
            raise ValueError(
                f"`{self._argument}` asks to concatenate the leaf `{path}`, but {why}. Use "
                "'stack', or split the batch by `zero.batch_spec`."
            )
        without_order = (jnp.complexfloating, jax.dtypes.prng_key)
        if how == "max" and any(jnp.issubdtype(leaf.dtype, kind) for kind in without_order):
            raise ValueError(
                f"`{self._argument}` asks for the maximum of the leaf `{path}`, and {leaf.dtype} "
                "has no order."
            )
        return how

    def _asked(self, tree: Any) -> list[str | None]:
        if self.options.reduce is None:
            return [None] * len(jax.tree.leaves(tree))
        prefix = jax.tree.unflatten(*reversed(self.options.reduce))
        try:
            return spread_prefix(prefix, tree, str)
        except ValueError as error:
            raise ValueError(
                f"`{self._argument}` is not a tree prefix of what the function returns: {error}"
            ) from error

    @property
    def _argument(self) -> str:
        return "aux_reduce" if self.options.has_gradients else "out_reduce"

    def _default(self, path: str, leaf: Array) -> str:
        forward_only = not self.options.has_gradients
        if forward_only and leaf.ndim and leaf.shape[0] == self.rows:
            return "concat"
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        if is_float and not (forward_only and leaf.ndim):
            return "mean"
        kind = "output" if forward_only else "aux"
        raise ValueError(
            f"The {kind} leaf `{path}` ({leaf.dtype}{list(leaf.shape)}) may differ between devices "
            f"and has no mean. Say with `{self._argument}`, a tree prefix of "
            f"{', '.join(map(repr, REDUCTIONS))}, how it is combined: {_proposal(leaf)}."
        )

    def part(self, leaves: Sequence[Array], comm: CommSpec) -> tuple[list[Array], list[Array]]:
        """Combine the outputs over micro-batches, and over devices if that needs messages.

        Args:
            leaves: this device's outputs `[microbatches, ...]`, in the order of `record`.
            comm: gives the number of devices.

        Returns:
            Two lists: the leaves that are now equal on all devices (mean, sum, max, first), and
            this device's part of the leaves that are stacked or concatenated. `join` gets both as
            global arrays.
        """
        combined = [combine(x, how, comm) for x, how in zip(leaves, self.how, strict=True)]
        pairs = list(zip(combined, self.how, strict=True))
        rows = [x for x, how in pairs if how in ("stack", "concat")]
        return [x for x, how in pairs if how not in ("stack", "concat")], rows

    def join(self, replicated: Sequence[Array], rows: Sequence[Array]) -> Any:
        """Rebuild the tree that the function returned, from its reduced arrays.

        The two arguments are the two lists that `part` returned on devices, as global arrays.
        """
        remaining = {False: iter(replicated), True: iter(rows)}
        leaves = [next(remaining[how in ("stack", "concat")]) for how in self.how]
        return rebuild(self.treedef, self.statics, leaves)


def values_of(tree: Any) -> list[Array]:
    """Return the arrays and numbers that a function returned, as a list of arrays."""
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if _is_value(x)]


def _is_value(x: Any) -> bool:
    is_number = isinstance(x, int | float | complex | np.generic)
    return is_number or is_array(x) or is_traced(x) or hasattr(x, "__jax_array__")


def _proposal(leaf: Array) -> str:
    """Return the reduction to suggest in an error message for an output that has no mean."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if is_key or (leaf.dtype == jnp.uint32 and leaf.shape in ((2,), (4,))):
        return "'first' for a random key, which is the same on every device"
    if leaf.dtype == jnp.bool_:
        return "'first' if it is the same on every device, else 'stack'"
    if leaf.ndim:
        return "'concat' if its dim 0 is the rows of the batch, 'sum' for counts"
    return "'sum' for a number of examples, 'first' for a counter that every device advances alike"


def flat_reductions(
    argument: str, reduce: Any, known: Sequence[str] = REDUCTIONS
) -> tuple[tuple[str, ...], Any] | None:
    """Flatten a tree of reduction names into `(names, treedef)`, which is hashable; None for None.

    Args:
        argument: the name of the user's argument, for the error message.
        reduce: the tree.
        known: the names that are allowed.

    Raises:
        ValueError: a name is not in `known`.
    """
    if reduce is None:
        return None
    names, treedef = jax.tree.flatten(reduce)
    for name in names:
        if name not in known:
            raise ValueError(
                f"`{argument}` must be a tree prefix of {', '.join(map(repr, known))}; "
                f"it holds {name!r}."
            )
    return tuple(names), treedef


def combined_leaves(call: Call, options: Options) -> dict[int, str]:
    """Find the leaves whose gradients are reduced by "sum", "max" or "first" instead of the mean.

    Without `gradient_reduce`, these are the leaves whose gradient is their next value, by "max".

    Returns:
        The reduction, by the leaf's index among the leaves of all sharded arguments.

    Raises:
        ValueError: `gradient_reduce` is no tree prefix of the differentiated arguments, or asks for
            the maximum of complex numbers.
    """
    if not options.has_gradients:
        return {}
    return {
        i: how
        for i, leaf, how in _differentiated(call, options)
        if how != "mean" and jnp.issubdtype(leaf.dtype, jnp.inexact)
    }


def parameters_of(
    call: Call,
    options: Options,
    config: ZeroConfig,
    mesh: AnyMesh,
    combined: Mapping[int, str],
) -> Parameters:
    """Describe the leaves of all sharded arguments, for the program of one device.

    Args:
        call: the arguments.
        options: the options of the call.
        config: stage, offload and activations.
        mesh: the devices.
        combined: the indices of the leaves whose gradients are combined like outputs, from
            `combined_leaves`.
    """
    leaves, differentiated = [], []
    numbers = options.argnums if options.has_gradients else ()
    for number, _, argument, layout in call.sharded():
        for leaf, is_trained in zip(layout.leaves, argument.trained, strict=True):
            if number in numbers and is_trained and len(leaves) not in combined:
                differentiated.append(len(leaves))
            leaves.append(leaf.on_device(mesh))
    return Parameters(
        tuple(leaves),
        tuple(differentiated),
        config.stage >= 3,
        config.stage >= 2,
        config.num_shards(mesh),
        frozenset(combined),
        config.offload,
        config.activations,
    )


def combined_gradients(
    gradients: Sequence[Array],
    combined: Mapping[int, str],
    leaves: Sequence[LeafSpec],
    comm: CommSpec,
) -> list[Array]:
    """Reduce the gradients of some leaves like outputs, and pad them to their stored shapes.

    Each gradient is `[microbatches, ...]`. `combined` maps the index of the gradient's leaf to the
    reduction, in the same order. Gradients with equal reduction and dtype are sent as one array,
    because an fp8 layer has six small ones.
    """
    by_leaf, groups = {}, {}
    for (i, how), gradient in zip(combined.items(), gradients, strict=True):
        wide = gradient.astype(accumulator_dtype(gradient.dtype))
        groups.setdefault((how, wide.dtype), {})[i] = wide.reshape(len(gradient), gradient[0].size)
    for (how, _), rows in groups.items():
        of_rows = [leaves[i] for i in rows]
        with labelled("gradients", *(leaf.path for leaf in of_rows)):
            joined = combine(jnp.concatenate([*rows.values()], 1), how, comm)
        ends = itertools.accumulate(math.prod(leaf.shape) for leaf in of_rows)
        parts = jnp.split(joined, [*ends][:-1])
        for i, leaf, gradient in zip(rows, of_rows, parts, strict=True):
            gradient = gradient.reshape(leaf.shape).astype(leaf.dtype)
            by_leaf[i] = leaf.pad(gradient)
    return [by_leaf[i] for i in combined]


def _differentiated(call: Call, options: Options) -> Iterator[tuple[int, LeafSpec, str]]:
    """Yield `(index, layout, reduction)` of each leaf that gets a gradient.

    The index counts the leaves of all sharded arguments.
    """
    reductions = _reductions(call, options)
    for number, start, argument, layout in call.sharded():
        if number not in options.argnums:
            continue
        for i, (leaf, is_trained) in enumerate(zip(layout.leaves, argument.trained, strict=True)):
            if not is_trained:
                continue
            how = reductions[number][i]
            if how == "max" and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise ValueError(
                    f"`gradient_reduce` asks for the maximum of the leaf `{leaf.path}`, and "
                    f'{leaf.dtype} has no order. Give "mean", "sum" or "first" for it.'
                )
            yield start + i, leaf, how


def _reductions(call: Call, options: Options) -> dict[int, list[str]]:
    """Return the reduction of each leaf's gradient, in a list for each differentiated argument.

    The keys are the positions of the arguments.
    """
    arguments = {number: call.arguments[number] for number in options.argnums}
    trees = tuple(  # with a number for each leaf
        jax.tree.unflatten(x.treedef, range(len(x.statics))) for x in arguments.values()
    )
    if options.gradient_reduce is None:
        flat = ["max" if is_state else "mean" for is_state in overwritten_leaves(trees)]
    else:
        names, treedef = options.gradient_reduce
        try:
            flat = spread_prefix(jax.tree.unflatten(treedef, names), trees, str)
        except ValueError as error:
            raise ValueError(
                f"`gradient_reduce` is not a tree prefix of what is differentiated: {error}"
            ) from error
    remaining = iter(flat)
    every = {number: [next(remaining) for _ in x.statics] for number, x in arguments.items()}
    return {
        number: [how for how, s in zip(every[number], x.statics, strict=True) if s is None]
        for number, x in arguments.items()
    }
