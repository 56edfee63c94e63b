"""Multiply matrices of alike leaves at once, on a stack of them.

An update computes the same of each layer's matrix if these are leaves of their own:

    y[i] = f(h(g[i], s[i]), c)    for each leaf i,

with `h` elementwise, `f` products of matrices and what is between them, and values `c` that all
leaves share. Leaves with equal `f` and `h` form a stack. Its program computes `h` leaf by leaf, and
then `Y = vmap(f)(X, c)` of the stack `X` of its results, of which the rows are `y[i]`.
"""

from __future__ import annotations

import collections
import dataclasses
import graphlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .ir import Atom, Block, Constant, Operation, Value
from .operation_kinds import full_reduction, is_elementwise, multiplies_matrices
from .same_operations import Kinds, same_constants
from .trace import rewritten


@dataclasses.dataclass(frozen=True)
class LeafOf:
    """The leaf that an input of a program belongs to, and its role, as "gradient"."""

    leaf: int
    role: Hashable


@dataclasses.dataclass(frozen=True, eq=False)
class LeafStack:
    """Leaves whose matrices are multiplied at once.

    Attributes:
        leaves: their numbers, in the order of the rows.
        stacked: stacks that are made of values of the leaves, `[len(leaves), ...]`.
        made: stacks of results, of which rows are read.
        stacking: the operations that make `stacked`.
        products: those of stacks, from `stacked` to `made`.
        rows: those that take rows of `made`.
    """

    leaves: Sequence[int]
    stacked: list[Value] = dataclasses.field(default_factory=list)
    made: list[Value] = dataclasses.field(default_factory=list)
    stacking: list[Operation] = dataclasses.field(default_factory=list)
    products: list[Operation] = dataclasses.field(default_factory=list)
    rows: list[Operation] = dataclasses.field(default_factory=list)

    @property
    def operations(self) -> list[Operation]:
        return [*self.stacking, *self.products, *self.rows]


def stack_alike_leaves(
    block: Block, leaf_of: Mapping[Value, LeafOf], size_of: Callable[[int], int]
) -> tuple[Block, list[LeafStack]]:
    """The program with products of matrices of alike leaves on stacks of these.

    Args:
        block: the program.
        leaf_of: for its inputs the leaf; other inputs belong to none.
        size_of: the most leaves of a stack, by leaf.

    Returns:
        The new program, in which values that are not replaced are the same, and its stacks, of at
        least two leaves each.
    """
    values = _Values(block, leaf_of)
    alike: dict[Any, list[int]] = collections.defaultdict(list)
    by_leaf = {leaf: values.products_of(leaf) for leaf in {x.leaf for x in leaf_of.values()}}
    for leaf, operations in by_leaf.items():
        if operations:
            keys = frozenset(values.key[x] for each in operations for x in each.outputs)
            alike[keys].append(leaf)
    stacks: list[LeafStack] = []
    replaced: set[Operation] = set()
    for leaves in alike.values():
        for some in _even_parts(leaves, size_of(leaves[0])):
            if len(leaves) > 1:
                mine = {leaf: by_leaf[leaf] for leaf in some}
                stacks.append(_stack(values, mine))
                replaced.update(x for each in mine.values() for x in each)
    operations = [x for x in block.operations if x not in replaced]
    operations += [x for stack in stacks for x in stack.operations]
    return _sorted(Block(block.inputs, block.outputs, tuple(operations))), stacks


