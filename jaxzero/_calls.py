"""Around a program: the options of a gradient, and flat results as trees again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ._arguments import Argument, Call
from ._collectives import Wire
from ._transform import Options, Transform, flat_reductions
from ._wire_state import Memory, WireState, from_tree, to_tree


def gradient_options(
    argnums: int | Sequence[int], has_aux: bool, microbatches: int, weighted: bool, aux_reduce: Any
) -> Options:
    """What `value_and_grad` was asked for.

    Raises:
        ValueError: `microbatches` is no number of at least 1, or `aux_reduce` names no reduction.
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(
            f"`microbatches` must be a whole number of at least 1; got {microbatches!r}."
        )
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    reduce = flat_reductions("aux_reduce", aux_reduce)
    return Options(numbers, has_aux, microbatches, weighted, reduce)


def gradient_trees(transform: Transform, gradients: Sequence[Array]) -> list[Any]:
    """The flat gradients as trees like the differentiated arguments, in the order of `argnums`."""
    remaining = iter(gradients)  # in the order of arguments, not of `argnums`
    trees = {}
    for number in sorted(transform.options.argnums):
        argument = transform.call.arguments[number]
        leaves = [
            next(remaining)
            if jnp.issubdtype(leaf.dtype, jnp.inexact)
            else np.zeros(leaf.stored_shape, jax.dtypes.float0)
            for leaf in (argument.plan.leaves if argument.plan else ())
        ]
        trees[number] = jax.tree.unflatten(argument.treedef, leaves)
    return [trees[number] for number in transform.options.argnums]


def memory_of(call: Call, numbers: Sequence[int], wire_state: Any, wire: Wire) -> Memory:
    """What the wire remembers, by number of leaf.

    Args:
        call: the arguments.
        numbers: those that are differentiated.
        wire_state: one state for each of `numbers`; None: nothing is remembered.
        wire: which leaves need what.

    Raises:
        ValueError: the state does not belong to these parameters.
    """
    if wire_state is None:
        return Memory()
    states = (wire_state,) if isinstance(wire_state, WireState) else wire_state
    if not isinstance(states, (tuple, list)) or len(states) != len(numbers):
        raise ValueError(
            "`wire_state` must be one state for each differentiated argument "
            f"({len(numbers)}); got {type(wire_state).__name__}. Make each with "
            "`zero.init_wire_state(params)`."
        )
    memory = Memory()
    for number, start, argument in _sharded(call):
        if number in numbers:
            assert argument.plan is not None
            state = states[list(numbers).index(number)]
            part = from_tree(argument.plan, state, wire, argument.name, start)
            memory = Memory({**memory.slices, **part.slices}, {**memory.errors, **part.errors})
    return memory


def state_trees(call: Call, numbers: Sequence[int], memory: Memory) -> list[WireState]:
    """Undo `memory_of`: one state for each of `numbers`."""
    trees = {
        number: to_tree(argument.plan, memory, start)
        for number, start, argument in _sharded(call)
        if argument.plan is not None
    }
    return [trees[number] for number in numbers]


def _sharded(call: Call) -> Iterator[tuple[int, int, Argument]]:
    """Each sharded argument: its position, the number of its first leaf, itself."""
    start = 0
    for number, argument in enumerate(call.arguments):
        if argument.plan is not None:
            yield number, start, argument
            start += len(argument.plan.leaves)
