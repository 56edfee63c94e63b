"""Rules for elementwise operations and collectives.

A rule gets the rows of the batch, an operation and the states of its inputs (`row_states`). It
returns the states of the operation's outputs. Elementwise operations are in four groups, by what
they do to sums over rows: operations whose result is linear in these sums, products, quotients, and
the rest. The rules of operations that move or join dims are in `row_dims`. The result of an
operation without a rule is `unknown`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .ir import Operation
from .operation_kinds import shape_of
from .row_states import (
    Mixing,
    NotAligned,
    Parts,
    State,
    Sum,
    as_rows,
    is_paired,
    merged,
    settled,
    unknown,
)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a batch.

    Attributes:
        num: the number of rows that one call of the function gets.
        axes: the mesh axes of more than one device that split the rows.
    """

    num: int
    axes: frozenset[str]


Rule = Callable[[Rows, Operation, Sequence[State]], Sequence[State]]

_LINEAR = {
    *("add", "add_any", "complex", "conj", "convert_element_type", "copy", "imag", "neg", "real"),
    *("reduce_precision", "stop_gradient", "sub", "pvary", "pcast", "reshard", "mesh_cast"),
    *("sharding_constraint", "layout_constraint", "device_put", "copy_p", "optimization_barrier"),
}
# Further operations whose output elements depend only on the input elements at their index.
OTHERS = {"bitcast_convert_type", "copy", "copy_p"}
_COMPARISONS = {"eq", "ge", "gt", "is_finite", "le", "lt", "ne"}
IDENTITIES = {
    *("pvary", "pcast", "reshard", "mesh_cast", "sharding_constraint", "layout_constraint"),
    *("device_put", "optimization_barrier"),
}


def joined_rows(states: Sequence[State]) -> tuple[tuple[int, Parts], ...]:
    """Return the dims with rows of an elementwise result, given the states of its inputs.

    Raises:
        NotAligned: different rows meet.
    """
    given = [x.rows for x in states if x.rows]
    if not given:
        return ()
    if all(x == given[0] for x in given):
        return given[0]
    by_dim: dict[int, Parts] = {}
    for one in given:
        for dim, parts in one:
            joined = merged(by_dim.get(dim), parts)
            assert joined is not None
            by_dim[dim] = joined
    return as_rows(by_dim)


def combined(
    rows: Rows,
    operation: Operation,
    states: Sequence[State],
    dims: tuple[tuple[int, Parts], ...],
    sums: frozenset[Sum],
    mixings: Iterable[Mixing] = (),
) -> State:
    """Return the state of a value that is computed from all of `states` and has rows in `dims`.

    Args:
        rows: the rows of the batch.
        operation: the operation that makes the value.
        states: the states of its inputs, with their dims at their places in the value.
        dims: the dims of the value that have rows, with their parts.
        sums: the sums over rows that the value is linear in.
        mixings: those that the operation adds to the mixings of its inputs.
    """
    all_mixings = {*mixings}.union(*(x.mixings for x in states))
    differs = any(x.differs for x in states)
    if not all(x.is_known for x in states):
        return unknown(*states)
    if is_paired(dims, rows.num):
        all_mixings.add(Mixing("pairs", operation, operation))
        return dataclasses.replace(unknown(*states), mixings=frozenset(all_mixings))
    noise = frozenset().union(*(x.noise for x in states))
    noise_dims: frozenset[int] = frozenset()
    if noise and not differs:
        noise_dims = frozenset().union(*(x.noise_dims for x in states))
        if any(dim in noise_dims for dim, _ in dims):
            all_mixings |= {Mixing("key", source, operation) for source in noise}
    if dims or differs:
        noise, noise_dims = frozenset(), frozenset()
    return State(dims, sums, frozenset(all_mixings), noise, noise_dims, differs, settled(states))


