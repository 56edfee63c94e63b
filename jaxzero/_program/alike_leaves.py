"""Rewrite an optimizer's update so that the matrices of alike leaves are multiplied at once.

A leaf is one array of the parameters' tree. Its gradient and its optimizer state belong to it.
If the matrix of each layer is a leaf, an update computes the same function of every leaf:

    y[i] = f(h(g[i], s[i]), c)    for each leaf i,

`h` is elementwise, `f` has the matrix products and all operations between them, and the values `c`
are shared by all leaves. Leaves with equal `f` and `h` form a stack. The rewritten program computes
`h` leaf by leaf and stacks the results to `X`. Then it computes `Y = vmap(f)(X, c)`, whose rows are
the `y[i]`.
"""

from __future__ import annotations

import collections
import dataclasses
import graphlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._mesh import equations_inside
from .frozen_part import RANDOM_BITS
from .ir import Atom, Block, Constant, Operation, Value
from .operation_kinds import full_reduction, is_elementwise, multiplies_matrices
from .same_operations import Kinds
from .trace import rewritten


@dataclasses.dataclass(frozen=True)
class LeafOf:
    """The leaf that a program's input belongs to, and the input's role, such as "gradient"."""

    leaf: int
    role: Hashable


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixStack:
    """Matrices that are multiplied at once: those of a leaf that is a stack, or of several leaves.

    Attributes:
        leaves: the indices of the leaves, in the order of the rows.
        given: the stacks that `products` read as inputs.
        made: the results of `products` that other operations read.
        products: the operations that compute `made` from `given`.
        stacking: the operations that make `given` from values of several leaves.
        rows: the operations that take a row, the value of one leaf, out of `made`.
    """

    leaves: Sequence[int]
    given: Sequence[Value]
    made: Sequence[Value]
    products: Sequence[Operation]
    stacking: Sequence[Operation] = ()
    rows: Sequence[Operation] = ()


def stack_of_leaf(values: LeafValues, leaf: int) -> MatrixStack:
    """Return the `MatrixStack` of a leaf that is itself a stack of matrices."""
    products = values.products_of(leaf)
    given, made = values.given(products), values.read_by_others(products)
    return MatrixStack([leaf], given, made, products)


def stack_alike_leaves(
    values: LeafValues, leaves: Iterable[int], size_of: Callable[[int], int]
) -> tuple[Block, list[MatrixStack]]:
    """Rewrite a program so that it multiplies the matrices of alike leaves as stacks.

    Args:
        values: the values of the program.
        leaves: the indices of the leaves that may be in a stack.
        size_of: returns the most leaves in a stack, given the index of one of them.

    Returns:
        The new program, and its stacks. Each result of the old products that other operations read
        is a row of a stack, and keeps its `Value`.
    """
    alike: dict[Any, list[int]] = collections.defaultdict(list)
    for leaf in leaves:
        if operations := values.products_of(leaf):
            made = (x for each in operations for x in each.outputs)
            keys = (frozenset(values.key[x] for x in y) for y in (values.given(operations), made))
            alike[tuple(keys)].append(leaf)
    stacks = [
        _stack(values, some)
        for alike_leaves in alike.values()
        if len(alike_leaves) > 1
        for some in _even_parts(alike_leaves, size_of(alike_leaves[0]))
    ]
    replaced = {x for stack in stacks for leaf in stack.leaves for x in values.products_of(leaf)}
    operations = [x for x in values.block.operations if x not in replaced]
    operations += [x for y in stacks for x in (*y.stacking, *y.products, *y.rows)]
    block = values.block
    return _sorted(Block(block.inputs, block.outputs, tuple(operations))), stacks


