"""Find layers that a Python loop unrolls.

A program reads its stacks layer by layer, `w[0]`, `w[1]`, ..., or `for x in w`. With `L` layers its
operations are, in order:

    operations before the layers, those of each layer (L times), operations after the layers

All layers compute the same function (`Kinds`) of their weights, of results of the previous layer,
and of values from outside. Operations that read weights of one layer and nothing else, such as
casts, may stand anywhere. A stack may be two arrays, one of which has the first layers.

A `Place` names a value of a layer by its operation and output. A `Read` says where an operation of
a layer gets an input: from a place in this layer ("inside") or the previous one ("carry"), from
this layer's weights, from outside ("same" for all layers), or from a "stack" of values for layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from .._mesh import is_traced
from . import movable_ops
from .ir import Atom, Block, Constant, Operation, Value
from .same_operations import Kinds, reads_refs, same_constants

Place = tuple[int, int]  # of a value in a layer: which operation makes it, and which output it is
# Where an input of an operation of a layer comes from: "inside" (a place), "carry" (an index),
# "weights" (a value of the first layer), "same" (an atom), "stack" (an atom for each layer).
Read = tuple[str, Any]


class StackPart(NamedTuple):
    """An array that has all layers of a stack, or some of them.

    Attributes:
        stack: a number that names the stack.
        first: the index, in the stack, of the first layer in this array.
    """

    stack: int
    first: int = 0


class LayersOf:
    """The values of a program that depend on one layer's weights alone, grouped by layer.

    Attributes:
        number: for each of these values, the index of its layer.
        key: for each of these values, a key. Values of two layers have equal keys if they are
            computed alike.
        of_key: for each key, the first value that has it.
        rows: for each of these values that is a row of a stack, the name of the stack.
        picks: slices that take one layer's part of an array that is no weight, such as keys.
        rest: the operations that neither make one of these values nor are picks, in order.
    """

    def __init__(self, block: Block, parts: Mapping[Value, StackPart]):
        self.block = block
        self.parts = parts
        self._num_dims = {x.stack: len(value.shape) for value, x in parts.items()}
        self._ends = {(x.stack, x.first + value.shape[0]) for value, x in parts.items()}
        self.length = max(end for _, end in self._ends)
        self.number: dict[Value, int] = {}
        self.key: dict[Value, Hashable] = {}
        self.of_key: dict[Hashable, Value] = {}
        self.rows: dict[Value, int] = {}
        self.rest: list[Operation] = []
        self._kinds = Kinds()
        for operation in block.operations:
            if (first := self._first_row(operation)) is not None:
                stack = self.parts[operation.values[0]].stack
                for number, out in enumerate(operation.outputs, first):
                    self.rows[out] = stack
                    self._add(out, number, ("row", stack, len(out.shape)))
                continue
            if (row := self._squeezed(operation)) is not None:
                (out,) = operation.outputs
                self.rows[out] = self.rows[row]
                self._add(out, self.number[row], ("row", self.rows[row], len(out.shape)))
                continue
            numbers = {self.number.get(x) for x in operation.values}
            number = numbers.pop() if len(numbers) == 1 else None
            if number is None or operation.has_effects or _reads_inputs(operation):
                self.rest.append(operation)
                continue
            kind = self.kind(operation), *map(self._key_of, operation.inputs)
            for i, out in enumerate(operation.outputs):
                self._add(out, number, (i, kind))
        self.picks = self._find_picks()
        self.rest = [x for x in self.rest if x not in self.picks]

    def _find_picks(self) -> set[Operation]:
        """Return the slices that take one layer's part of an array that is no weight.

        An array counts as having such parts if at least as many different slices of it are taken
        as there are layers.
        """
        of_layers = {*self.parts}
        slices: dict[Atom, dict[Any, list[Operation]]] = {}
        for operation in self.block.operations:
            if not of_layers.isdisjoint(operation.values):
                of_layers.update(operation.outputs)
            elif operation.name == "slice":
                params = operation.equation.params
                which = params["start_indices"], params["limit_indices"], params["strides"]
                slices.setdefault(operation.inputs[0], {}).setdefault(which, []).append(operation)
        ways = [list(x.values()) for x in slices.values() if len(x) >= self.length]
        return {operation for way in ways for same in way for operation in same}

    def kind(self, operation: Operation) -> int:
        return self._kinds.number(operation)

    def read(self, operation: Operation) -> int | None:
        """Return the layer whose weights an operation reads; None if it reads none or several."""
        numbers = {self.number[x] for x in operation.values if x in self.number}
        return numbers.pop() if len(numbers) == 1 else None

    def window(self) -> Window:
        """Find the operations of the layers in `rest`.

        Raises:
            NotImplementedError: the layers are not alike.
        """
        if reads_refs(self.block):
            raise NotImplementedError(
                "The function has unrolled layers and a mutable array (`jax.Ref`), so its layers "
                "cannot be divided between stages. Scan the layers, or leave out `stages`."
            )
        lengths = sorted({max(end for x, end in self._ends if x == y) for y, _ in self._ends})
        if len(lengths) > 1:
            self._refuse(f"there are stacks of {' and of '.join(map(str, lengths))} layers")
        places: list[list[int]] = [[] for _ in range(self.length)]
        for i, operation in enumerate(self.rest):
            if (number := self.read(operation)) is not None:
                places[number].append(i)
        missing = [i for i, found in enumerate(places) if not found]
        if missing or self.length < 2:
            why = f"nothing reads the weights of layer {missing[0]}" if missing else "it is one"
            self._refuse(why)
        return _find_window(self, places)

    def segments(self) -> list[tuple[int, int]]:
        """Return ranges `(start, end)` of layers that every stack has in one array."""
        starts = sorted({part.first for part in self.parts.values()})
        return [*zip(starts, [*starts[1:], self.length], strict=True)]

    def between(self, start: int, end: int, known: Mapping[Any, Any]) -> dict[int, Any]:
        """Return layers `start` to `end` of each stack, which must lie in one array of the stack.

        Args:
            start: the first layer.
            end: the layer after the last.
            known: for each value, its array.

        Returns:
            For the name of each stack, an array of these layers.
        """
        by_stack = {}
        for value, (stack, first) in self.parts.items():
            if first <= start < first + value.shape[0]:
                by_stack[stack] = rows(known[value], start - first, end - first)
        return by_stack

    def _first_row(self, operation: Operation) -> int | None:
        """Return the layer that a slice takes out of a stack, or the first of an `unstack`.

        Return None for other operations.
        """
        source, op = operation.inputs[0] if operation.inputs else None, operation.view()
        if not isinstance(source, Value) or source not in self.parts:
            return None
        part, shape = self.parts[source], source.shape
        if operation.name == "unstack":
            return None if operation.equation.params["axis"] else part.first
        if not isinstance(op, movable_ops.Slice):
            return None
        rest = [0] * (len(shape) - 1), list(shape[1:])
        is_row = op.limit[0] == op.start[0] + 1 and set(op.strides) == {1}
        is_row &= (list(op.start[1:]), list(op.limit[1:])) == rest
        return part.first + op.start[0] if is_row else None

    def _squeezed(self, operation: Operation) -> Value | None:
        """Return the row `[1, ...]` of a stack whose first dim `operation` drops; None for others.

        A scan gives the squeezed row to an iteration as it is. If the iteration computed it from
        the row, forward would save it for backward.
        """
        row = operation.source
        if row not in self.rows or not isinstance(operation.view(), movable_ops.Reshape):
            return None
        is_slice = len(row.shape) == self._num_dims[self.rows[row]]
        return row if is_slice and operation.outputs[0].shape == row.shape[1:] else None

    def _add(self, value: Value, number: int, key: Hashable) -> None:
        self.number[value] = number
        self.key[value] = key
        self.of_key.setdefault(key, value)

    def _key_of(self, atom: Atom) -> Hashable:
        return self.key[atom] if isinstance(atom, Value) else self._kinds.constant(atom)

    def _refuse(self, why: str) -> None:
        raise NotImplementedError(_not_alike(why))


def _reads_inputs(operation: Operation) -> bool:
    """Return whether an operation reads a traced array that is no parameter, such as the batch."""
    given = [x.value for x in operation.inputs if isinstance(x, Constant)]
    return any(is_traced(x) and x.ndim > 0 for x in given)


def rows(stack: Any, start: int, end: int) -> Any:
    """Return rows `start` to `end` of an array; the array itself if these are all."""
    return stack if (start, end) == (0, len(stack)) else stack[start:end]


def _not_alike(why: str) -> str:
    return (
        f"The layers of `jz.Stages` are unrolled, and cannot run as one `jax.lax.scan`: {why}. "
        "Stages divide layers that all compute the same, one after the other. Make them so, or "
        "leave out `stages`."
    )


@dataclasses.dataclass(frozen=True)
class Window:
    """The range of `LayersOf.rest` that has the operations of all layers, one after the other.

    Attributes:
        start: the index of the first operation of the first layer.
        size: the number of operations of a layer.
        reads: for each operation of a layer, a `Read` of each input.
        carried: for each value that a layer reads from the previous one, its place in the previous
            layer, and the atom that the first layer reads instead.
    """

    start: int
    size: int
    reads: list[list[Read]]
    carried: list[tuple[Place, Atom]]


def _find_window(layers: LayersOf, places: Sequence[Sequence[int]]) -> Window:
    """Find the range of the layers' operations.

    `places` has, for each layer, the indices in `layers.rest` of operations that read its weights.
    """
    num = min(map(len, places))
    sizes: dict[int, list[int]] = {}
    for j in range(num):
        steps = {b[j] - a[j] for a, b in zip(places, places[1:], strict=False)}
        if len(steps) == 1 and min(steps) > 0:
            sizes.setdefault(min(steps), []).append(j)
    if not sizes:
        raise NotImplementedError(_not_alike(_first_difference(layers, places)))
    # Operations outside of the layers, such as a weight decay, read weights at smaller distances.
    size = max(sizes)
    first, last = places[0][sizes[size][0]], places[0][sizes[size][-1]]
    kinds = list(map(layers.kind, layers.rest))
    length, windows = layers.length, []
    problems: list[tuple[int, str]] = []
    for start in range(max(0, last - size + 1), min(first, len(kinds) - length * size) + 1):
        problem = _difference_of_kinds(layers, kinds, start, size)
        if problem is None:
            reads = _reads(layers, start, size)
            if not isinstance(reads, str):
                windows.append(Window(start, size, *reads))
                continue
            problem = length * size, reads
        problems.append(problem)
    if not windows:
        # Explain the window that holds for the most operations: it is most likely the layers.
        _, why = max(problems, key=lambda x: x[0], default=(0, _first_difference(layers, places)))
        raise NotImplementedError(_not_alike(why))
    # The boundary between two layers is where the fewest bytes pass from one to the next.
    return min(windows, key=lambda x: sum(_num_bytes(layers, x, place) for place, _ in x.carried))


def _num_bytes(layers: LayersOf, window: Window, place: Place) -> int:
    value = layers.rest[window.start + place[0]].outputs[place[1]]
    return value.num_bytes if value.is_array else 0


def _first_difference(layers: LayersOf, places: Sequence[Sequence[int]]) -> str:
    """Return a text that says where a layer reads its weights otherwise than the first layer.

    `places` is as for `_find_window`.
    """
    for number, positions in enumerate(places[1:], 1):
        for i, j in zip(places[0], positions, strict=False):
            if layers.kind(layers.rest[i]) != layers.kind(layers.rest[j]):
                return _named(layers, i, j, number)
    counts = sorted({len(found) for found in places})
    if len(counts) > 1:
        return f"weights of a layer are read by {' or '.join(map(str, counts))} operations"
    return (
        "they are not in the order of their numbers, or something that not all of them have is "
        "computed between two"
    )


def _named(layers: LayersOf, i: int, j: int, number: int) -> str:
    a, b = layers.rest[i], layers.rest[j]
    if (a.name, a.where) == (b.name, b.where):
        return (
            f"what layer {number} computes by `{b.name}` at {b.where} is not known to be the same "
            "as in the layer before"
        )
    return (
        f"layer {number} has `{b.name}` at {b.where} where another has `{a.name}` at "
        f"{a.where}, and "
        "what they compute is not known to be the same"
    )


def _difference_of_kinds(
    layers: LayersOf, kinds: Sequence[int], start: int, size: int
) -> tuple[int, str] | None:
    """Compare each operation of a layer with that of the previous layer.

    `kinds` has the number (`Kinds`) of each operation of `layers.rest`. The result is how many
    operations precede the first that differs, and a text that says how; None if none differs.
    """
    for i in range(start + size, start + layers.length * size):
        if kinds[i] != kinds[i - size]:
            return i - start, _named(layers, i - size, i, (i - start) // size)
    return None


def _reads(
    layers: LayersOf, start: int, size: int
) -> tuple[list[list[Read]], list[tuple[Place, Atom]]] | str:
    """Find where the operations of a layer read their inputs from.

    Args:
        layers: the program's operations, grouped by layer.
        start: the index in `layers.rest` of the first layer's first operation.
        size: the number of operations of a layer.

    Returns:
        For each operation of a layer, a `Read` of each input; and the values that a layer carries
        to the next. If layers read from different places, a text that says where, instead.
    """
    place_of: dict[Value, tuple[int, Place]] = {}
    for i in range(layers.length * size):
        for j, out in enumerate(layers.rest[start + i].outputs):
            place_of[out] = i // size, (i % size, j)
    carried: dict[tuple[Place, Atom], int] = {}
    reads: list[list[Read]] = []
    for k in range(size):
        operations = [layers.rest[start + i * size + k] for i in range(layers.length)]
        reads_of_one: list[Read] = []
        for atoms in zip(*(x.inputs for x in operations), strict=True):
            read = _read(layers, place_of, atoms, carried)
            if read is None:
                first = operations[0]
                return f"`{first.name}` at {first.where} reads other values in some of the layers"
            reads_of_one.append(read)
        reads.append(reads_of_one)
    return reads, list(carried)


def _read(
    layers: LayersOf,
    made: dict[Value, tuple[int, Place]],
    atoms: tuple[Atom, ...],
    carried: dict[tuple[Place, Atom], int],
) -> Read | None:
    """Return where an input, `atoms[i]` in layer `i`, comes from; None if layers differ.

    `made` has the layer and the place of each value that layers make. A value that one layer reads
    from the previous one is added to `carried`, with its index.
    """
    places = [made.get(x) if isinstance(x, Value) else None for x in atoms]
    if any(x in layers.number for x in atoms):
        numbers = [layers.number.get(x) for x in atoms if isinstance(x, Value)]
        keys = {layers.key.get(x) for x in atoms if isinstance(x, Value)}
        is_own = numbers == list(range(layers.length)) and len(keys) == 1
        return ("weights", atoms[0]) if is_own else None
    if places[0] is not None:
        number, place = places[0]
        return ("inside", place) if places == [(i, place) for i in range(len(atoms))] else None
    if any(places):
        if places[1] is None:
            return None
        place = places[1][1]
        if places[1:] != [(i, place) for i in range(len(atoms) - 1)]:
            return None
        return "carry", carried.setdefault((place, atoms[0]), len(carried))
    first, *others = atoms
    if isinstance(first, Constant):
        is_same = all(isinstance(x, Constant) and same_constants(first, x) for x in others)
    else:
        is_same = all(x is first for x in others)
    return ("same", first) if is_same else ("stack", atoms)
