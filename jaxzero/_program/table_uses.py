"""Find tables: weights that a program only looks up by integer ids.

A table is read by `gather` operations that take whole rows along its first dim, in the program or
in loops of which it is a constant. Its gradient is then a sum of `scatter-add`s into zeros. A
`Lookup` includes the casts before and after it, and a sum over some of its ids (a bag of rows), as
cast and summed rows are fewer bytes to send.

    rows = sum(cast(cast(table)[ids]))        grads = cast(zeros.at[ids].add(cast(broadcast(ct))))
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from .ir import Barrier, Block, Loop, Operation, Value
from .movable_ops import ConvertDtype
from .operation_kinds import Branch, addends, is_zero

_MODES = lax.GatherScatterMode
_KNOWN_MODES = (_MODES.CLIP, _MODES.FILL_OR_DROP, _MODES.PROMISE_IN_BOUNDS)


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """One read of rows of a table, or one addition of cotangents to rows of its gradient.

    Attributes:
        operation: the `gather`, or the `scatter-add`.
        array: the result of the read, or the cotangents to add: `[..., *row]`, dims in any order.
        dtypes: the dtypes to which rows are cast, in turn. If rows are read, the last is the dtype
            of `array`. If cotangents are added, the last is the dtype in which they are sent.
        rows: the dims of `array` that are those of a row, in order.
        kept: the dims of the ids that `array` has, in order. Reads sum over the other dims, and
            additions repeat `array` along them.
        done: the operations (casts, a sum) that a read applies to the rows to make `array`.
        trips: how often it runs in a step, loops around it included.
    """

    operation: Operation
    array: Value
    dtypes: tuple[Any, ...]
    rows: tuple[int, ...]
    kept: tuple[int, ...]
    done: tuple[Operation, ...] = ()
    trips: int = 1

    @property
    def ids(self) -> Value:
        """The ids, integers `[..., 1]`."""
        ids = self.operation.inputs[1]
        assert isinstance(ids, Value)
        return ids

    @property
    def summed(self) -> tuple[int, ...]:
        """The dims of the ids over which a read sums rows, or cotangents are repeated."""
        return tuple(dim for dim in range(len(self.ids.shape) - 1) if dim not in self.kept)

    @property
    def num(self) -> int:
        """The number of rows in `array`: of sums, or of cotangents that are not repeated yet."""
        return math.prod(self.ids.shape[dim] for dim in self.kept)

    @property
    def num_ids(self) -> int:
        return math.prod(self.ids.shape)

    @property
    def is_clipped(self) -> bool:
        """Whether an id out of bounds stands for the nearest row."""
        mode = self.operation.equation.params["mode"]
        if self.operation.name == "gather":
            return mode != _MODES.FILL_OR_DROP
        return mode == _MODES.CLIP

    @property
    def fill(self) -> Any:
        """The value of rows that are read at ids out of bounds, if ids are not clipped."""
        value = self.operation.equation.params["fill_value"]
        return jnp.nan if value is None else value


@dataclasses.dataclass(frozen=True)
class Table:
    """All reads of a table in a program, and all additions to its gradient."""

    reads: tuple[Lookup, ...]
    adds: tuple[Lookup, ...]  # empty if it has no gradient


@dataclasses.dataclass(frozen=True)
class TableView:
    """A value that is a table, or a table after casts."""

    table: int  # its number
    dtypes: tuple[Any, ...] = ()  # of the casts, in turn


@dataclasses.dataclass
class TableGradient:
    """How a block makes the gradient of a table, or adds to a sum that a loop carries.

    Attributes:
        root: the gradient, or the sum.
        before: in a loop's body, the sum before an iteration.
        adds: the rows that are added.
        loops: loops that sum up rows, the index of the sum in outputs, and how a body adds to it.
        done: additions and casts on the way to `root`.
    """

    root: Value
    before: Value | None = None
    adds: list[Lookup] = dataclasses.field(default_factory=list)
    loops: list[tuple[Loop, int, TableGradient]] = dataclasses.field(default_factory=list)
    done: set[Operation] = dataclasses.field(default_factory=set)

    def lookups(self, trips: int = 1) -> Iterator[Lookup]:
        """Yield all additions of rows, those in loops included."""
        yield from (dataclasses.replace(x, trips=trips) for x in self.adds)
        for loop, _, inside in self.loops:
            yield from inside.lookups(trips * loop.length)


def find_tables(
    block: Block, weights: Mapping[Value, int], gradients: Mapping[int, int]
) -> dict[int, Table]:
    """Find the weights that a program only looks up; return their uses by number of the weight.

    Args:
        block: the program.
        weights: for each input that is a weight, its number.
        gradients: for the index of each output that is a gradient, the number of its weight.
    """
    reads: dict[int, list[Lookup]] = {}
    others: set[int] = set()
    _walk(block, {x: TableView(i) for x, i in weights.items()}, 1, reads, others)
    row_sums = find_gradients(block, {k: i for k, i in gradients.items() if i in reads})
    trained = {*gradients.values()}
    others |= trained - row_sums.keys()
    return {
        i: Table(tuple(lookups), tuple(row_sums[i].lookups()) if i in trained else ())
        for i, lookups in reads.items()
        if i not in others
    }


def find_gradients(block: Block, outputs: Mapping[int, int]) -> dict[int, TableGradient]:
    """Find how a block makes the gradients of tables, if they are sums of rows.

    Args:
        block: the program, or the body of a loop.
        outputs: by index of the output, the number of the table.

    Returns:
        By number of the table, how its gradient is made.
    """
    gradients = {}
    for k, i in outputs.items():
        root = block.outputs[k]
        gradient = _gradient(block, root, None) if isinstance(root, Value) else None
        if gradient is not None:
            gradients[i] = gradient
    return gradients


def views_after(operation: Operation, views: Mapping[Any, TableView]) -> dict[Value, TableView]:
    """Return the outputs of a barrier or cast that are views of tables, each with its view."""
    if isinstance(operation, Barrier):
        pairs = zip(operation.inputs, operation.outputs, strict=True)
        return {out: views[x] for x, out in pairs if x in views}
    source = operation.source
    if source in views and is_cast(operation):
        out, view = operation.outputs[0], views[source]
        return {out: dataclasses.replace(view, dtypes=(*view.dtypes, out.dtype))}
    return {}


def find_reads(block: Block, views: Mapping[Any, TableView]) -> dict[Operation, Lookup]:
    """Find the lookups in a block; return each by its `gather`."""
    views, lookups = {**views}, {}
    if not any(map(takes_rows, block.operations)):
        return lookups
    readers: dict[Any, list[Operation]] = {}
    for operation in block.operations:
        for table in operation.inputs:
            readers.setdefault(table, []).append(operation)
    outputs = {*block.outputs}
    for operation in block.operations:
        views |= views_after(operation, views)
        table = operation.inputs[0] if operation.inputs else None
        if table in views and takes_rows(operation):
            lookups[operation] = _read(operation, views[table].dtypes, readers, outputs)
    return lookups


def is_loop(operation: Operation) -> bool:
    """Return whether an operation is a loop and no `Branch`, which may not run on all devices."""
    return isinstance(operation, Loop) and not isinstance(operation, Branch)


def is_cast(operation: Operation) -> bool:
    """Return whether an operation is a cast between float dtypes."""
    if not isinstance(operation.view(), ConvertDtype) or operation.source is None:
        return False
    ends = (operation.source, operation.outputs[0])
    return all(jnp.issubdtype(x.dtype, jnp.floating) for x in ends)


def _walk(
    block: Block,
    views: dict[Value, TableView],
    trips: int,
    reads: dict[int, list[Lookup]],
    others: set[int],
) -> None:
    """Collect the lookups of each table in `reads`, and weights with other uses in `others`."""
    lookups = find_reads(block, views)
    for operation in block.operations:
        if views.keys().isdisjoint(operation.inputs):
            continue
        read = {i: views[x] for i, x in enumerate(operation.inputs) if x in views}
        if after := views_after(operation, views):
            views |= after
        elif operation in lookups and list(read) == [0]:
            lookup = dataclasses.replace(lookups[operation], trips=trips)
            reads.setdefault(read[0].table, []).append(lookup)
        elif is_loop(operation) and max(read) < operation.num_constants:  # pyright: ignore
            assert isinstance(operation, Loop)
            inside = {operation.body.inputs[i]: view for i, view in read.items()}
            _walk(operation.body, inside, trips * operation.length, reads, others)
        else:
            others.update(view.table for view in read.values())
    others.update(views[x].table for x in block.outputs if x in views)


def _gradient(block: Block, root: Value, before: Value | None) -> TableGradient | None:
    """Find the terms of the sum `root`; return None unless all are rows, or the carry `before`."""
    counts = Counter(x for operation in block.operations for x in operation.inputs)
    counts.update(block.outputs)
    gradient = TableGradient(root, before)
    pending: list[Any] = [root]
    is_carried = before is None
    while pending:
        atom = pending.pop()
        if atom is before and atom is not root and counts[atom] == 1:
            is_carried = True
            continue
        if is_zero(atom, block.makers) and atom is not root:
            continue
        operation = block.makers.get(atom)
        if operation is None or counts[atom] != 1:
            return None
        if is_zero(atom, block.makers):
            continue
        if adds_rows(operation) and is_zero(operation.inputs[0], block.makers):
            gradient.adds.append(_added(block, operation))
            gradient.done.add(operation)
        elif terms := addends(operation) or (operation.values if is_cast(operation) else []):
            gradient.done.add(operation)
            pending += terms
        elif is_loop(operation):
            assert isinstance(operation, Loop)
            position = operation.outputs.index(atom)
            inside = _carried(operation, position)
            if inside is None:
                return None
            gradient.loops.append((operation, position, inside))
            pending.append(operation.inputs[operation.num_constants + position])
        else:
            return None
    return gradient if is_carried else None


def _carried(loop: Loop, position: int) -> TableGradient | None:
    """Return how a loop adds rows to its output `position`; None if that is no sum of rows."""
    if position >= loop.num_carry:
        return None
    result = loop.body.outputs[position]
    before = loop.body.inputs[loop.num_constants + position]
    return _gradient(loop.body, result, before) if isinstance(result, Value) else None


def _read(
    operation: Operation,
    dtypes: tuple[Any, ...],
    readers: Mapping[Any, list[Operation]],
    outputs: set[Any],
) -> Lookup:
    """Return the lookup of a `gather`, with the casts and the sum of rows after it.

    Casts and sum are included only if nothing else reads the rows.
    """
    array = operation.outputs[0]
    numbers = operation.equation.params["dimension_numbers"]
    rows = tuple(int(x) for x in numbers.offset_dims)
    batch = [dim for dim in range(len(array.shape)) if dim not in rows]
    plain = Lookup(operation, array, dtypes or (array.dtype,), rows, tuple(range(len(batch))))
    candidates, lookup = [plain], plain
    while len(following := readers.get(lookup.array, ())) == 1 and lookup.array not in outputs:
        (after,) = following
        out, done = after.outputs[0] if after.outputs else None, (*lookup.done, after)
        if out is not None and is_cast(after):
            dtypes = (*lookup.dtypes, out.dtype)
            lookup = dataclasses.replace(lookup, array=out, dtypes=dtypes, done=done)
            candidates.append(lookup)
            continue
        axes = {*after.equation.params["axes"]} if after.name == "reduce_sum" else {*rows}
        if out is not None and axes.isdisjoint(rows):
            left = [dim for dim in range(len(array.shape)) if dim not in axes]
            return dataclasses.replace(
                lookup,
                array=out,
                rows=tuple(left.index(dim) for dim in rows),
                kept=tuple(i for i, dim in enumerate(batch) if dim not in axes),
                done=done,
            )
        break
    return min(candidates, key=lambda x: x.array.dtype.itemsize)


def _added(block: Block, operation: Operation) -> Lookup:
    """Return the lookup of a `scatter-add`, with the casts and the broadcast before it."""
    array = operation.inputs[2]
    assert isinstance(array, Value)
    numbers = operation.equation.params["dimension_numbers"]
    rows = tuple(int(x) for x in numbers.update_window_dims)
    batch = [dim for dim in range(len(array.shape)) if dim not in rows]
    kept = tuple(range(len(batch)))
    plain = Lookup(operation, array, (array.dtype,), rows, kept)
    candidates, lookup = [plain], plain
    while (maker := block.makers.get(lookup.array)) is not None and maker.source is not None:
        source = maker.source
        if is_cast(maker):
            lookup = dataclasses.replace(
                lookup, array=source, dtypes=(source.dtype, *lookup.dtypes)
            )
        elif maker.name == "broadcast_in_dim" and len(lookup.kept) == len(batch):
            dims = [int(x) for x in maker.equation.params["broadcast_dimensions"]]
            same = all(source.shape[i] == array.shape[dim] for i, dim in enumerate(dims))
            if not same or not {*rows} <= {*dims}:
                break
            lookup = dataclasses.replace(
                lookup,
                array=source,
                rows=tuple(dims.index(dim) for dim in rows),
                kept=tuple(i for i, dim in enumerate(batch) if dim in dims),
            )
            candidates = []
        else:
            break
        candidates.append(lookup)
    lookup = min(candidates, key=lambda x: x.array.dtype.itemsize)
    sizes = [jnp.dtype(x).itemsize for x in lookup.dtypes]
    return dataclasses.replace(lookup, dtypes=lookup.dtypes[: sizes.index(min(sizes)) + 1])


def takes_rows(operation: Operation) -> bool:
    """Return whether an operation is a `gather` of whole rows along the first dim."""
    if operation.name != "gather" or not isinstance(operation.inputs[1], Value):
        return False
    params, table = operation.equation.params, operation.inputs[0]
    numbers = params["dimension_numbers"]
    return (
        isinstance(table, Value)
        and 0 not in operation.inputs[1].shape
        and _is_first(numbers.collapsed_slice_dims)
        and _is_first(numbers.start_index_map)
        and not numbers.operand_batching_dims
        and tuple(params["slice_sizes"]) == (1, *table.shape[1:])
        and params["mode"] in _KNOWN_MODES
    )


def adds_rows(operation: Operation) -> bool:
    """Return whether an operation is a `scatter-add` of whole rows along the first dim."""
    if operation.name != "scatter-add":
        return False
    params, (_, ids, rows) = operation.equation.params, operation.inputs
    numbers, shape = params["dimension_numbers"], operation.outputs[0].shape
    return (
        isinstance(ids, Value)
        and isinstance(rows, Value)
        and 0 not in ids.shape
        and _is_first(numbers.inserted_window_dims)
        and _is_first(numbers.scatter_dims_to_operand_dims)
        and not numbers.operand_batching_dims
        and tuple(rows.shape[int(i)] for i in numbers.update_window_dims) == shape[1:]
        and params["mode"] in _KNOWN_MODES
    )


def _is_first(dims: Iterable[int]) -> bool:
    return tuple(dims) == (0,)