def elementwise(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    """Rule of an elementwise operation on arrays of one shape, and scalars."""
    name = operation.name
    if name in _COMPARISONS and not any(x.rows for x in states):
        # A comparison of sums alone is a guard such as `where(num > 0, ...)`, on each device.
        states = [dataclasses.replace(x, sums=frozenset(), mixings=frozenset()) for x in states]
    try:
        dims = joined_rows(states)
    except NotAligned:
        return [unknown(*states)]
    if not any(x.sums for x in states):
        state = combined(rows, operation, states, dims, frozenset())
        if name in ("mul", "div"):
            state = _with_factor(operation, states, state)
        index = _index(operation, states)
        return [state if index is None else dataclasses.replace(state, index=index)]
    sums, mixings = _sums(operation, states, bool(dims))
    state = combined(rows, operation, states, dims, sums, mixings)
    return [_with_factor(operation, states, state) if name in ("mul", "div") else state]


def linear(rows: Rows, operation: Operation, states: Sequence[State]) -> State:
    """Return the state of a result that combines arrays of one shape linearly.

    Raises:
        NotAligned: different rows meet.
    """
    sums = frozenset().union(*(x.sums for x in states))
    return combined(rows, operation, states, joined_rows(states), sums)


def _index(operation: Operation, states: Sequence[State]) -> Any:
    """Return `State.index` of a result: after a cast, or JAX's `where(i < 0, i + size, i)`."""
    if operation.name == "select_n":
        return states[1].index
    return states[0].index if operation.name in _LINEAR and len(states) == 1 else None


def _sums(
    operation: Operation, states: Sequence[State], has_rows: bool
) -> tuple[frozenset[Sum], list[Mixing]]:
    """Return the sums over rows that a result is linear in; and mixings for its other sums."""
    every = frozenset().union(*(x.sums for x in states))
    name = operation.name
    if name in _LINEAR:
        return every, []
    if name == "select_n":
        if not states[0].depends:
            return every, []
        return frozenset(), mixed("statistic" if has_rows else "function", every, operation)
    if name in ("mul", "div"):
        left, right = states
        if not right.depends:
            if name == "div" and math.prod(shape_of(operation.inputs[1])) == 1:
                every = frozenset(dataclasses.replace(x, is_mean=True) for x in every)
            return every, []
        if not left.depends and name == "mul":
            return every, []
        if has_rows:
            return frozenset(), mixed("statistic", every, operation)
        if name == "mul":
            return frozenset(), mixed("product", every, operation)
        if left.sums:
            return frozenset(), [Mixing("ratio", operation, operation)]
    return frozenset(), mixed("statistic" if has_rows else "function", every, operation)


def mixed(kind: str, sums: Iterable[Sum], operation: Operation) -> list[Mixing]:
    """Make a mixing for each sum over rows that `operation` uses in a way that is not linear."""
    return [Mixing(kind, x.operation, operation, x.is_mean) for x in sums]


def _with_factor(operation: Operation, states: Sequence[State], state: State) -> State:
    """Return the state of a product or quotient, with a more exact kind for some mixings.

    If one factor is a function of sums, such as `1 / max(sum, 1)`, and the other depends on rows,
    the mixing of the function gets the kind "statistic", "ratio" or "product".
    """
    if not state.mixings:
        return state
    mixings = {*state.mixings}
    for this, other in (states, states[::-1]):
        functions = [x for x in this.mixings if x.kind == "function"]
        if this.depends or not functions or not other.depends:
            continue
        is_quotient = operation.name == "div" and this is states[1]
        for function in functions:
            inverse = function.at.name == "div" or function.at.equation.params.get("y", 0) in (
                -1,
                -1.0,
            )
            mixings.discard(function)
            if other.rows:
                mixings.add(dataclasses.replace(function, kind="statistic"))
            elif is_quotient or inverse:
                mixings.add(Mixing("ratio", operation, operation))
            else:
                mixings.add(dataclasses.replace(function, kind="product"))
    return dataclasses.replace(state, mixings=frozenset(mixings))


def collective(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    """Rule of a collective. One over all axes that split rows returns the same on all devices."""
    params = operation.equation.params
    axes = params.get("axis_name", params.get("axes", ()))
    axes = frozenset(axes if isinstance(axes, tuple | list) else (axes,))
    results = []
    for state in states:
        settled = state.settled | axes
        if operation.name in ("ppermute", "all_to_all") and state.depends:
            # Devices may add up what they pass on, or exchange rows.
            results.append(State(differs=True, is_known=False))
        elif rows.axes <= settled:
            results.append(State())
        elif operation.name in ("psum", "psum_invariant", "pmax", "pmin"):
            results.append(dataclasses.replace(state, settled=settled))
        else:
            results.append(dataclasses.replace(unknown(state), settled=settled))
    return results