def _even_parts(leaves: Sequence[int], most: int) -> list[Sequence[int]]:
    """Parts of at most `most` leaves, of equal sizes but for one leaf."""
    num = -(-len(leaves) // most)
    bounds = [len(leaves) * i // num for i in range(num + 1)]
    return [leaves[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def _sorted(block: Block) -> Block:
    """The block with each operation after those whose results it reads."""
    makers = block.makers
    reads = {each: [makers[x] for x in each.values if x in makers] for each in block.operations}
    operations = tuple(graphlib.TopologicalSorter(reads).static_order())
    return Block(block.inputs, block.outputs, operations)


class _Values:
    """The values of a program, by the leaf that they are made of.

    Attributes:
        block: the program.
        leaf: for each value that is made of one leaf, and of values that are made of none, or of
            several, that leaf.
        key: a number for each value. Those of two leaves have the same if they are computed alike;
            other values have the same only if they are equal.
    """

    def __init__(self, block: Block, leaf_of: Mapping[Value, LeafOf]):
        self.block = block
        self.leaf = {x: leaf_of[x].leaf for x in block.inputs if x in leaf_of}
        self._numbers: dict[Hashable, int] = {}
        self._constants: list[Constant] = []
        self.key = {
            x: self._number(("input", leaf_of[x].role if x in leaf_of else x)) for x in block.inputs
        }
        self._of_leaf: dict[int, list[Operation]] = collections.defaultdict(list)
        kinds = Kinds()
        for operation in block.operations:
            leaves = {self.leaf[x] for x in operation.values if x in self.leaf}
            if len(leaves) > 1 or operation.has_effects:
                self.key.update((x, self._number(("value", x))) for x in operation.outputs)
                continue
            kind = kinds.number(operation), *map(self._key_of, operation.inputs)
            self.key.update((x, self._number((i, kind))) for i, x in enumerate(operation.outputs))
            for leaf in leaves:
                self._of_leaf[leaf].append(operation)
                self.leaf.update(dict.fromkeys(operation.outputs, leaf))

    def _number(self, what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def _key_of(self, atom: Atom) -> int:
        if isinstance(atom, Value):
            return self.key[atom]
        for i, known in enumerate(self._constants):
            if same_constants(known, atom):
                return self._number(("constant", i))
        self._constants.append(atom)
        return self._number(("constant", len(self._constants) - 1))

    def products_of(self, leaf: int) -> list[Operation]:
        """What multiplies the matrix of a leaf, and what mixes its elements before and after.

        Elementwise operations are included only between them, so that the others are computed as
        the leaf is stored.
        """
        operations = self._of_leaf[leaf]
        mixed: set[Value] = set()
        multiplied: set[Value] = set()
        mixing: list[Operation] = []
        for operation in operations:
            is_mixing = not is_elementwise(operation) and full_reduction(operation) is None
            if is_mixing or not mixed.isdisjoint(operation.values):
                mixed.update(operation.outputs)
            if multiplies_matrices(operation) or not multiplied.isdisjoint(operation.values):
                multiplied.update(operation.outputs)
            if is_mixing:
                mixing.append(operation)
        if not multiplied:
            return []
        needed = {x for x in mixing if not multiplied.isdisjoint(x.outputs)}
        wanted = {x for operation in needed for x in operation.values}
        for operation in reversed(operations):
            if not wanted.isdisjoint(operation.outputs) and not mixed.isdisjoint(operation.outputs):
                needed.add(operation)
                wanted.update(operation.values)
        return [x for x in operations if x in needed]

    def read_by_others(self, operations: Iterable[Operation]) -> list[Value]:
        """The results of operations that others, or nobody but the caller, read."""
        own = set(operations)
        others = {x for each in self.block.operations if each not in own for x in each.values}
        others.update(x for x in self.block.outputs if isinstance(x, Value))
        return [x for each in operations for x in each.outputs if x in others]


def _stack(values: _Values, by_leaf: Mapping[int, Sequence[Operation]]) -> LeafStack:
    """A stack of leaves with these products."""
    stack = LeafStack(list(by_leaf))
    made = {x for operations in by_leaf.values() for each in operations for x in each.outputs}
    given: dict[int, dict[int, Value]] = collections.defaultdict(dict)  # by key, by leaf
    for leaf, operations in by_leaf.items():
        for x in (x for each in operations for x in each.values):
            if x in values.leaf and x not in made:
                given[values.key[x]].setdefault(leaf, x)
    operations = by_leaf[stack.leaves[0]]
    known: dict[int, Any] = {}  # the stacks, by key
    for key, of_leaves in given.items():
        rows = [of_leaves[leaf] for leaf in stack.leaves]
        stacking, (known[key],) = rewritten(operations[0], lambda *xs: jnp.stack(xs), rows)
        stack.stacking.extend(stacking)
        stack.stacked.append(known[key])
    for operation in operations:
        keys = [values.key[x] for x in operation.outputs]
        if known.keys().isdisjoint(keys):
            products, outputs = _on_stacks(operation, values, known)
            stack.products.extend(products)
            known.update(zip(keys, outputs, strict=True))
    results: dict[int, None] = {}
    for i, leaf in enumerate(stack.leaves):
        for x in values.read_by_others(by_leaf[leaf]):
            results[values.key[x]] = None
            stack.rows.extend(_row(by_leaf[leaf][0], known[values.key[x]], i, x))
    stack.made.extend(known[key] for key in results)
    return stack


def _on_stacks(
    operation: Operation, values: _Values, known: Mapping[int, Atom]
) -> tuple[list[Operation], list[Atom]]:
    """An operation of each row of stacks; other inputs are the same for all rows."""
    is_stack = [isinstance(x, Value) and x in values.leaf for x in operation.inputs]
    inputs = [
        known[values.key[x]] if is_row else x
        for x, is_row in zip(operation.inputs, is_stack, strict=True)
    ]

    def of_rows(*arrays: Any) -> list[Any]:
        def of_row(*rows: Any) -> list[Any]:
            left = iter(rows)
            pairs = zip(arrays, is_stack, strict=True)
            return list(operation.bind([next(left) if is_row else x for x, is_row in pairs]))

        return jax.vmap(of_row)(*(x for x, is_row in zip(arrays, is_stack, strict=True) if is_row))

    return rewritten(operation, of_rows, inputs)


def _row(operation: Operation, stack: Atom, number: int, row: Value) -> list[Operation]:
    """Operations that take `row` from a stack, at the line of `operation`."""

    def index(x: Any) -> Any:
        return lax.index_in_dim(x, number, keepdims=False)

    *others, last = rewritten(operation, index, [stack])[0]
    return [*others, dataclasses.replace(last, outputs=(row,))]
