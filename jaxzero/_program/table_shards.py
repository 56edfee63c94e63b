"""Rewrite a program so that it gets shards of tables, and exchanges ids and rows.

    rows = table[ids]                    ->  rows = read(shard, everyone's ids)
    grads = zeros.at[ids].add(ct) + ...  ->  grads = add(add(zeros of a shard, ids, ct), ...)

The gradient is then a shard of the sum over all devices. A loop that sums up the gradient carries a
shard. The caller gives the functions that read and add rows (`TableOperations`); this module puts
them in their places in the program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .ir import Atom, Barrier, Block, Loop, Operation, Value, scope
from .operation_kinds import is_costly
from .table_uses import (
    Lookup,
    TableGradient,
    TableView,
    find_gradients,
    find_reads,
    is_loop,
    views_after,
)
from .trace import operations_for, without_dead_code

Wait = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class TableOperations:
    """The functions that replace the lookups of one table.

    Ids of a lookup are `[n, k]`: each of `n` results is the sum of `k` rows.

    Attributes:
        shard: the shape and dtype of a shard of the table.
        total: the shape and dtype of a shard of its gradient.
        ids: converts the ids `[n, k]` of this device to the int32 array that is sent.
        axes: returns the mesh axes over which rows are sent, when they are added (True) or read
            (False).
        read: reads rows and sums `k` at a time. It takes a shard, the ids of all devices, the ids
            of this device, the `Lookup`, and a function that lets an array wait. It returns `[n,
            *row]`, and an array `[1]` that is computed after the rows of all devices have been
            dropped.
        add: adds rows to a shard of sums, and returns it. It takes the shard, the ids of all
            devices, the cotangents `[n, *row]`, the `Lookup`, and two functions that let an array
            wait, before it is sent over the first axis and before the other axes.
        is_large: returns whether a lookup must wait for the previous large one, so that only one
            lookup holds the rows of all devices at a time. Cotangents are small until they have
            been sent over the first axis, so a lookup's are sent over it while those of the
            previous lookup are added.
    """

    shard: jax.ShapeDtypeStruct
    total: jax.ShapeDtypeStruct
    ids: Callable[[Any], Any]
    axes: Callable[[bool], tuple[str, ...]]
    read: Callable[[Any, Any, Any, Lookup, Wait], tuple[Any, Any]]
    add: Callable[[Any, Any, Any, Lookup, Sequence[Wait]], Any]
    is_large: Callable[[Lookup], bool]


@dataclasses.dataclass(frozen=True)
class Tools:
    """The functions of each table, the function that sends ids, and the sizes of mesh axes.

    Attributes:
        tables: the tables to rewrite, by number.
        ids_of_all: a function that sends ids. It takes mesh axes, the ids `[n, k]` of several
            lookups, and the numbers of their tables. It returns the ids of all devices for each
            lookup, `[*sizes of the axes, n, k]`.
        sizes: the sizes of the mesh axes.
    """

    tables: Mapping[int, TableOperations]
    ids_of_all: Callable[[tuple[str, ...], Sequence[Any], Sequence[int]], Sequence[Any]]
    sizes: Mapping[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Replaced(Operation):
    """A Python function that runs in place of an operation, with its source line and scopes."""

    run: Callable[..., Sequence[Any]]

    def bind(self, inputs: Sequence[Any]) -> list[Any]:
        with scope(self.equation):
            return list(self.run(*inputs))


def exchange_rows(
    block: Block,
    weights: Mapping[Value, int],
    gradients: Mapping[int, int],
    tools: Tools,
) -> Block:
    """Rewrite a program so that it gets shards of tables, and makes shards of their gradients.

    Args:
        block: the program.
        weights: for each input that is a weight, its number.
        gradients: for the index of each output that is a gradient, the number of its weight.
        tools: the functions of the tables.
    """
    views = {x: TableView(i) for x, i in weights.items() if i in tools.tables}
    found = find_gradients(block, {k: i for k, i in gradients.items() if i in tools.tables})
    return without_dead_code(_BlockRewriter(tools, block, views, found).rewritten())


class _BlockRewriter:
    """Rewrites a program, or the body of a loop.

    Args:
        tools: the functions of the tables.
        block: the program, or the body.
        views: the inputs of the block that are tables.
        gradients: how the block makes the gradients of tables, by number of the table.
    """

    def __init__(
        self,
        tools: Tools,
        block: Block,
        views: Mapping[Value, TableView],
        gradients: Mapping[int, TableGradient],
    ):
        self.tools, self.tables = tools, tools.tables
        self.old = block
        self.views: dict[Any, TableView] = {**views}
        self.gradients = gradients
        self.new: dict[Any, Value] = {
            x: Value(self.tables[v.table].shard) for x, v in views.items()
        }
        self.shards = {view.table: self.new[x] for x, view in views.items()}
        self.made: list[Operation] = []
        self.ids: dict[tuple, Value] = {}  # ids of all devices
        self.totals: dict[tuple[int, Loop, int], Value] = {}  # sums of loops
        self.large: list[Value] = []  # for each large lookup so far an array to wait for

    def rewritten(self) -> Block:
        block, reads = self.old, find_reads(self.old, self.views)
        for i, gradient in self.gradients.items():
            if gradient.before is not None:
                self.new[gradient.before] = Value(self.tables[i].total)
        done = {x for gradient in self.gradients.values() for x in gradient.done}
        done.update(x for lookup in reads.values() for x in lookup.done)
        hoisted = self._send_early(reads)
        for operation in block.operations:
            if operation in hoisted:
                continue
            read = {i: self.views[x] for i, x in enumerate(operation.inputs) if x in self.views}
            self.views |= views_after(operation, self.views)
            if operation in reads:
                self._read(reads[operation], read[0].table)
            elif is_loop(operation):
                self._loop(operation, read)
            elif isinstance(operation, Barrier) and read:
                self.made += _without(operation, read)
            elif not read and operation not in done:
                self.made.append(operation)
        self.large = []
        for i, gradient in self.gradients.items():
            self._add(gradient, i)
        inputs = tuple(self.new.get(x, x) for x in block.inputs)
        outputs = tuple(self.new.get(x, x) for x in block.outputs)
        return Block(inputs, outputs, tuple(self.made))

    def _read(self, lookup: Lookup, number: int) -> None:
        """Append an operation that reads the rows of `lookup` from shards of table `number`."""
        table, shard = self.tables[number], self.shards[number]
        is_large = table.is_large(lookup)
        waits_for = self.large[-1:] if is_large else []

        def run(shard: Any, of_all: Any, ids: Any, *others: Any) -> Any:
            rows, sent = table.read(shard, of_all, _matrix(ids, lookup), lookup, _waiting(others))
            rows = rows.reshape(*(ids.shape[dim] for dim in lookup.kept), *rows.shape[1:])
            batch = [dim for dim in range(rows.ndim) if dim not in lookup.rows]
            return lax.transpose(rows, _inverse([*batch, *lookup.rows])), sent

        inputs = (shard, self._ids(lookup, number, back=False), lookup.ids, *waits_for)
        sent = Value(jax.ShapeDtypeStruct((1,), lookup.array.dtype))
        self._make("read rows", lookup.operation, inputs, (lookup.array, sent), run)
        self.large += [sent] if is_large else []

    def _add(self, gradient: TableGradient, number: int) -> None:
        """Append an operation that adds all rows of a gradient to a shard of it.

        `number` is that of the table.
        """
        table, adds = self.tables[number], gradient.adds
        starts = [] if gradient.before is None else [self.new[gradient.before]]
        starts += [self.totals[number, loop, i] for loop, i, _ in gradient.loops]
        is_large = any(map(table.is_large, adds))
        waits_for = self.large[-2:] if is_large else []
        num, last = len(starts), len(starts) + 2 * len(adds)

        def run(*arrays: Any) -> Any:
            sums = arrays[:num] or (_zeros(table.total),)
            total = functools.reduce(jnp.add, sums)
            before = [*arrays[last:]]  # elements that are known once earlier rows have been added
            for lookup, i in zip(adds, range(num, last, 2), strict=True):
                rows = _cast(arrays[i + 1], lookup.dtypes)
                batch = [dim for dim in range(rows.ndim) if dim not in lookup.rows]
                rows = lax.transpose(rows, [*batch, *lookup.rows])
                rows = rows.reshape(lookup.num, *rows.shape[len(batch) :])
                waits = [_waiting(before[-2:-1]), _waiting(before[-1:])]
                total = table.add(total, arrays[i], rows, lookup, waits)
                before += [_first_element(total)] if is_large else []
            return total, _first_element(total)

        pairs = [(self._ids(x, number, back=True), x.array) for x in adds]
        inputs = (*starts, *(x for pair in pairs for x in pair), *waits_for)
        out = self.new[gradient.root] = Value(table.total)
        done = Value(jax.ShapeDtypeStruct((1,), table.total.dtype))
        self._make("add rows", self.old.makers[gradient.root], inputs, (out, done), run)
        self.large += [done] if is_large else []

    def _ids(self, lookup: Lookup, number: int, *, back: bool) -> Value:
        """Return the ids of a lookup on all devices; append their exchange if there is none yet.

        `number` is that of the table. `back` says whether cotangents are added, or rows read.
        """
        axes = self.tables[number].axes(back)
        key = number, lookup.ids, lookup.kept, axes
        if key not in self.ids:
            self._send_ids([(lookup, number)], axes)
        return self.ids[key]

    def _send_ids(self, lookups: Sequence[tuple[Lookup, int]], axes: tuple[str, ...]) -> None:
        """Append an operation that sends the ids of several lookups over `axes` in one message.

        Args:
            lookups: the lookups, each with the number of its table.
            axes: the mesh axes.
        """
        outputs = []
        for lookup, number in lookups:
            shape = (lookup.num, lookup.num_ids // max(lookup.num, 1))
            sizes = (self.tools.sizes[axis] for axis in axes)
            outputs.append(Value(jax.ShapeDtypeStruct((*sizes, *shape), jnp.int32)))
            self.ids[number, lookup.ids, lookup.kept, axes] = outputs[-1]
        numbers = [number for _, number in lookups]

        def run(*ids: Any) -> Sequence[Any]:
            pairs = zip(ids, lookups, strict=True)
            sent = [self.tables[i].ids(_matrix(x, lookup)) for x, (lookup, i) in pairs]
            return self.tools.ids_of_all(axes, sent, numbers)

        inputs = [lookup.ids for lookup, _ in lookups]
        self._make("gather ids", lookups[0][0].operation, inputs, tuple(outputs), run)

    def _send_early(self, reads: Mapping[Operation, Lookup]) -> set[Operation]:
        """Send, in one message, the ids of all lookups that are cheap to compute from the inputs.

        Returns:
            The operations that compute these ids, which are moved before the message.
        """
        early, hoisted = [], {}
        views = dict(self.views)
        for operation in self.old.operations:
            views |= views_after(operation, views)
            if operation not in reads:
                continue
            lookup = reads[operation]
            makers = operations_for(self.old, [lookup.ids], {*self.old.inputs})
            if not any(map(_must_stay, makers)):
                early.append((lookup, views[operation.inputs[0]].table))
                hoisted |= dict.fromkeys(makers)
        by_axes: dict[tuple[str, ...], dict[tuple, tuple[Lookup, int]]] = {}
        for lookup, number in early:
            same = by_axes.setdefault(self.tables[number].axes(False), {})
            same[number, lookup.ids, lookup.kept] = lookup, number
        self.made += [x for x in self.old.operations if x in hoisted]
        for axes, lookups in by_axes.items():
            self._send_ids([*lookups.values()], axes)
        return {*hoisted}

    def _loop(self, loop: Any, read: Mapping[int, TableView]) -> None:
        """Append a loop, rewritten if it reads tables or sums up their gradients.

        `read` has the tables among its inputs, by position.
        """
        sums = {
            i: (position, inside)
            for i, gradient in self.gradients.items()
            for other, position, inside in gradient.loops
            if other is loop
        }
        if not read and not sums:
            self.made.append(loop)
            return
        views = {loop.body.inputs[i]: view for i, view in read.items()}
        gradients = {i: inside for i, (_, inside) in sums.items()}
        body = _BlockRewriter(self.tools, loop.body, views, gradients).rewritten()
        inputs, outputs = [*loop.inputs], [*loop.outputs]
        for i, view in read.items():
            inputs[i] = self.shards[view.table]
        for i, (position, _) in sums.items():
            total = self.tables[i].total
            zeros = inputs[loop.num_constants + position] = Value(total)
            self._make("zeros", loop, (), (zeros,), lambda total=total: (_zeros(total),))
            outputs[position] = self.totals[i, loop, position] = Value(total)
        changes = {"inputs": tuple(inputs), "outputs": tuple(outputs), "body": body}
        self.made.append(dataclasses.replace(loop, **changes))

    def _make(
        self,
        name: str,
        operation: Operation,
        inputs: Sequence[Atom],
        outputs: tuple[Value, ...],
        run: Callable[..., Sequence[Any]],
    ) -> None:
        """Append an operation that runs the function `run`, with the line of `operation`."""
        equation, caller = operation.equation, operation.caller
        made = Replaced(name, tuple(inputs), outputs, equation, caller=caller, run=run)
        self.made.append(made)


def _must_stay(operation: Operation) -> bool:
    """Return whether an operation may not, or should not, run before earlier operations."""
    is_barrier = isinstance(operation, Barrier | Loop)
    return is_barrier or operation.has_effects or is_costly(operation)


def _matrix(ids: Any, lookup: Lookup) -> Any:
    """Reshape ids to `[n, k]`: for each row of `lookup.array`, the `k` ids whose rows it sums."""
    ids = lax.squeeze(ids, (ids.ndim - 1,))
    return lax.transpose(ids, (*lookup.kept, *lookup.summed)).reshape(lookup.num, -1)


def _waiting(values: Sequence[Any]) -> Wait:
    """Return a function that delays an array until `values` are computed."""

    def wait(x: Any) -> Any:
        for _ in range(2 if values else 0):  # XLA drops a value that only one barrier reads
            x, _ = lax.optimization_barrier((x, tuple(values)))
        return x

    return wait


def _cast(x: Any, dtypes: Sequence[Any]) -> Any:
    for dtype in dtypes:
        x = x.astype(dtype)
    return x


def _without(barrier: Barrier, positions: Mapping[int, Any]) -> list[Operation]:
    """Remove the operands at `positions` from a barrier; remove the barrier if none is left."""
    kept = [i for i in range(len(barrier.inputs)) if i not in positions]
    if not kept:
        return []
    inputs, outputs = ([x[i] for i in kept] for x in (barrier.inputs, barrier.outputs))
    return [dataclasses.replace(barrier, inputs=tuple(inputs), outputs=tuple(outputs))]


def _first_element(x: Any) -> Any:
    return lax.slice(x, [0] * x.ndim, [1] * x.ndim).reshape(1)


def _zeros(shape: jax.ShapeDtypeStruct) -> Any:
    return jnp.zeros(shape.shape, shape.dtype)


def _inverse(permutation: Sequence[int]) -> list[int]:
    return sorted(range(len(permutation)), key=permutation.__getitem__)
