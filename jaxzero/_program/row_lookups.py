"""Rules for lookups, writes at indices, and random bits.

A state says how a value depends on the rows of the batch: see `row_states`. A rule gets these rows,
an operation and the states of its inputs, and returns the states of its outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .ir import Operation
from .operation_kinds import shape_of
from .row_dims import moved
from .row_rules import Rows, combined, joined_rows, linear, mixed
from .row_states import NotAligned, Parts, State, Sum, as_rows, has_outer, merged, unknown


def gather(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    params, (operand, indices) = operation.equation.params, states
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    shape, out = shape_of(operation.inputs[0]), operation.outputs[0].shape
    offsets = [int(x) for x in numbers.offset_dims]
    batch = [dim for dim in range(len(out)) if dim not in offsets]  # the dims of `indices`, in turn
    batching = [int(x) for x in numbers.operand_batching_dims]
    gone = {*map(int, numbers.collapsed_slice_dims), *batching}
    window = dict(zip([x for x in range(len(shape)) if x not in gone], offsets, strict=True))
    placed: dict[int, Parts] = {}
    for dim, parts in operand.rows:
        if dim < 0:
            place = dim
        elif dim in batching:
            place = batch[int(numbers.start_indices_batching_dims[batching.index(dim)])]
        elif dim in window and sizes[dim] == shape[dim]:
            place = window[dim]
        else:
            at = _index_dim(indices, numbers.start_index_map, dim)
            if at is None or out[batch[at]] != shape[dim]:
                return [unknown(*states)]
            place = batch[at]
        placed[place] = parts
    last = len(shape_of(operation.inputs[1])) - 1
    if any(dim == last for dim, _ in indices.rows):
        return [unknown(*states)]
    places = {dim: batch[dim] for dim in range(last)}
    plain = dataclasses.replace(operand, rows=as_rows(placed), noise=frozenset(), index=None)
    states = plain, dataclasses.replace(moved(indices, places), noise=frozenset(), index=None)
    try:
        dims = joined_rows(states)
    except NotAligned:
        return [unknown(*states)]
    sums, mixings = operand.sums | indices.sums, []
    if indices.sums or (operand.sums and indices.rows):
        mixings, sums = mixed("statistic", sums, operation), frozenset()
    return [combined(rows, operation, states, dims, sums, mixings)]


def _index_dim(indices: State, index_map: Sequence[int], dim: int) -> int | None:
    """Return the dim of `indices` along which the indices into dim `dim` count 0, 1, ..., or None.

    `index_map` has, for each column of the indices, the dim of the operand that it indexes.
    """
    if indices.index is None or dim not in map(int, index_map):
        return None
    at, columns = indices.index
    column = [int(x) for x in index_map].index(dim)
    return at if columns is None or column in columns else None


def scatter(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    """Rule of `scatter` and `scatter-add`. Adding several rows at one index is a sum over rows."""
    operand, indices, updates = states
    numbers = operation.equation.params["dimension_numbers"]
    shape, update_shape = (shape_of(operation.inputs[i]) for i in (0, 2))
    windows = [int(x) for x in numbers.update_window_dims]
    batching = [int(x) for x in numbers.operand_batching_dims]
    gone = {*map(int, numbers.inserted_window_dims), *batching}
    kept = [x for x in range(len(shape)) if x not in gone]
    window = dict(zip(windows, kept, strict=True))
    batch = [dim for dim in range(len(update_shape)) if dim not in windows]
    index_map = [int(x) for x in numbers.scatter_dims_to_operand_dims]
    of_indices = [int(x) for x in numbers.scatter_indices_batching_dims]
    places = dict(window)
    for at, dim in enumerate(batch):
        if at in of_indices:
            places[dim] = batching[of_indices.index(at)]
        for target in index_map:
            if _index_dim(indices, index_map, target) == at:
                places[dim] = target
    last = len(shape_of(operation.inputs[1])) - 1
    if any(dim == last for dim, _ in indices.rows):
        return [unknown(*states)]
    moved_indices = moved(indices, {dim: batch[dim] for dim in range(last)})
    try:
        both = dict(updates.rows)
        for dim, parts in moved_indices.rows:
            joined = merged(both.get(dim), parts)
            assert joined is not None
            both[dim] = joined
        partial = any(
            dim >= 0 and dim in window and update_shape[dim] != shape[window[dim]] for dim in both
        )
        given = dataclasses.replace(updates, rows=as_rows(both))
        given = dataclasses.replace(moved(given, places), noise=frozenset(), index=None)
        state = linear(rows, operation, (dataclasses.replace(operand, index=None), given))
    except NotAligned:
        return [unknown(*states)]
    lost = len(given.rows) < len(both)
    if indices.sums or partial or (lost and has_outer(given.rows, rows.num)):
        return [unknown(*states)]
    state = dataclasses.replace(state, mixings=state.mixings | indices.mixings)
    if updates.sums and moved_indices.rows:
        found = state.mixings.union(mixed("statistic", updates.sums, operation))
        return [dataclasses.replace(state, sums=operand.sums, mixings=found)]
    if not lost:
        return [state]
    # An index that is not understood may put each row in a place of its own.
    may_place = any(shape[dim] % rows.num == 0 for dim in index_map)
    if operation.name not in ("scatter-add", "scatter_add") or may_place or not indices.is_known:
        return [unknown(*states)]
    return [dataclasses.replace(state, sums=state.sums | {Sum(operation)})]


def slice_at(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    """Rule of `dynamic_slice`. The result is unknown if rows are cut off or decide the start."""
    operand, *starts = states
    shape, sizes = shape_of(operation.inputs[0]), operation.equation.params["slice_sizes"]
    is_cut = any(dim >= 0 and sizes[dim] != shape[dim] for dim, _ in operand.rows)
    if is_cut or any(x.depends or not x.is_known for x in starts):
        return [unknown(*states)]
    return [combined(rows, operation, states, operand.rows, operand.sums)]


def write_at(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    """Rule of `dynamic_update_slice`. The result is unknown if only some rows are written."""
    operand, updates, *starts = states
    shape, update_shape = (shape_of(operation.inputs[i]) for i in (0, 1))
    changed = {*operand.rows, *updates.rows}
    is_cut = any(dim >= 0 and update_shape[dim] != shape[dim] for dim, _ in changed)
    if is_cut or any(x.depends or not x.is_known for x in starts):
        return [unknown(*states)]
    try:
        return [linear(rows, operation, (operand, updates))]
    except NotAligned:
        return [unknown(*states)]


def iota(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    return [State(index=(int(operation.equation.params["dimension"]), None))]


def device(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    """Rule of `axis_index`, whose result differs between devices."""
    return [State(differs=True)]


def random_bits(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    (key,) = states
    if key.depends or key.differs or not key.is_known:
        return [dataclasses.replace(unknown(key), differs=True)]
    dims = frozenset(range(len(operation.outputs[0].shape)))
    return [State(noise=frozenset([operation]), noise_dims=dims)]


def key(rows: Rows, operation: Operation, states: Sequence[State]) -> list[State]:
    """Rule of operations that make a random key: it differs between devices if an input does."""
    differs = any(x.depends or x.differs or not x.is_known for x in states)
    return [State(differs=differs)] * len(operation.outputs)
