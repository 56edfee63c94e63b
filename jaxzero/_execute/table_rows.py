"""Choose the tables whose rows are sent, and rewrite the program to look up and add rows.

Rows are sent if, over each mesh axis, fewer bytes enter a device for the rows of a step, forward
and back, than for the weight and its gradient. If a weight also has uses other than lookups, it is
gathered for those, and its lookups read a twin of it (`tied_tables`). The rows of a twin must take
fewer than half of the bytes of weight and gradient, since the weight is sent anyway. The gain is
that the step neither begins nor ends with the table, which is sent beside the layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._collectives import (
    CommSpec,
    ReduceSpec,
    RowExchange,
    copy_to_device,
    from_stored,
    gather_ids,
    labelled,
)
from .._mesh import AXES, NODE
from .._plan import MovedRows
from .._program import (
    Block,
    Lookup,
    Table,
    TableOperations,
    Tools,
    Twin,
    Value,
    dtype_of,
    exchange_rows,
    find_tables,
    find_twins,
    shape_of,
    with_lookups,
    with_twins,
)
from .._sharding import LeafSpec
from .parameters import Parameters

# Rows are sent if so many bytes fewer enter a device in a micro-batch: about what it receives
# inside a node while it launches the collectives of rows beside those of other weights.
_MIN_SAVED_BYTES = 2**22
# Lookups with more bytes of rows, of all devices, are made one after the other.
_LARGE = 2**23


def with_rows(
    block: Block,
    shapes: Any,
    parameters: Parameters,
    microbatches: int,
    comm: CommSpec,
    divides: bool,
) -> tuple[Block, Any, Parameters]:
    """Rewrite a program so that devices exchange rows of tables, where that sends fewer bytes.

    A weight that has other uses than lookups is gathered for them. Its lookups read a *twin*: a
    further leaf of the program that holds the same weight, and whose rows are sent.

    Args:
        block: the traced program.
        shapes: the shapes of the program's outputs, as in `plan_program`.
        parameters: the leaves.
        microbatches: the number of micro-batches; if several, their index is the first input.
        comm: mesh axes, codecs and schedule.
        divides: whether gradients may be divided by the number of devices as they are added up:
            true if the program differentiates a device's own loss, not its share of the mean.

    Returns:
        The program, in which tables among the inputs are replaced by their shards, and gradients of
        tables among the outputs by shards of the sum (or mean) over all devices; the shapes of its
        outputs; and the parameters with these tables, and with twins as the last leaves.
    """
    first = 1 if microbatches > 1 else 0
    weights, gradients = _candidates(block, shapes, parameters, first, comm)
    if not weights:
        return block, shapes, parameters
    without_twins = find_tables(with_lookups(block, weights, gradients), weights, gradients)
    mixed = {x: i for x, i in weights.items() if i not in without_twins}
    twins = find_twins(block, mixed, gradients)
    as_means = divides and microbatches == 1 and shapes[1] is None
    while True:
        program = _with_twins(block, shapes, parameters, twins, weights, first)
        weights, gradients = _candidates(*program, first, comm)
        tables = without_twins
        if twins:
            looked_up = with_lookups(program[0], weights, gradients)
            tables = find_tables(looked_up, weights, gradients)
        moved, chosen = _choose(tables, program[2], microbatches, comm, as_means)
        # Twins that do not pay are left out. This changes the indices of the remaining twins, so
        # the choice is repeated.
        left = [x for i, x in enumerate(twins, len(parameters.leaves)) if i in chosen]
        if left == twins:
            block, shapes, parameters = program
            break
        twins = left
        weights, gradients = _candidates(block, shapes, parameters, first, comm)
    if not chosen:
        return block, shapes, parameters

    def ids_of_all(axes: tuple[str, ...], ids: Sequence[Array], numbers: Sequence[int]) -> Any:
        with labelled("weights", *(moved[i].name for i in numbers)):
            return gather_ids(ids, axes)

    tools = Tools(chosen, ids_of_all, comm.sizes)
    weights = {x: i for x, i in weights.items() if i in chosen}
    gradients = {k: i for k, i in gradients.items() if i in chosen}
    # Products of one-hot vectors with other weights stay products.
    block = with_lookups(block, weights, gradients)
    block = exchange_rows(block, weights, gradients, tools)
    return block, shapes, dataclasses.replace(parameters, tables=moved)


def _candidates(
    block: Block, shapes: Any, parameters: Parameters, first: int, comm: CommSpec
) -> tuple[dict[Value, int], dict[int, int]]:
    """Find the weights whose rows can be sent, and the outputs that are their gradients.

    `first` is the index of the first input of the program that is a parameter.

    Returns:
        Two dicts to the index of the leaf: from the input that is the weight, and from the index of
        the output that is its gradient.
    """
    values = block.inputs[first : first + len(parameters.leaves)]
    weights = {x: i for i, x in enumerate(values) if _may_move(i, parameters, comm)}
    if shapes[0] is None:
        return weights, {}
    numbered = enumerate(parameters.differentiated, len(jax.tree.leaves(shapes[:2])))
    numbers = {*weights.values()}
    return weights, {k: i for k, i in numbered if i in numbers}


def _with_twins(
    block: Block,
    shapes: Any,
    parameters: Parameters,
    twins: Sequence[Twin],
    weights: Mapping[Value, int],
    first: int,
) -> tuple[Block, Any, Parameters]:
    """Add twins of weights (see `with_rows`) to a program, as the last leaves.

    Args:
        block: the program.
        shapes: the shapes of its outputs.
        parameters: its leaves.
        twins: the twins to add.
        weights: the index of the leaf of each input that is a weight.
        first: the index of the first input that is a parameter.

    Returns:
        The program, the shapes of its outputs, and its leaves, with the twins.
    """
    if not twins:
        return block, shapes, parameters
    loss, weight, gradients, others = shapes
    num, trained = len(parameters.leaves), [x.output is not None for x in twins]
    last = len(jax.tree.leaves((loss, weight, gradients)))
    block = with_twins(block, weights, twins, first + num, last)
    made = block.outputs[last : last + sum(trained)]
    of_twins = [jax.ShapeDtypeStruct(shape_of(x), dtype_of(x)) for x in made]
    leaves = (*parameters.leaves, *(parameters.leaves[x.weight] for x in twins))
    numbers = (i for i, is_trained in enumerate(trained, num) if is_trained)
    parameters = dataclasses.replace(
        parameters,
        leaves=leaves,
        differentiated=(*parameters.differentiated, *numbers),
        twins=tuple(x.weight for x in twins),
    )
    return block, (loss, weight, [*gradients, *of_twins], others), parameters


def _choose(
    tables: Mapping[int, Table],
    parameters: Parameters,
    microbatches: int,
    comm: CommSpec,
    as_means: bool,
) -> tuple[dict[int, MovedRows], dict[int, TableOperations]]:
    """Choose the tables whose rows are sent; divide their gradients to means if `as_means`.

    Returns:
        Two dicts by index of the leaf: the table's line in the plan; and the functions that read
            and add its rows.
    """
    num = len(parameters.leaves) - len(parameters.twins)
    moved, chosen = {}, {}
    for i, table in tables.items():
        leaf = parameters.leaves[i]
        assert leaf.layout is not None
        # As in a gather, values are never encoded, and what is stored encoded is not again.
        is_exact = leaf.codec is not None or parameters.weight_of[i] in parameters.exact
        size = 0 if is_exact else leaf.layer_size
        exchange = RowExchange(leaf.shape, leaf.dtype, leaf.layout, comm, size)
        rows, weight = _bytes_of_rows(table, exchange), _bytes_of_weight(table, leaf, comm)
        if comm.hpz is not None:  # between nodes, weights are sent once in a step
            weight[NODE] //= microbatches
        saved = {axis: x // 2 for axis, x in weight.items()} if i >= num else weight
        if _pays(rows, saved):
            is_mean = as_means and exchange.sum_dtype == leaf.dtype
            chosen[i] = _operations(leaf, exchange, comm.num_devices if is_mean else None)
            reads = sum(x.num * x.trips for x in table.reads)
            sent = reads, rows, weight, is_mean
            moved[i] = MovedRows(leaf.path, leaf.shape, leaf.dtype, *sent, is_alone=i < num)
    return moved, chosen


def with_table_shards(
    full: Sequence[Array | None], stored: Sequence[Array], parameters: Parameters
) -> tuple[list[Array], list[Array | None]]:
    """Return, for all leaves and twins, the stored arrays and the arrays that the program reads.

    For a table, the program reads this device's shard, decoded and in device memory. For a weight
    that it gathers, the list has None; for any other leaf, the full array.

    Args:
        full: for each leaf, the full array; None if the program gathers it.
        stored: for each leaf, the array in storage.
        parameters: the leaves.
    """
    stored, arrays = parameters.with_twins(stored), parameters.with_twins(full)
    for i in parameters.tables:
        leaf = parameters.leaves[i]
        shard = copy_to_device(stored[i], "weights", leaf.path, windowed=False)
        arrays[i] = shard if leaf.codec is None else from_stored(shard, leaf).join()
    return stored, arrays


def _may_move(i: int, parameters: Parameters, comm: CommSpec) -> bool:
    """Return whether rows of leaf `i` can be sent.

    Rows cannot be sent with half-batch sums, with sums that are added in a tree, with nodes that
    run different numbers of micro-batches, or if the user splits the leaf over further axes.
    """
    leaf = parameters.leaves[i]
    is_table = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.dtype(leaf.dtype).itemsize >= 2
    return (
        parameters.moves_rows
        and comm.num_shards > 1
        and not comm.halves
        and not comm.sums_in_tree
        and comm.node_microbatches is None
        and parameters.weight_layout(i) is not None
        and len(leaf.shape) >= 2
        and is_table
        and not any(leaf.other_axes)
    )


def _pays(rows: Mapping[str, int], weight: Mapping[str, int]) -> bool:
    """Return whether to send rows, given the bytes over each axis of the rows and of the weight."""
    saved = [weight[axis] - rows[axis] for axis in AXES]
    return min(saved) >= 0 and sum(saved) >= _MIN_SAVED_BYTES


def _operations(leaf: LeafSpec, exchange: RowExchange, divisor: int | None) -> TableOperations:
    """Return the functions by which a device looks up rows of a table and adds to its gradient.

    Gradients of rows are divided by `divisor`, if it is not None, before they are added.
    """

    def read(shard: Array, of_all: Array, ids: Array, lookup: Lookup, wait: Any) -> Any:
        fill = None if lookup.is_clipped else lookup.fill
        with labelled("weights", leaf.path):
            return exchange.read(shard, of_all, ids, lookup.dtypes, fill, wait)

    def add(total: Array, of_all: Array, rows: Array, lookup: Lookup, waits: Any) -> Array:
        with labelled("gradients", leaf.path):
            return exchange.add(total, of_all, rows, lookup.is_clipped, divisor, waits)

    def is_large(lookup: Lookup) -> bool:
        num = lookup.num * exchange.comm.num_devices
        return num * exchange.row_bytes(lookup.dtypes[-1]) >= _LARGE

    return TableOperations(
        jax.ShapeDtypeStruct(exchange.shard_shape, leaf.dtype),
        jax.ShapeDtypeStruct(exchange.shard_shape, exchange.sum_dtype),
        exchange.int32,
        exchange.axes,
        read,
        add,
        is_large,
    )


def _bytes_of_rows(table: Table, exchange: RowExchange) -> dict[str, int]:
    """Return the bytes that enter a device over each axis in a micro-batch, if rows are sent."""
    total: dict[str, int] = dict.fromkeys(AXES, 0)
    for lookups, back in ((table.reads, False), (table.adds, True)):
        for x in lookups:
            num = x.num, x.num_ids // max(x.num, 1), x.dtypes[-1]
            for axis, size in exchange.entering_bytes(*num, back=back).items():
                total[axis] += x.trips * size
    return total


def _bytes_of_weight(table: Table, leaf: LeafSpec, comm: CommSpec) -> dict[str, int]:
    """Return the bytes that enter a device over each axis, if the table is gathered instead.

    The bytes of reducing its gradient are included. The table is gathered once, in the narrowest
    dtype that a lookup reads.
    """
    assert leaf.layout is not None
    num = math.prod(leaf.padded_shape)
    dtypes = (dtype for x in table.reads for dtype in x.dtypes)
    dtype = min(dtypes, key=lambda x: jnp.dtype(x).itemsize)
    spec = ReduceSpec(leaf.path, leaf.shape, dtype, leaf.layout)
    bytes_by_axis = {}
    for axis in AXES:
        size = comm.sizes[axis]
        # The last axis of a gather, and the first of a reduction, has the full array.
        part = num // size if axis == comm.axes[0] else num // comm.num_shards
        codecs: list[Any] = []
        if axis in comm.axes:
            codec = leaf.codec or comm.weight_codec(axis, leaf.layer_size, dtype)
            codecs.append((codec, dtype))
        else:
            part = 2 * num // comm.num_shards // size  # an all-reduce of the gradient's shards
        if table.adds:
            codecs.append((spec.codec(axis, comm), spec.dtype_at(axis, comm)))
        bytes_by_axis[axis] = sum(
            (size - 1)
            * (part * jnp.dtype(dtype).itemsize if codec is None else codec.num_bytes(part, dtype))
            for codec, dtype in codecs
        )
    return bytes_by_axis
