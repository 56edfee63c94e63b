"""Rules for operations that move, join, cut or reduce dims.

A state says how a value depends on the rows of the batch: see `row_states`. A rule gets these rows,
an operation and the states of its inputs, and returns the states of its outputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .ir import Operation
from .operation_kinds import shape_of
from .row_rules import Rows, combined, joined_rows, linear, mixed
from .row_states import (
    Mixing,
    NotAligned,
    Parts,
    State,
    Sum,
    as_rows,
    has_outer,
    merged,
    reshaped,
    unknown,
)


def moved(state: State, places: Mapping[int, int], **changes: Any) -> State:
    """Return the state of a value after its dims have moved.

    Args:
        state: the state of the value before.
        places: for each dim that is left, its new index.
        changes: other fields of the state to replace.
    """
    if not state.rows and not state.noise and state.index is None and not changes:
        return state
    rows = {dim if dim < 0 else places[dim]: x for dim, x in state.rows if dim < 0 or dim in places}
    index = None
    if state.index is not None and state.index[0] in places and state.index[1] is None:
        index = places[state.index[0]], None
    return dataclasses.replace(
        state,
        rows=as_rows(rows),
        noise_dims=frozenset(places[dim] for dim in state.noise_dims if dim in places),
        index=index,
        **changes,
    )


def transpose(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    permutation = operation.equation.params["permutation"]
    return [moved(states[0], {int(old): new for new, old in enumerate(permutation)})]


def broadcast(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    out, old = operation.outputs[0].shape, shape_of(operation.inputs[0])
    dims = [int(x) for x in operation.equation.params["broadcast_dimensions"]]
    state = moved(states[0], dict(enumerate(dims)))
    grown = {new: out[new] for dim, new in enumerate(dims) if old[dim] != out[new]}
    if grown:
        wider = {dim: (*x, (grown[dim], 0)) if dim in grown else x for dim, x in state.rows}
        index = None if state.index is None or state.index[0] in grown else state.index
        state = dataclasses.replace(
            state, rows=as_rows(wider), noise_dims=state.noise_dims.difference(grown), index=index
        )
    return [state]


def squeeze(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    num = len(shape_of(operation.inputs[0]))
    gone = {int(x) % num for x in operation.equation.params["dimensions"]}
    if any(dim in gone for dim, _ in states[0].rows):
        return [unknown(*states)]  # the dim of rows is gone, where a device has one row
    kept = [dim for dim in range(num) if dim not in gone]
    return [moved(states[0], {old: new for new, old in enumerate(kept)})]


def expand_dims(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    num = len(operation.outputs[0].shape)
    added = {int(x) % num for x in operation.equation.params["dimensions"]}
    kept = [dim for dim in range(num) if dim not in added]
    return [moved(states[0], dict(enumerate(kept)))]


def reshape(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    old, new = shape_of(operation.inputs[0]), operation.outputs[0].shape
    state = states[0]
    if operation.equation.params["dimensions"] is not None:
        return [unknown(*states)]
    try:
        dims = as_rows(reshaped(dict(state.rows), old, new, rows.num)) if state.rows else ()
    except NotAligned:
        return [unknown(*states)]
    is_all = len(state.noise_dims) == sum(size > 1 for size in old)
    noise_dims = [dim for dim, size in enumerate(new) if size > 1 and is_all and state.noise]
    index = None
    if state.index is not None and state.index[1] is None:
        # The dim keeps its place among those of more than one element.
        places = [
            [dim for dim, size in enumerate(x) if size > 1 or dim == state.index[0] and x is old]
            for x in (old, new)
        ]
        if [old[x] for x in places[0]] == [new[x] for x in places[1]]:
            index = places[1][places[0].index(state.index[0])], None
    return [dataclasses.replace(state, rows=dims, noise_dims=frozenset(noise_dims), index=index)]


def cut(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    """Rule of `slice` and `split`: a result keeps the state of the input if it has all its rows.

    A result has all rows if no dim with rows is cut. A dim that repeats all rows in several blocks
    may be cut between two blocks. Otherwise the state of the result is unknown.
    """
    params, shape = operation.equation.params, shape_of(operation.inputs[0])
    if operation.name == "split":
        starts = [0]
        for size in params["sizes"]:
            starts.append(starts[-1] + int(size))
        axis = int(params["axis"])
        ranges = [{axis: (a, b, 1)} for a, b in zip(starts, starts[1:], strict=False)]
    else:
        strides = params["strides"] or (1,) * len(shape)
        each = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        ranges = [{i: tuple(map(int, x)) for i, x in enumerate(each)}]
    return [_cut_to(states[0], shape, each) for each in ranges]


def _cut_to(state: State, shape: Sequence[int], ranges: Mapping[int, Any]) -> State:
    cut = {}
    for dim, parts in state.rows:
        start, limit, stride = ranges.get(dim, (0, 0, 1)) if dim >= 0 else (0, 0, 1)
        if dim < 0 or dim not in ranges or (start, limit, stride) == (0, shape[dim], 1):
            cut[dim] = parts
            continue
        first, *rest = parts
        tail = math.prod(size for size, _ in rest)
        if first[1] or stride != 1 or start % tail or limit % tail:
            return unknown(state)
        cut[dim] = ((limit - start) // tail, 0), *rest
    return dataclasses.replace(state, rows=as_rows(cut), index=None)


def concatenate(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    axis = int(operation.equation.params["dimension"])
    sizes = [shape_of(x)[axis] for x in operation.inputs]
    parts = [x.parts(axis) for x in states]
    joined = next((x for x in parts if x is not None), None)
    if joined is not None:
        # The result is blocks of all rows, one after the other, and inputs without rows.
        block = joined[1:] if not joined[0][1] else joined
        size = math.prod(x for x, _ in block)
        is_same = all(x is None or x in (block, joined) or x[1:] == block for x in parts)
        if not is_same or any(x % size for x in sizes):
            return [unknown(*states)]
        joined = (sum(sizes) // size, 0), *block
    others = [dataclasses.replace(x, rows=tuple(y for y in x.rows if y[0] != axis)) for x in states]
    try:
        state = linear(rows, operation, others)
    except NotAligned:
        return [unknown(*states)]
    if not state.is_known or joined is None:
        columns = {
            at: x.index
            for at, x in enumerate(states)
            if x.index is not None and x.index[1] is None and x.index[0] != axis
        }
        if columns and axis == len(operation.outputs[0].shape) - 1 and set(sizes) == {1}:
            dims = {x[0] for x in columns.values() if x}
            if len(dims) == 1:
                state = dataclasses.replace(state, index=(dims.pop(), frozenset(columns)))
        return [state]
    dims = as_rows({**dict(state.rows), axis: joined})
    return [combined(rows, operation, [dataclasses.replace(state, rows=dims)], dims, state.sums)]


def tile(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    reps = [int(x) for x in operation.equation.params["reps"]]
    tiled = {
        dim: ((reps[dim], 0), *parts) if dim >= 0 and reps[dim] > 1 else parts
        for dim, parts in states[0].rows
    }
    grown = {dim for dim, num in enumerate(reps) if num > 1}
    state = states[0]
    return [
        dataclasses.replace(
            state, rows=as_rows(tiled), noise_dims=state.noise_dims - grown, index=None
        )
    ]


def pad(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    config = [tuple(map(int, x)) for x in operation.equation.params["padding_config"]]
    if any(dim >= 0 and config[dim] != (0, 0, 0) for dim, _ in states[0].rows):
        return [unknown(*states)]
    return [linear(rows, operation, states)]


def reverse(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    reversed_dims = {int(x) for x in operation.equation.params["dimensions"]}
    if any(dim in reversed_dims for dim, _ in states[0].rows):
        return [unknown(*states)]
    return [dataclasses.replace(states[0], index=None)]


def reduce(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    """Rule of reductions over dims, such as `reduce_sum`, `reduce_max` and `argmax`."""
    num, name = len(shape_of(operation.inputs[0])), operation.name
    axes = {int(x) for x in operation.equation.params["axes"]}
    kept = [dim for dim in range(num) if dim not in axes]
    state = moved(states[0], {old: new for new, old in enumerate(kept)})
    if name in ("reduce_and", "reduce_or") and not has_outer(state.rows, rows.num):
        # A check of all rows, or the condition of a loop over them: no statistic.
        return [State(differs=state.differs)]
    (mixings, sums) = (frozenset(), state.sums)
    if name != "reduce_sum" and state.sums:
        sums = frozenset()
        mixings = mixed("statistic" if states[0].rows else "function", state.sums, operation)
    if _is_over_rows(states[0], state, rows):
        if name == "reduce_sum":
            sums = sums | {Sum(operation)}
        else:
            mixings = [*mixings, Mixing("extreme", operation, operation)]
    result = dataclasses.replace(state, sums=sums, mixings=state.mixings.union(mixings))
    return [result] * len(operation.outputs)


def _is_over_rows(before: State, after: State, rows: Rows) -> bool:
    """Return whether a reduction from state `before` to `after` is over all rows of a device."""
    return len(after.rows) < len(before.rows) and not has_outer(after.rows, rows.num)


def along(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    """Rule of sorts, top-k and cumulative sums, which combine elements along one dim.

    A mixing is found if that dim has the rows.
    """
    params, shape = operation.equation.params, shape_of(operation.inputs[0])
    axis = params.get("dimension", params.get("axis"))
    axis = len(shape) - 1 if axis is None or operation.name.endswith("top_k") else int(axis)
    try:
        dims = joined_rows(states)
    except NotAligned:
        return [unknown(*states)] * len(operation.outputs)
    sums = frozenset().union(*(x.sums for x in states))
    mixings = []
    if sums and operation.name != "cumsum":
        mixings, sums = mixed("statistic" if dims else "function", sums, operation), frozenset()
    rest = tuple(x for x in dims if x[0] != axis)
    state = combined(rows, operation, states, dims, sums, mixings)
    state = dataclasses.replace(state, noise=frozenset(), noise_dims=frozenset())
    if len(rest) < len(dims) and not has_outer(rest, rows.num):
        found = Mixing("order", operation, operation)
        state = dataclasses.replace(unknown(state), mixings=state.mixings | {found})
    elif operation.name.endswith("top_k") and len(rest) < len(dims):
        state = unknown(state)
    return [state] * len(operation.outputs)


def dot(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    left, right = states
    (contracted, batch) = operation.equation.params["dimension_numbers"]
    shapes = [shape_of(x) for x in operation.inputs]
    free = [
        [d for d in range(len(shape)) if d not in (*map(int, contracted[i]), *map(int, batch[i]))]
        for i, shape in enumerate(shapes)
    ]
    places = [{int(dim): at for at, dim in enumerate(batch[i])} for i in range(2)]
    places[0] |= {dim: len(batch[0]) + at for at, dim in enumerate(free[0])}
    places[1] |= {dim: len(batch[0]) + len(free[0]) + at for at, dim in enumerate(free[1])}
    kept = [
        dataclasses.replace(moved(x, at), noise=frozenset(), noise_dims=frozenset(), index=None)
        for x, at in zip(states, places, strict=True)
    ]
    try:
        dims = joined_rows(kept)
        lost: list[Parts | None] = [
            merged(left.parts(int(a)), right.parts(int(b)))
            for a, b in zip(contracted[0], contracted[1], strict=True)
        ]
    except NotAligned:
        return [unknown(*states)]
    mixings, sums = [], left.sums | right.sums
    if sums and left.depends and right.depends:
        has_rows = bool(left.rows or right.rows)
        mixings = mixed("statistic" if has_rows else "product", sums, operation)
        sums = frozenset()
    gone = [x for x in lost if x is not None]
    is_over = has_outer([(0, x) for x in gone], rows.num)
    if is_over and has_outer(dims, rows.num):
        found = {*unknown(*states).mixings, Mixing("pairs", operation, operation)}
        return [dataclasses.replace(unknown(*states), mixings=frozenset(found))]
    if gone and not (left.depends and right.depends) and _may_place(rows, operation, kept):
        return [unknown(*states)]
    if gone and not has_outer(dims, rows.num):
        sums = sums | {Sum(operation)}
    return [combined(rows, operation, kept, dims, sums, mixings)]


def _may_place(rows: Rows, operation: Operation, kept: Sequence[State]) -> bool:
    """Return whether a product that sums over rows may only permute them, by a 0-1 matrix.

    `kept` has the states of both factors, with their dims at their places in the product.
    """
    depends = {dim for x in kept for dim, _ in x.rows}
    sizes = enumerate(operation.outputs[0].shape)
    return any(size % rows.num == 0 for dim, size in sizes if dim not in depends)


def convolution(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    params, (inputs, kernel) = operation.equation.params, states
    numbers = params["dimension_numbers"]
    dims = {dim for dim, _ in inputs.rows if dim >= 0}
    if kernel.rows or dims - {numbers.lhs_spec[0]} or params["batch_group_count"] != 1:
        return [unknown(*states)]
    inputs = moved(inputs, {numbers.lhs_spec[0]: numbers.out_spec[0]})
    sums, mixings = inputs.sums | kernel.sums, []
    if kernel.sums and inputs.depends:
        mixings = mixed("statistic" if inputs.rows else "product", sums, operation)
        sums = frozenset()
    plain = [
        dataclasses.replace(x, noise=frozenset(), noise_dims=frozenset()) for x in (inputs, kernel)
    ]
    return [combined(rows, operation, plain, inputs.rows, sums, mixings)]


def windows(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    """Rule of reductions over windows. The result is unknown if a window has several rows."""
    params = operation.equation.params
    sizes, steps = params["window_dimensions"], params["window_strides"]
    for dim, _ in states[0].rows:
        if dim >= 0 and (sizes[dim], steps[dim]) != (1, 1):
            return [unknown(*states)] * len(operation.outputs)
    state, sums = states[0], states[0].sums
    if sums and operation.name != "reduce_window_sum":
        found = state.mixings.union(mixed("function", sums, operation))
        state = dataclasses.replace(state, sums=frozenset(), mixings=found)
    return [dataclasses.replace(state, index=None)] * len(operation.outputs)


def batched(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    """Rule of matrix decompositions and FFTs.

    The result is unknown if they combine elements of several rows, or read a sum over rows.
    """
    params = operation.equation.params
    last = len(params["fft_lengths"]) if operation.name == "fft" else 2
    shapes = [shape_of(x) for x in operation.inputs]
    for state, shape in zip(states, shapes, strict=True):
        if state.sums or any(dim >= len(shape) - last for dim, _ in state.rows):
            return [unknown(*states)] * len(operation.outputs)
    try:
        dims = joined_rows(states)
    except NotAligned:
        return [unknown(*states)] * len(operation.outputs)
    if any(dim >= len(x.shape) for dim, _ in dims for x in operation.outputs):
        return [unknown(*states)] * len(operation.outputs)
    return [combined(rows, operation, states, dims, frozenset())] * len(operation.outputs)
