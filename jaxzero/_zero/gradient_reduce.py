"""How the gradient of each leaf is reduced: as a mean, or combined like an output of the loss.

Some gradients are no derivatives: a `custom_vjp` returns the next value of a scale, of a history of
maxima or of a counter in the place of one. The mean over devices, in the bits of a codec, is wrong
for them. They leave the program among its other outputs, and are combined as these are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._collectives import CommSpec, accumulator_dtype, labelled
from .._execute import Parameters, combine
from .._sharding import LeafSpec, ZeroConfig, overwritten_leaves, pad, spread_prefix
from .arguments import Argument, Call
from .options import Options


def combined_leaves(call: Call, options: Options) -> dict[int, str]:
    """The leaves whose gradients are combined like outputs, and how: "sum", "max" or "first".

    Returns:
        By index of the leaf among those of all sharded arguments. Without `gradient_reduce`, the
        leaves that their gradients overwrite, by "max".

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
    num_shards: int,
    combined: Mapping[int, str],
) -> Parameters:
    """The leaves of all sharded arguments; the program reduces none of those that are combined."""
    leaves, differentiated = [], []
    numbers = options.argnums if options.has_gradients else ()
    for number, argument in enumerate(call.arguments):
        if argument.plan is None:
            continue
        for leaf, is_trained in zip(argument.plan.leaves, argument.trained, strict=True):
            if number in numbers and is_trained and len(leaves) not in combined:
                differentiated.append(len(leaves))
            leaves.append(leaf)
    return Parameters(
        tuple(leaves),
        tuple(differentiated),
        config.stage >= 3,
        config.stage >= 2,
        num_shards,
        frozenset(combined),
        config.offload,
    )


def combined_gradients(
    gradients: Sequence[Array],
    combined: Mapping[int, str],
    leaves: Sequence[LeafSpec],
    comm: CommSpec,
) -> list[Array]:
    """Combine the gradients of the leaves `combined`, each `[microbatches, ...]`, and pad them.

    All that are combined alike are sent as one array: an fp8 layer has six small ones.
    """
    found, groups = {}, {}
    for (i, how), x in zip(combined.items(), gradients, strict=True):
        wide = x.astype(accumulator_dtype(x.dtype))
        groups.setdefault((how, wide.dtype), {})[i] = wide.reshape(len(x), x[0].size)
    for (how, _), rows in groups.items():
        of_rows = [leaves[i] for i in rows]
        with labelled("gradients", *(leaf.path for leaf in of_rows)):
            joined = combine(jnp.concatenate([*rows.values()], 1), how, comm)
        ends = itertools.accumulate(math.prod(leaf.shape) for leaf in of_rows)
        parts = jnp.split(joined, [*ends][:-1])
        for i, leaf, x in zip(rows, of_rows, parts, strict=True):
            x = x.reshape(leaf.shape).astype(leaf.dtype)
            found[i] = pad(x, leaf.layout) if leaf.layout else x
    return [found[i] for i in combined]


def _differentiated(call: Call, options: Options) -> Iterator[tuple[int, LeafSpec, str]]:
    """The leaves of the differentiated arguments, with their indices and reductions."""
    reductions = _reductions(call, options)
    start = 0
    for number, argument in enumerate(call.arguments):
        if argument.plan is None:
            continue
        for i, leaf in enumerate(argument.plan.leaves):
            if number not in options.argnums or not argument.trained[i]:
                continue
            how = reductions[number][i]
            if how == "max" and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise ValueError(
                    f"`gradient_reduce` asks for the maximum of the leaf `{leaf.path}`, and "
                    f"{leaf.dtype} has no order."
                )
            yield start + i, leaf, how
        start += len(argument.plan.leaves)


def _reductions(call: Call, options: Options) -> dict[int, list[str]]:
    """For each differentiated argument, by position, the reduction of each array."""
    arguments = {number: call.arguments[number] for number in options.argnums}
    trees = tuple(_tree(argument) for argument in arguments.values())
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


def _tree(argument: Argument) -> object:
    """The structure of an argument, with a number for each of its leaves."""
    return jax.tree.unflatten(argument.treedef, range(len(argument.statics)))
