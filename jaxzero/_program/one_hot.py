"""Replace products of one-hot vectors with a weight by the equivalent lookups.

    one_hot(ids) @ table              ->  table.at[ids].get(mode="fill", fill_value=0)
    one_hot(ids).T @ ct   (backward)  ->  zeros.at[ids].add(ct, mode="drop")

A one-hot vector is a comparison of an integer with 0, 1, 2, ..., cast to floats. The lookup reads
rows exactly, where a product may round them, and does not multiply NaN of other rows by 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._mesh import is_traced
from .ir import Atom, Block, Constant, Loop, Operation, Value
from .operation_kinds import addends, shape_of
from .table_uses import TableView, is_cast, is_loop, views_after
from .trace import rewritten

_DROP = lax.GatherScatterMode.FILL_OR_DROP
_CASTS = {"convert_element_type"}


class _OneHot(NamedTuple):
    """An array of `shape` that is 1 where its index along `dim` equals `ids`, and 0 elsewhere.

    `ids` has as many dims as `shape`, and is constant along `dim`.
    """

    ids: Value
    dim: int
    shape: tuple[int, ...]

    @property
    def others(self) -> list[int]:
        return [dim for dim in range(len(self.shape)) if dim != self.dim]

    def indices(self, ids: Any) -> Any:
        """Return the array `ids` as `gather` takes it: without `dim`, and with a last dim of 1."""
        ids = lax.squeeze(lax.slice_in_dim(ids, 0, 1, axis=self.dim), (self.dim,))
        shape = tuple(self.shape[dim] for dim in self.others)
        return jnp.broadcast_to(ids, shape)[..., None]


def with_lookups(block: Block, weights: Mapping[Value, int], gradients: Mapping[int, int]) -> Block:
    """Replace products of one-hot vectors with weights by lookups; return the new program.

    Args:
        block: the program.
        weights: for each input that is a weight, its number.
        gradients: for the index of each output that is a gradient, the number of its weight.
    """
    views: dict[Any, TableView] = {x: TableView(i) for x, i in weights.items()}
    return _rewritten(block, views, [block.outputs[k] for k in gradients], {})


def _rewritten(
    block: Block,
    views: dict[Any, TableView],
    roots: Sequence[Atom],
    outside: Mapping[Any, Operation],
) -> Block:
    """Rewrite one block as `with_lookups` does.

    Args:
        block: a program, or the body of a loop.
        views: the inputs of the block that are tables.
        roots: the outputs of the block that are gradients of tables, or sums that become gradients.
        outside: for a loop's body, the operations around the loop, by the values that they make.
            An input of the body that counts 0, 1, 2, ... (an `iota`) is a key too.
    """
    views, new, makers = dict(views), [], {**outside, **block.makers}
    sums, of_loops = _sums(block, roots)
    for operation in block.operations:
        reads_table, replaced = not views.keys().isdisjoint(operation.inputs), None
        if reads_table:
            views |= views_after(operation, views)
        if is_loop(operation):
            assert isinstance(operation, Loop)
            pairs = zip(operation.inputs, operation.body.inputs, strict=True)
            constants = [*pairs][: operation.num_constants]
            read = {y: views[x] for x, y in constants if x in views}
            counting = {y: makers[x] for x, y in constants if _counts(x, makers)}
            inside = of_loops.get(operation, ())
            body = _rewritten(operation.body, read, inside, {**makers, **counting})
            if body is not operation.body:
                replaced = [dataclasses.replace(operation, body=body)]
        elif operation.name == "dot_general" and reads_table:
            replaced = _read(operation, views, makers)
        elif operation.name in ("dot_general", "transpose") and operation.outputs[0] in sums:
            replaced = _added(operation, makers)
        new += [operation] if replaced is None else replaced
    return block if new == [*block.operations] else Block(block.inputs, block.outputs, (*new,))


def _sums(block: Block, roots: Sequence[Atom]) -> tuple[set[Any], dict[Operation, list[Atom]]]:
    """Find the values that are added up to `roots`, also in loops that carry such a sum.

    Returns:
        The roots, partial sums and terms in this block; and for each loop that carries such a sum,
        the outputs of its body that are the sum.
    """
    sums: set[Any] = set()
    of_loops: dict[Operation, list[Atom]] = {}
    pending = [*roots]
    while pending:
        operation = block.makers.get(x := pending.pop())
        if operation is None or x in sums:
            continue
        sums.add(x)
        if terms := addends(operation) or (operation.values if is_cast(operation) else []):
            pending += terms
        elif is_loop(operation):
            assert isinstance(operation, Loop)
            i = operation.outputs.index(x)  # pyright: ignore[reportArgumentType]
            if i < operation.num_carry:
                of_loops.setdefault(operation, []).append(operation.body.outputs[i])
                pending.append(operation.inputs[operation.num_constants + i])
    return sums, of_loops


def _read(
    operation: Operation, views: Mapping[Any, TableView], makers: Mapping[Any, Operation]
) -> list[Operation] | None:
    """Return the lookup that replaces a product of one-hot vectors and a table.

    Return None if `operation` is no such product.
    """
    contracted, batch = operation.equation.params["dimension_numbers"]
    for at in (0, 1):
        table, one_hot = operation.inputs[at], _one_hot(operation.inputs[1 - at], makers)
        if table not in views or one_hot is None or [*map(len, batch)] != [0, 0]:
            continue
        if ((*contracted[at],), (*contracted[1 - at],)) == ((0,), (one_hot.dim,)):
            lookup = functools.partial(_rows, one_hot, operation.outputs[0].dtype, at == 0)
            return _in_place(operation, lookup, [table, one_hot.ids])
    return None


def _rows(one_hot: _OneHot, dtype: Any, rows_first: bool, table: Any, ids: Any) -> Any:
    """Look up rows of `table` at `ids`: `[*ids, *row]`, or `[*row, *ids]` with `rows_first`."""
    num, row = len(one_hot.others), table.shape[1:]
    windows = tuple(range(num, num + len(row)))
    numbers = lax.GatherDimensionNumbers(windows, (0,), (0,))
    sizes, indices = (1, *row), one_hot.indices(ids)
    rows = lax.gather(table, indices, numbers, sizes, mode=_DROP, fill_value=0).astype(dtype)
    return lax.transpose(rows, [*windows, *range(num)]) if rows_first else rows


def _added(operation: Operation, makers: Mapping[Any, Operation]) -> list[Operation] | None:
    """Return the `scatter-add` that replaces a product of one-hot vectors with cotangents.

    Return None if `operation` is no such product, and no transpose of one.
    """
    product, out = operation, operation.outputs[0]
    order = [*range(len(out.shape))]
    if operation.name == "transpose":
        product = makers.get(operation.source)
        order = [int(x) for x in operation.equation.params["permutation"]]
    if product is None or product.name != "dot_general":
        return None
    contracted, batch = product.equation.params["dimension_numbers"]
    for at in (0, 1):
        one_hot, cotangents = _one_hot(product.inputs[at], makers), product.inputs[1 - at]
        if one_hot is None or [*map(len, batch)] != [0, 0]:
            continue
        place = {int(x): int(y) for x, y in zip(contracted[at], contracted[1 - at], strict=True)}
        counted = 0 if at == 0 else len(order) - 1  # the dim of the product that counts rows
        if {*place} == {*one_hot.others} and order == [counted, *sorted({*order} - {counted})]:
            dims = [place[dim] for dim in one_hot.others]
            add = functools.partial(_sum_of_rows, one_hot, out, dims)
            return _in_place(operation, add, [cotangents, one_hot.ids])
    return None


def _sum_of_rows(
    one_hot: _OneHot, out: Value, dims: Sequence[int], cotangents: Any, ids: Any
) -> Any:
    """Add rows of cotangents to zeros of the shape of `out`.

    Args:
        one_hot: says to which row of `out` each row of cotangents is added.
        out: the value that the result replaces.
        dims: the dims of the cotangents that are dims of the ids; the other dims are those of a
            row.
        cotangents: the rows.
        ids: the array of `one_hot.ids`.
    """
    row = [dim for dim in range(cotangents.ndim) if dim not in dims]
    windows = tuple(range(len(dims), cotangents.ndim))
    numbers = lax.ScatterDimensionNumbers(windows, (0,), (0,))
    updates = lax.transpose(cotangents, [*dims, *row]).astype(out.dtype)
    zeros = jnp.zeros(out.shape, out.dtype)
    return lax.scatter_add(zeros, one_hot.indices(ids), updates, numbers, mode=_DROP)


def _in_place(operation: Operation, function: Callable, inputs: Sequence[Atom]) -> list[Operation]:
    """Trace `function` to operations that replace `operation`: they make its output."""
    *others, last = rewritten(operation, function, inputs)[0]
    return [*others, dataclasses.replace(last, outputs=operation.outputs)]


def _one_hot(x: Atom, makers: Mapping[Any, Operation]) -> _OneHot | None:
    operation = makers.get(x)
    while operation is not None and operation.name in _CASTS:
        operation = makers.get(operation.source)
    if operation is None or operation.name != "eq":
        return None
    shape = operation.outputs[0].shape
    for ids, numbers in (operation.inputs, operation.inputs[::-1]):
        dim = _counting_dim(numbers, makers)
        if dim is None or not isinstance(ids, Value) or not jnp.issubdtype(ids.dtype, jnp.integer):
            continue
        if len(ids.shape) != len(shape):  # a scalar
            continue
        fits = shape[dim] - 1 <= jnp.iinfo(ids.dtype).max  # else the counting integers wrap around
        if fits and shape_of(numbers)[dim] == shape[dim] and _is_constant_along(dim, ids, makers):
            return _OneHot(ids, dim, shape)
    return None


def _counting_dim(x: Atom, makers: Mapping[Any, Operation]) -> int | None:
    """Return the dim along which an array counts 0, 1, 2, ...; None if it varies along another."""
    if isinstance(x, Constant):
        if is_traced(x.value) or math.prod(shape_of(x)) != max(shape_of(x), default=0):
            return None
        dim = int(np.argmax(shape_of(x)))
        return dim if np.array_equal(np.ravel(x.value), np.arange(np.size(x.value))) else None
    operation = makers.get(x)
    if operation is None:
        return None
    if operation.name == "iota":
        return int(operation.equation.params["dimension"])
    if operation.name == "broadcast_in_dim":
        source = operation.inputs[0]
        dim = _counting_dim(source, makers)
        dims = operation.equation.params["broadcast_dimensions"]
        if dim is not None and shape_of(source)[dim] == x.shape[int(dims[dim])]:
            return int(dims[dim])
    return None


def _counts(x: Atom, makers: Mapping[Any, Operation]) -> bool:
    return x in makers and _counting_dim(x, makers) is not None


def _is_constant_along(dim: int, x: Value, makers: Mapping[Any, Operation]) -> bool:
    if x.shape[dim] == 1:
        return True
    operation = makers.get(x)
    if operation is None or operation.name != "broadcast_in_dim":
        return False
    dims = [int(i) for i in operation.equation.params["broadcast_dimensions"]]
    return dim not in dims or shape_of(operation.inputs[0])[dims.index(dim)] == 1
