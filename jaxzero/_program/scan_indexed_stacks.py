"""Let loops scan the stacks that they index by a counter.

A stack that a loop closes over and indexes is needed for all layers at once. If the index is known
while tracing (`known_integers`) and runs through the layers, the loop can scan the stack:

    fori_loop(0, n, lambda i, x: f(x, w[i]), x)  ->  scan(lambda x, w: (f(x, w), None), x, w).

Differentiation puts the gradient of each layer into a stack of zeros, and sums these stacks in the
carry. Here the loop stacks the gradients of the layers instead. A counter may also start later,
stop earlier or run backwards: then the loop scans a slice of the stack, or the stack in reverse.

A program without such loops is returned as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jax import lax

from .indexed_rows import READS, RowRead, Rows, row_placed, row_read
from .ir import Atom, Barrier, Block, Loop, Operation, Value
from .movable_ops import ConvertDtype, Op, Reshape, Transpose, apply_all
from .operation_kinds import Branch, addends, carried_sums, is_zero
from .sink_into_loops import LoopEditor
from .trace import rewritten, without_dead_code
from .uniform import Known, known_in_body, known_integers, unchanged_in_body
from .weight_values import StackValues, fixed_of

_PLACES = {"dynamic_update_slice", "scatter-add"}


def scan_indexed_stacks(block: Block, weights: Collection[Value]) -> Block:
    """Let loops scan the stacks that they index, and stack the gradients that they write by index.

    Args:
        block: the program.
        weights: the inputs of the program that are sharded weights.
    """
    if not weights or not any(isinstance(x, Loop) for x in block.operations):
        return block
    changed = _Block(block, weights, dict).changed()
    return block if changed is block else without_dead_code(changed)


class _Read(NamedTuple):
    """A read of one row of a stack in a loop's body."""

    operation: Operation
    stack: Value  # the loop's constant
    ops: tuple[Op, ...]  # of each layer, in order, before the row is read
    row: RowRead


class _Block:
    """A block whose loops are to be changed.

    Args:
        block: a program, or the body of a loop.
        weights: the inputs of the block that are sharded weights, or layers of them.
        given: returns the known integers among the inputs; called only if they are needed.
    """

    def __init__(self, block: Block, weights: Collection[Value], given: Callable[[], Known]):
        self.block = block
        self.given = given
        self.fixed = fixed_of(block, weights)
        self.stacks: dict[tuple[Value, Rows], Value] = {}  # rows of stacks that loops scan

    @functools.cached_property
    def known(self) -> Known:
        return known_integers(self.block, self.given())

    def changed(self) -> Block:
        """Return the block with its loops changed, or the same block if nothing changes."""
        operations: list[Operation] = []
        for operation in self.block.operations:
            if isinstance(operation, Loop):
                inside = self._with_changed_body(operation)
                operations += _LoopOfBlock(self, inside).changed()
            else:
                operations.append(operation)
        pairs = zip(operations, self.block.operations, strict=False)
        if all(a is b for a, b in pairs) and len(operations) == len(self.block.operations):
            return self.block
        return dataclasses.replace(self.block, operations=tuple(operations))

    def _with_changed_body(self, loop: Loop) -> Loop:
        if not any(isinstance(operation, Loop) for operation in loop.body.operations):
            return loop
        first = loop.first_stack
        pairs = enumerate(zip(loop.inputs, loop.body.inputs, strict=True))
        weights = [
            inside
            for i, (outside, inside) in pairs
            if not loop.num_constants <= i < first and self.fixed.of(outside)
        ]
        body = _Block(loop.body, weights, lambda: unchanged_in_body(loop, self.known)).changed()
        return loop if body is loop.body else dataclasses.replace(loop, body=body)

    def is_zero(self, atom: Atom) -> bool:
        """Return whether an atom outside of the loops is known to be zero."""
        return is_zero(atom, self.block.makers)