def _even_parts(leaves: Sequence[int], most: int) -> list[Sequence[int]]:
    """Cut a list into parts of at most `most` leaves, with sizes that differ by at most one."""
    num = -(-len(leaves) // most)
    bounds = [len(leaves) * i // num for i in range(num + 1)]
    return [leaves[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def _sorted(block: Block) -> Block:
    """Sort the operations so that each follows the operations whose results it reads."""
    makers = block.makers
    reads = {each: [makers[x] for x in each.values if x in makers] for each in block.operations}
    operations = tuple(graphlib.TopologicalSorter(reads).static_order())
    return Block(block.inputs, block.outputs, operations)


class LeafValues:
    """The values of a program, grouped by the leaf that they are computed from.

    A value belongs to the leaf that its inputs belong to. A value whose inputs belong to several
    leaves, or to none, is shared: it belongs to no leaf, and values of any leaf may depend on it.

    Attributes:
        block: the program.
        leaf: for each value that belongs to a leaf, the index of the leaf.
        key: a number for each value. Values of two leaves have the same number if they are computed
            alike. Shared values have the same number only if they are equal.
    """

    def __init__(self, block: Block, leaf_of: Mapping[Value, LeafOf]):
        self.block = block
        self.leaf = {x: leaf_of[x].leaf for x in block.inputs if x in leaf_of}
        self._numbers: dict[Hashable, int] = {}
        self._kinds = Kinds()
        self.key = {
            x: self._number(("input", leaf_of[x].role if x in leaf_of else x)) for x in block.inputs
        }
        self._of_leaf: dict[int, list[Operation]] = collections.defaultdict(list)
        self._products: dict[int, list[Operation]] = {}
        self._returned = {x for x in block.outputs if isinstance(x, Value)}
        self._readers: dict[Value, set[Operation]] = collections.defaultdict(set)
        for operation in block.operations:
            for x in operation.values:
                self._readers[x].add(operation)
        for operation in block.operations:
            leaves = {self.leaf[x] for x in operation.values if x in self.leaf}
            if len(leaves) > 1 or operation.has_effects or (leaves and _draws(operation)):
                self.key.update((x, self._number(("value", x))) for x in operation.outputs)
                continue
            kind = self._kinds.number(operation), *map(self._key_of, operation.inputs)
            self.key.update((x, self._number((i, kind))) for i, x in enumerate(operation.outputs))
            for leaf in leaves:
                self._of_leaf[leaf].append(operation)
                self.leaf.update(dict.fromkeys(operation.outputs, leaf))

    def _number(self, what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def _key_of(self, atom: Atom) -> int:
        if isinstance(atom, Value):
            return self.key[atom]
        return self._number(("constant", self._kinds.constant(atom)))

    def role(self, x: Atom) -> LeafOf | None:
        """Return the leaf of a value, and its key as the role; None for a shared value."""
        if isinstance(x, Constant) or x not in self.leaf:
            return None
        return LeafOf(self.leaf[x], self.key[x])

    def products_of(self, leaf: int) -> Sequence[Operation]:
        """Return the operations of a leaf that need its whole matrix, in program order.

        These are matrix products, other operations before or after a product that mix elements,
        such as transposes, and the elementwise operations between these. Elementwise operations
        before the first and after the last are left out, so that they run in the layout in which
        the leaf is stored. A leaf without matrix products has none.
        """
        if leaf not in self._products:
            self._products[leaf] = self._find_products(self._of_leaf[leaf])
        return self._products[leaf]

    def _find_products(self, operations: Sequence[Operation]) -> list[Operation]:
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
        self._take_in(operations, needed)
        return [x for x in operations if x in needed]

    def _take_in(self, operations: Sequence[Operation], products: set[Operation]) -> None:
        """Add elementwise operations to `products` whose results only `products` read.

        An operation is left out if `products` would read more bytes with it. For example, the
        square of a matrix, for its norm, is added if a product reads the matrix anyway.
        """
        for operation in reversed(operations):
            out = operation.outputs[0]
            readers = self._readers[out]
            if operation in products or not is_elementwise(operation) or out in self._returned:
                continue
            if readers and readers <= products:
                more = {*products, operation}
                if self._bytes_read(operations, more) <= self._bytes_read(operations, products):
                    products.add(operation)

    def _bytes_read(self, operations: Sequence[Operation], products: Collection[Operation]) -> int:
        return sum(x.num_bytes for x in self.given([x for x in operations if x in products]))

    def given(self, operations: Sequence[Operation]) -> list[Value]:
        """Return the values of leaves that `operations` read but do not make."""
        made = {x for each in operations for x in each.outputs}
        read = dict.fromkeys(x for each in operations for x in each.values)
        return [x for x in read if x in self.leaf and x not in made]

    def read_by_others(self, operations: Sequence[Operation]) -> list[Value]:
        """Return the results of `operations` that other operations read or the program returns."""
        own = set(operations)
        made = (x for each in operations for x in each.outputs)
        return [x for x in made if x in self._returned or not self._readers[x] <= own]


def _draws(operation: Operation) -> bool:
    """Return whether an operation makes random bits: `vmap` over keys may make other bits."""
    equations = equations_inside(operation.equation)
    return any(x.primitive.name in RANDOM_BITS for x in equations)


def _stack(values: LeafValues, leaves: Sequence[int]) -> MatrixStack:
    """Return the `MatrixStack` of alike leaves, with new operations that stack and multiply."""
    by_leaf = {leaf: values.products_of(leaf) for leaf in leaves}
    operations = by_leaf[leaves[0]]
    stack_of: dict[int, Any] = {}  # by key
    of_leaves: dict[int, dict[int, Value]] = collections.defaultdict(dict)  # by key and leaf
    for leaf in leaves:
        for value in values.given(by_leaf[leaf]):
            of_leaves[values.key[value]][leaf] = value
    stacking: list[Operation] = []
    for key, of_leaf in of_leaves.items():
        each = [of_leaf[leaf] for leaf in leaves]
        new, (stack_of[key],) = rewritten(operations[0], lambda *xs: jnp.stack(xs), each)
        stacking += new
    given = [*stack_of.values()]
    products: list[Operation] = []
    for operation in operations:
        keys = [values.key[x] for x in operation.outputs]
        # Values of a leaf with one key are equal: one stack is made for them.
        if stack_of.keys().isdisjoint(keys):
            new, outputs = _on_stacks(operation, values, stack_of)
            products += new
            stack_of.update(zip(keys, outputs, strict=True))
    of_products: dict[Value, None] = {}
    rows: list[Operation] = []
    for i, leaf in enumerate(leaves):
        for value in values.read_by_others(by_leaf[leaf]):
            stack = stack_of[values.key[value]]
            of_products[stack] = None
            rows += _row(by_leaf[leaf][0], stack, i, value)
    return MatrixStack(leaves, given, [*of_products], products, stacking, rows)


def _on_stacks(
    operation: Operation, values: LeafValues, stack_of: Mapping[int, Any]
) -> tuple[list[Operation], list[Any]]:
    """Return operations that apply `operation` to each row of stacks, and their outputs.

    `stack_of` has the stack of the values of each key. All rows share the inputs without a stack.
    """
    stacks = {
        i: stack_of[values.key[x]]
        for i, x in enumerate(operation.inputs)
        if isinstance(x, Value) and x in values.leaf
    }

    def of_rows(*arrays: Any) -> list[Any]:
        def of_row(*rows: Any) -> list[Any]:
            inputs = list(arrays)
            for i, row in zip(stacks, rows, strict=True):
                inputs[i] = row
            return list(operation.bind(inputs))

        return jax.vmap(of_row)(*(arrays[i] for i in stacks))

    inputs = [stacks.get(i, x) for i, x in enumerate(operation.inputs)]
    return rewritten(operation, of_rows, inputs)


def _row(operation: Operation, stack: Value, number: int, row: Value) -> list[Operation]:
    """Make the operations that compute the value `row` as row `number` of a stack.

    They get the source line of `operation`.
    """

    def index(x: Any) -> Any:
        return lax.index_in_dim(x, number, keepdims=False)

    *others, last = rewritten(operation, index, [stack])[0]
    return [*others, dataclasses.replace(last, outputs=(row,))]
