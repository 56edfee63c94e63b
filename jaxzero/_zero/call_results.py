"""Check the options of `value_and_grad`, and turn a program's flat results into its return value.

This module also converts wire states between the user's trees and the flat `LocalWireState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._execute import (
    GRADIENT_REDUCTIONS,
    LocalWireState,
    WireState,
    check_microbatches,
    from_tree,
    specs_of,
    to_tree,
)
from .._mesh import AXES, NODE, AnyMesh
from .._sharding import LeafSpec, Static, ZeroConfig, is_stored, rebuild, stored_leaf
from .._simigrad import GradientHalves
from .._warnings import warn
from .arguments import Argument, Call
from .node_shares import check_shares, known_shares
from .optimizer_state import trained_tree
from .options import Options, argument_numbers, checked_row_statistics
from .outputs import flat_reductions
from .transform import Transform


def gradient_options(
    mesh: AnyMesh,
    config: ZeroConfig,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    microbatches: int = 1,
    weighted: bool = False,
    aux_reduce: Any = None,
    halves: bool = False,
    shares: Sequence[int] | None = None,
    gradient_reduce: Any = None,
    row_statistics: str | None = None,
) -> Options:
    """Check the arguments of `value_and_grad`, and return them as `Options`.

    Raises:
        ValueError: `argnums` are no integers, `microbatches` is not an integer of at least 1,
            `aux_reduce` or `gradient_reduce` names an unknown reduction, `halves` is set on a mesh
            with one device, `shares` does not fit the mesh or comes without `weighted`, or
            `row_statistics` is not known.
        NotImplementedError: `shares` does not work with another option.
    """
    check_microbatches(microbatches)
    if halves and all(mesh.shape[axis] == 1 for axis in AXES):
        raise ValueError(
            "`halves=True` compares two halves of the devices, and the mesh has one device. Leave "
            "it out: `jz.simigrad` compares micro-batches, if it is given two or more."
        )
    numbers = argument_numbers(argnums)
    reduce = flat_reductions("aux_reduce", aux_reduce)
    known = known_shares(shares, mesh.shape[NODE])
    check_shares(known, weighted, halves, mesh, config)
    if gradient_reduce is not None and isinstance(argnums, int):
        gradient_reduce = (gradient_reduce,)
    reductions = flat_reductions("gradient_reduce", gradient_reduce, GRADIENT_REDUCTIONS)
    return Options(
        numbers,
        has_aux,
        microbatches,
        weighted,
        reduce,
        shares=known,
        halves=halves,
        gradient_reduce=reductions,
        row_statistics=checked_row_statistics(row_statistics),
    )


def returned(
    transform: Transform, outputs: tuple[Any, ...], is_one: bool, has_state: bool
) -> tuple[Any, ...]:
    """The return value of `value_and_grad`, from the outputs of the program.

    Args:
        transform: the transform that made the program.
        outputs: the program's outputs.
        is_one: whether `argnums` is an int, so that gradients are not returned in a tuple.
        has_state: whether the caller passed a wire state.
    """
    loss, gradients, aux, local_state, halves, _ = outputs
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
            trained_tree(  # as an optimizer sees the gradients
                trees(x, lambda leaf, scalar: scalar, lambda leaf: jnp.zeros([], jnp.float32))
            )
            for x in parts
        )
        result.append(GradientHalves(first, second, cross, share))
    if has_state:
        states = _state_trees(transform.call, options.argnums, local_state)
        result.append(_as_given(states, is_one))
    return tuple(result)


def _as_given(trees: list[Any], is_one: bool) -> Any:
    """The only tree if `argnums` was an int, otherwise a tuple of all."""
    return trees[0] if is_one else tuple(trees)


def _as_trees(
    transform: Transform,
    values: Sequence[Any],
    as_leaf: Callable[[LeafSpec, Any], Any],
    other: Callable[[LeafSpec], Any],
) -> list[Any]:
    """Turn one value for each differentiated leaf into trees, in the order of `argnums`.

    Args:
        transform: the transform of the call, with the trees' structures.
        values: one for each differentiated leaf, in the order of arguments.
        as_leaf: makes a leaf of the tree from a value.
        other: makes the value of an array that is not differentiated. In an `eqx.Module` or
            `nnx.Module` such arrays get None, as do leaves that are not arrays.
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
    """Flatten the wire states of a call into one `LocalWireState`, by index of the leaf.

    Args:
        transform: the transform of the call.
        wire_state: one state for each argument in `argnums`; None if the caller passed none.

    Raises:
        ValueError: gradients need a state and there is none, or it does not fit the parameters.
    """
    call, config, comm = transform.call, transform.config, transform.comm
    numbers = transform.options.argnums
    if wire_state is None and config.needs_wire_state and transform.options.has_gradients:
        raise ValueError(
            "`wire_state` is missing: the codecs of this config keep state from step to step "
            f"(weights {config.weights.node}, gradients {config.gradients.node}). "
            "Make it with `wire_state = zero.init_wire_state(params)`, pass it as "
            "`wire_state=`, and take the next one as the last result."
        )
    if wire_state is None:
        return LocalWireState()
    states = (wire_state,) if isinstance(wire_state, WireState) else wire_state
    if not isinstance(states, (tuple, list)) or len(states) != len(numbers):
        raise ValueError(
            "`wire_state` must be one state for each argument in `argnums` "
            f"({len(numbers)}); got {type(wire_state).__name__}. Make each with "
            "`zero.init_wire_state(params)`."
        )
    local_state = LocalWireState()
    for number, start, argument in _sharded(call):
        if number in numbers:
            assert argument.plan is not None
            state = states[list(numbers).index(number)]
            part = from_tree(argument.plan, state, comm, argument.name, start)
            local_state = local_state.joined(part)
    return local_state


def reads_kept_slices(transform: Transform) -> bool:
    """Whether a training step on the same parameters reads slices that a wire state keeps."""
    plans = [transform.call.arguments[number].plan for number in transform.options.argnums]
    leaves = [leaf for plan in plans if plan is not None for leaf in plan.leaves]
    return bool(specs_of(leaves, transform.comm).slices)


def warn_of_full_weights(config: ZeroConfig) -> None:
    """Warn that `apply` reads other weights than a training step."""
    assert config.hpz is not None
    how = "" if config.hpz.codec is None else f" as {config.hpz.codec}"
    warn(
        f"`zero.apply` reads the weights in full{how}, as there is no `wire_state`. A training "
        f"step reads the slices that it keeps (weights {config.weights.node}), which differ a "
        "little: a ratio of probabilities of the two (PPO) is not that of equal weights. Pass "
        "`wire_state=`, the state that the next training step gets, to read what it reads."
    )


def _state_trees(
    call: Call, numbers: Sequence[int], local_state: LocalWireState
) -> list[WireState]:
    """One `WireState` for each argument in `numbers`; the reverse of `wire_state_of`."""
    trees = {
        number: to_tree(argument.plan, local_state, start)
        for number, start, argument in _sharded(call)
        if argument.plan is not None
    }
    return [trees[number] for number in numbers]


def _sharded(call: Call) -> Iterator[tuple[int, int, Argument]]:
    """Iterate over sharded arguments: `(position, index of its first leaf, argument)`."""
    start = 0
    for number, argument in enumerate(call.arguments):
        if argument.plan is not None:
            yield number, start, argument
            start += len(argument.plan.leaves)