class _LoopOfBlock:
    """Rewrites one loop of a block; `changed` returns the result."""

    def __init__(self, outer: _Block, loop: Loop):
        self.outer = outer
        self.loop = loop
        self.editor = LoopEditor(StackValues(outer.fixed), loop)

    @functools.cached_property
    def known(self) -> Known:
        return known_in_body(self.loop, self.outer.known)

    def changed(self) -> list[Operation]:
        """Return the changed loop, preceded and followed by the new operations that it needs."""
        if isinstance(self.loop, Branch):  # it may not run, and then makes no stack
            return [self.loop]
        before: list[Operation] = []
        reads = self._reads()
        for read in reads:
            self._scan(read, before)
        sums = self._row_sums()
        if not reads and not sums:
            return [self.loop]
        stacked = {
            i: {rows: self.editor.stacked(row) for rows, row in by_rows.items()}
            for i, by_rows in sums.items()
        }
        loop, after = _without_carry(self.editor.finish(), sums), []
        for i, stacks in stacked.items():
            out = self.loop.outputs[i]
            num = out.shape[0]
            if list(stacks) == [Rows(0, 1, num)]:
                (stack,) = stacks.values()
                outputs = tuple(out if x is stack else x for x in loop.outputs)
                loop = dataclasses.replace(loop, outputs=outputs)
            else:
                after += _placed_after(loop, stacks, out)
        return [*before, loop, *after]

    def _reads(self) -> list[_Read]:
        """Return the operations of the body that read one row of a stack of weights.

        They are left out if the body also uses the same stack in another way.
        """
        loop, fixed = self.loop, self.outer.fixed
        constants = list(zip(loop.inputs, loop.body.inputs, strict=True))[: loop.num_constants]
        stacks: dict[Atom, tuple[Value, tuple[Op, ...]]] = {
            inside: (inside, ())
            for outside, inside in constants
            if fixed.of(outside) and inside.shape
        }
        reads: list[_Read] = []
        others: set[Value] = set()  # constants that are used in another way
        for operation in loop.body.operations:
            if stacks.keys().isdisjoint(operation.inputs):
                continue
            if isinstance(operation, Barrier):
                pairs = zip(operation.inputs, operation.outputs, strict=True)
                stacks |= {out: stacks[given] for given, out in pairs if given in stacks}
                continue
            if operation.source in stacks and (op := _of_layer(operation)) is not None:
                stack, ops = stacks[operation.source]
                stacks[operation.outputs[0]] = stack, (*ops, op)
                continue
            used = [stacks[x][0] for x in operation.inputs if x in stacks]
            target = operation.inputs[0]
            read = None
            if operation.name in READS and len(used) == 1 and isinstance(target, Value):
                read = row_read(operation, target.shape, self.known, loop.length)
            if read is None:
                others.update(used)
            else:
                reads.append(_Read(operation, *stacks[target], read))
        others.update(stacks[x][0] for x in loop.body.outputs if x in stacks)
        return [read for read in reads if read.stack not in others]

    def _scan(self, read: _Read, before: list[Operation]) -> None:
        """Let the loop scan the rows that an operation of its body reads by index.

        Operations that make a stack of these rows are appended to `before`, to run before the loop.
        """
        outside = self.loop.inputs[self.loop.body.inputs.index(read.stack)]
        assert isinstance(outside, Value)
        rows, cached = read.row.rows, self.outer.stacks
        if rows == Rows(0, 1, outside.shape[0]):
            cached[outside, rows] = outside
        if (outside, rows) not in cached:
            made, (stack,) = rewritten(self.loop, rows.of, [outside])
            assert isinstance(stack, Value)
            before += made
            cached[outside, rows] = stack

        def row(layer: Any) -> Any:
            return read.row.apply(apply_all(read.ops, layer))

        layer = self.editor.layer(cached[outside, rows])
        (inside,) = self.editor.emit(read.operation, row, [layer])
        self.editor.replace(read.operation.outputs[0], inside)

    def _row_sums(self) -> dict[int, dict[Rows, Atom]]:
        """Find the carried sums to which each iteration adds single rows (and zeros elsewhere).

        Returns:
            For each such sum, by its index in the carry, the rows that are added: a map from where
            a row lies in all iterations (`Rows`) to the value of the row in the body.
        """
        row_sums = {}
        if not any(x.name in _PLACES for x in self.loop.body.operations):
            return row_sums
        for i, carried in carried_sums(self.loop, self.outer.is_zero).items():
            terms = [self._placed(term) for term in carried.terms]
            if (rows := self._added(terms)) is not None:
                row_sums[i] = rows
        return row_sums

    def _placed(self, value: Value) -> dict[Rows, Atom] | None:
        """Return the rows of a stack that is zero elsewhere; None for any other value.

        The result maps where a row lies in all iterations (`Rows`) to its value in the body.
        """
        operation = self.loop.body.makers.get(value)
        if operation is None:
            return None
        if terms := addends(operation):
            return self._added([self._placed(term) for term in terms])
        if operation.name in _PLACES:
            placed = row_placed(operation, self.known, self.loop.length)
            if placed is None or not self._is_zero(operation.inputs[0]):
                return None
            (row,) = self.editor.emit(operation, placed.apply, [placed.update], last=True)
            return {placed.rows: row}
        op, source = _of_layer(operation), operation.source
        if not isinstance(op, ConvertDtype | Reshape | Transpose) or source is None:
            return None
        rows = self._placed(source)
        if rows is None:
            return None
        return {
            key: self.editor.emit(operation, op.apply, [row], last=True)[0]
            for key, row in rows.items()
        }

    def _is_zero(self, atom: Atom) -> bool:
        constants = self.loop.body.inputs[: self.loop.num_constants]
        if atom in constants:
            return self.outer.is_zero(self.loop.inputs[constants.index(atom)])
        return is_zero(atom, self.loop.body.makers)

    def _added(self, terms: list[dict[Rows, Atom] | None]) -> dict[Rows, Atom] | None:
        total: dict[Rows, Atom] = {}
        for term in terms:
            if term is None:
                return None
            for rows, row in term.items():
                if rows in total:
                    operands = [total[rows], row]
                    (row,) = self.editor.emit(self.loop, lax.add, operands, last=True)
                total[rows] = row
        return total


