"""Around a program: the options of a gradient, and flat results as trees again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._execute import LocalWireState, WireState, check_microbatches, from_tree, to_tree
from .._mesh import AXES, AnyMesh
from .._sharding import LeafSpec, Static, is_stored, rebuild, stored_leaf
from .._simigrad import GradientHalves
from .arguments import Argument, Call
from .options import Options
from .outputs import flat_reductions
from .transform import Transform


def gradient_options(
    argnums: int | Sequence[int],
    has_aux: bool,
    microbatches: int,
    weighted: bool,
    aux_reduce: Any,
    halves: bool,
    mesh: AnyMesh,
) -> Options:
    """What `value_and_grad` was asked for.

    Raises:
        ValueError: `microbatches` is no number of at least 1, `aux_reduce` names no reduction, or
            there is one device, which has no `halves`.
    """
    check_microbatches(microbatches)
    if halves and all(mesh.shape[axis] == 1 for axis in AXES):
        raise ValueError(
            "`halves=True` compares two halves of the devices, and the mesh has one device. Leave "
            "it out: `jz.simigrad` compares micro-batches, if it is given two or more."
        )
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    reduce = flat_reductions("aux_reduce", aux_reduce)
    return Options(numbers, has_aux, microbatches, weighted, reduce, halves=halves)


def returned(
    transform: Transform, outputs: tuple[Any, ...], is_one: bool, has_state: bool
) -> tuple[Any, ...]:
    """What `value_and_grad` returns of a program's outputs.

    Args:
        transform: that made the program.
        outputs: of it.
        is_one: whether one argument is differentiated, and given as a number.
        has_state: whether there is a wire state.
    """
    loss, gradients, aux, memory, halves = outputs
    options = transform.options

    def trees(values: Sequence[Any], as_leaf: Callable[[LeafSpec, Any], Any], other: Any) -> Any:
        return _as_given(_as_trees(transform, values, as_leaf, other), is_one)

    gradients = trees(
        gradients, stored_leaf, lambda leaf: np.zeros(leaf.stored_shape, jax.dtypes.float0)
    )
    result = [(loss, aux) if options.has_aux else loss, gradients]
    if halves is not None:
        *parts, share = halves
        first, second, cross = (
            trees(x, lambda leaf, scalar: scalar, lambda leaf: jnp.zeros([], jnp.float32))
            for x in parts
        )
        result.append(GradientHalves(first, second, cross, share))
    if has_state:
        result.append(_as_given(_state_trees(transform.call, options.argnums, memory), is_one))
    return tuple(result)


def _as_given(trees: list[Any], is_one: bool) -> Any:
    return trees[0] if is_one else tuple(trees)


def _as_trees(
    transform: Transform,
    values: Sequence[Any],
    as_leaf: Callable[[LeafSpec, Any], Any],
    other: Callable[[LeafSpec], Any],
) -> list[Any]:
    """A value for each differentiated leaf, as trees in the order of `argnums`.

    Args:
        transform: knows the trees.
        values: in the order of arguments.
        as_leaf: makes a leaf of the tree of a value.
        other: the value of other arrays. In an `eqx.Module` or `nnx.Module` they have None, as has
            what is no array.
    """
    remaining = iter(values)  # in the order of arguments, not of `argnums`
    trees = {}
    for number in sorted(transform.options.argnums):
        argument = transform.call.arguments[number]
        plan = argument.plan
        if plan is None:
            trees[number] = argument.rebuild([])
            continue
        found = []
        for leaf, is_trained, kind in zip(
            plan.leaves, argument.trained, argument.module_trains, strict=True
        ):
            if is_trained:
                found.append(as_leaf(leaf, next(remaining)))
            else:
                found.append(None if kind is False else as_leaf(leaf, other(leaf)))
        # An empty `StoredArray` stays, so that gradients have the structure of the parameters.
        nothing = [s if s is None or is_stored(s.value) else Static(None) for s in argument.statics]
        trees[number] = rebuild(argument.treedef, nothing, found)
    return [trees[number] for number in transform.options.argnums]


def wire_state_of(transform: Transform, wire_state: Any) -> LocalWireState:
    """What the wire remembers, by number of leaf.

    Args:
        transform: what is called.
        wire_state: one state for each differentiated argument; None: nothing is remembered.

    Raises:
        ValueError: the state is missing, or does not belong to these parameters.
    """
    call, config, comm = transform.call, transform.config, transform.comm
    numbers = transform.options.argnums
    if wire_state is None and config.needs_wire_state:
        raise ValueError(
            "`wire_state` is missing: this config remembers something from step to step "
            f"(weights {config.weights.node}, gradients {config.gradients.node}). "
            "Make it with `wire_state = zero.init_wire_state(params)`, pass it as "
            "`wire_state=`, and take the next one as the last result."
        )
    if wire_state is None:
        return LocalWireState()
    states = (wire_state,) if isinstance(wire_state, WireState) else wire_state
    if not isinstance(states, (tuple, list)) or len(states) != len(numbers):
        raise ValueError(
            "`wire_state` must be one state for each differentiated argument "
            f"({len(numbers)}); got {type(wire_state).__name__}. Make each with "
            "`zero.init_wire_state(params)`."
        )
    memory = LocalWireState()
    for number, start, argument in _sharded(call):
        if number in numbers:
            assert argument.plan is not None
            state = states[list(numbers).index(number)]
            part = from_tree(argument.plan, state, comm, argument.name, start)
            memory = LocalWireState(
                {**memory.slices, **part.slices}, {**memory.errors, **part.errors}
            )
    return memory


def _state_trees(call: Call, numbers: Sequence[int], memory: LocalWireState) -> list[WireState]:
    """Undo `wire_state_of`: one state for each of `numbers`."""
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
