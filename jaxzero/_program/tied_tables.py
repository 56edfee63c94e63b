"""Split a weight that is looked up and has other uses, such as an embedding tied to the head.

    y = table[ids] ... @ table.T                 ->  y = twin[ids] ... @ table.T
    grads = zeros.at[ids].add(ct) + product      ->  product, and zeros.at[ids].add(ct) of the twin

The twin has the values of the weight, and is only looked up, so its rows can be sent. The weight's
gradient is the sum of both gradients. Lookups in loops still read the weight.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from .ir import Atom, Barrier, Block, Constant, Operation, Value
from .operation_kinds import addends, is_zero
from .table_uses import TableView, adds_rows, is_cast, takes_rows, views_after
from .trace import without_dead_code

Casts = tuple[Operation, ...]


@dataclasses.dataclass(frozen=True)
class Twin:
    """A weight that gets a twin: its lookups, and the terms of its gradient.

    Attributes:
        weight: the number of the weight.
        lookups: the `gather`s of the weight, each with the casts of the weight before it.
        output: the index of the weight's gradient among the outputs; None if it has none.
        rows: the terms of the gradient that add rows, each with the casts after it.
        others: the other terms, each with the casts after it.
        addition: an operation that adds up terms, of which copies add up the terms of each of the
            two gradients; None if there is no gradient.
    """

    weight: int
    lookups: Mapping[Operation, Casts]
    output: int | None = None
    rows: tuple[tuple[Atom, Casts], ...] = ()
    others: tuple[tuple[Atom, Casts], ...] = ()
    addition: Operation | None = None


def find_twins(
    block: Block, weights: Mapping[Value, int], gradients: Mapping[int, int]
) -> list[Twin]:
    """Find the weights that a program looks up and also uses in another way.

    Args:
        block: the program.
        weights: for each input that is a weight, its number.
        gradients: for the index of each output that is a gradient, the number of its weight.
    """
    views: dict[Any, TableView] = {x: TableView(i) for x, i in weights.items()}
    casts: dict[Any, Casts] = dict.fromkeys(weights, ())
    lookups: dict[int, dict[Operation, Casts]] = {}
    others = {views[x].table for x in block.outputs if x in views}
    for operation in block.operations:
        if views.keys().isdisjoint(operation.inputs):
            continue
        read = {i for i, x in enumerate(operation.inputs) if x in views}
        if after := views_after(operation, views):
            views |= after
            if isinstance(operation, Barrier):
                pairs = zip(operation.inputs, operation.outputs, strict=True)
                casts |= {out: casts[x] for x, out in pairs if x in casts}
            else:
                casts[operation.outputs[0]] = (*casts[operation.source], operation)
        elif read == {0} and takes_rows(operation):
            table = operation.inputs[0]
            lookups.setdefault(views[table].table, {})[operation] = casts[table]
        else:
            others.update(views[operation.inputs[i]].table for i in read)
    outputs = {i: k for k, i in gradients.items()}
    twins = []
    for i in lookups.keys() & others:
        twin = Twin(i, lookups[i])
        if i in outputs:
            twin = _with_terms(twin, block, outputs[i])
        if i not in outputs or twin.rows and twin.others:
            twins.append(twin)
    return sorted(twins, key=lambda x: x.weight)


def with_twins(
    block: Block, weights: Mapping[Value, int], twins: Iterable[Twin], input_: int, output: int
) -> Block:
    """Give a program an input for each twin, and an output for the gradient of each twin.

    Args:
        block: the program.
        weights: for each input that is a weight, its number.
        twins: from `find_twins`.
        input_: the index at which the new inputs are inserted.
        output: the index at which the new outputs are inserted.
    """
    new_inputs, new_outputs, outputs = [], [], [*block.outputs]
    values, renamed, added = {i: x for x, i in weights.items()}, {}, []
    for twin in twins:
        value = values[twin.weight]
        new_inputs.append(Value(jax.ShapeDtypeStruct(value.shape, value.dtype)))
        for lookup, casts in twin.lookups.items():
            renamed[lookup] = {lookup.inputs[0]: _cast(new_inputs[-1], casts, added)}
        if twin.output is not None:
            outputs[twin.output] = _sum(twin.others, twin.addition, added)
            new_outputs.append(_sum(twin.rows, twin.addition, added))
    inputs = (*block.inputs[:input_], *new_inputs, *block.inputs[input_:])
    outputs[output:output] = new_outputs
    old = [x.reading(renamed[x]) if x in renamed else x for x in block.operations]
    return without_dead_code(Block(inputs, tuple(outputs), _in_order(inputs, old, added)))


def _with_terms(twin: Twin, block: Block, output: int) -> Twin:
    """Return a twin with the terms of its gradient, which is output `output` of the block."""
    counts = Counter(x for operation in block.operations for x in operation.inputs)
    counts.update(block.outputs)
    rows, others, addition = [], [], None
    pending: list[tuple[Atom, Casts]] = [(block.outputs[output], ())]
    while pending:
        atom, casts = pending.pop()
        operation = None if isinstance(atom, Constant) else block.makers.get(atom)
        if operation is None or counts[atom] != 1:
            others.append((atom, casts))
        elif terms := addends(operation):
            addition = operation
            pending += [(x, casts) for x in reversed(terms)]
        elif is_cast(operation) and not _narrows(operation):
            assert operation.source is not None
            pending.append((operation.source, (operation, *casts)))
        else:
            is_rows = adds_rows(operation) and is_zero(operation.inputs[0], block.makers)
            (rows if is_rows else others).append((atom, casts))
    return dataclasses.replace(
        twin, output=output, rows=tuple(rows), others=tuple(others), addition=addition
    )


def _narrows(cast: Operation) -> bool:
    """Return whether a cast rounds. Such a cast cannot move from a sum to its terms."""
    assert cast.source is not None
    return cast.outputs[0].dtype.itemsize < cast.source.dtype.itemsize


def _cast(atom: Atom, casts: Casts, made: list[Operation]) -> Atom:
    """Apply copies of `casts` to a value; append their operations to `made`."""
    for cast in casts:
        (like,) = cast.outputs
        out = Value(jax.ShapeDtypeStruct(like.shape, like.dtype))
        made.append(dataclasses.replace(cast, inputs=(atom,), outputs=(out,)))
        atom = out
    return atom


def _sum(
    terms: Iterable[tuple[Atom, Casts]], addition: Operation | None, made: list[Operation]
) -> Atom:
    """Return the sum of terms after their casts; append the new operations to `made`.

    Copies of `addition` add up the terms.
    """
    total, *others = (_cast(x, casts, made) for x, casts in terms)
    for term in others:
        assert addition is not None and isinstance(term, Value)
        out = Value(jax.ShapeDtypeStruct(term.shape, term.dtype))
        made.append(dataclasses.replace(addition, inputs=(total, term), outputs=(out,)))
        total = out
    return total


def _in_order(
    inputs: Iterable[Value], old: Iterable[Operation], made: Iterable[Operation]
) -> tuple[Operation, ...]:
    """Insert the operations `made` into the list `old`, each as soon as its inputs exist.

    `inputs` are those of the block.
    """
    operations: list[Operation] = []
    ready, waiting = {*inputs}, [*made]

    def insert() -> None:
        for operation in [*waiting]:
            if ready.issuperset(operation.values):
                waiting.remove(operation)
                operations.append(operation)
                ready.update(operation.outputs)

    insert()
    for operation in old:
        operations.append(operation)
        ready.update(operation.outputs)
        insert()
    return tuple(operations)