def _of_layer(operation: Operation) -> Op | None:
    """Return the form of a movable operation for one layer of its input; None if none."""
    op, source = operation.view(), operation.source
    return None if op is None or source is None else op.of_slice(source.shape)


def _without_carry(loop: Loop, positions: Collection[int]) -> Loop:
    """Return a loop without the carried sums at `positions`, whose terms it stacks instead."""

    def kept(atoms: tuple, first: int) -> tuple:
        return tuple(x for i, x in enumerate(atoms) if i - first not in positions)

    body = Block(
        kept(loop.body.inputs, loop.num_constants),
        kept(loop.body.outputs, 0),
        loop.body.operations,
    )
    return dataclasses.replace(
        loop,
        inputs=kept(loop.inputs, loop.num_constants),
        outputs=kept(loop.outputs, 0),
        body=body,
        num_carry=loop.num_carry - len(positions),
    )


def _placed_after(loop: Loop, stacks: Mapping[Rows, Value], out: Value) -> list[Operation]:
    """Make the operations that compute `out` after the loop.

    `stacks` has the rows that the loop stacks, by their places in `out`. Rows with the same place
    are added up; rows without a place in any stack are zero.
    """

    def place(*stacked: Any) -> Any:
        pairs = zip(stacks, stacked, strict=True)
        return functools.reduce(lax.add, (rows.place(x, out.shape[0]) for rows, x in pairs))

    (*made, last), _ = rewritten(loop, place, list(stacks.values()))
    return [*made, dataclasses.replace(last, outputs=(out,))]
