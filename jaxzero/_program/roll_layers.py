"""Turn layers that a Python loop unrolls into one `lax.scan` over their stacks.

The program is rolled before it is differentiated, so that backward is a scan too. An iteration
computes values that are made of one layer's weights alone (casts) where it needs them. A value from
outside that differs between layers, such as a key for each, becomes one more stack. If operations
after the layers read a value of the last layer only, the scan carries it; if they read it of other
layers too, the scan stacks it. If the first layers of the stacks are arrays of their own, there are
two scans, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .ir import Atom, Constant, Operation, Value
from .same_operations import flat_block, input_dtypes
from .trace import at_line_of, open_program, operations_for
from .unrolled_layers import LayersOf, Place, StackPart, Window, rows


def with_rolled_layers(
    function: Callable[[list[Any]], Any], stacks: Mapping[int, StackPart]
) -> Callable[[list[Any]], Any]:
    """Transform `function` so that unrolled layers in it run in one `lax.scan`.

    Args:
        function: takes a list of arrays; returns a tree of arrays.
        stacks: the arrays that are stacks of layers, or parts of them, by index. If `function`
            reads none of them layer by layer, it is called as it is.

    Returns:
        A function that raises `NotImplementedError` if the layers do not compute the same. The
        error names the line and what to do.
    """

    def run(given: list[Any]) -> Any:
        program = open_program(function, given)
        block = flat_block(program)
        layers = LayersOf(block, {block.inputs[i]: part for i, part in stacks.items()})
        if not layers.number:
            return function(given)
        outputs = _Rolled(layers, layers.window()).run(given)
        return jax.tree.unflatten(program.treedef, outputs)

    return run if stacks else function


class _Rolled:
    """A program whose unrolled layers run in one scan.

    A *place* (`Place`) names a value that every layer computes, by its operation and its output.
    """

    def __init__(self, layers: LayersOf, window: Window):
        self.layers = layers
        self.window = window
        end = window.start + layers.length * window.size
        self.inside = layers.rest[window.start : end]
        self.first = self.inside[: window.size]
        place = {
            out: (i // window.size, (i % window.size, j))
            for i, operation in enumerate(self.inside)
            for j, out in enumerate(operation.outputs)
        }
        self.before = self._before()
        ran = {*self.before}
        others = [*layers.rest[: window.start], *layers.rest[end:]]
        self.after = [x for x in others if x not in ran]
        wanted = {x for operation in self.after for x in operation.values}
        wanted.update(x for x in layers.block.outputs if isinstance(x, Value))
        # Operations after the layers read values at places, and values of weights alone.
        self.places = {x: place[x] for x in place if x in wanted}
        carried = [x for x, _ in window.carried]
        last = layers.length - 1
        read_in: dict[Place, set[int]] = {}
        for number, x in self.places.values():
            read_in.setdefault(x, set()).add(number)
        # A value that is read of the last layer only is carried. Keys are stacked, since a carry
        # would have to start from zeros, and there are no zeros of keys.
        final = [x for x in read_in if read_in[x] == {last} and self._value(x).is_array]
        self.extra = [x for x in final if x not in carried]
        self.stacked = [x for x in read_in if x not in {*final, *carried} or read_in[x] != {last}]
        self.weights = {x: layers.key[x] for x in wanted if x in layers.number}
        self.keys = list(dict.fromkeys(self.weights.values()))

    def _before(self) -> list[Operation]:
        """Return the operations that compute what layers read from outside, in program order."""
        layers, window = self.layers, self.window
        atoms: list[Any] = [x for _, x in window.carried]
        atoms += [x for operation in layers.picks for x in operation.outputs]
        for kind, what in (read for reads in window.reads for read in reads):
            atoms += [what] if kind == "same" else what if kind == "stack" else []
        return operations_for(layers.block, atoms, layers.block.inputs)

    def run(self, given: Sequence[Any]) -> list[Any]:
        """Run the program on the arrays `given`; return its outputs."""
        layers = self.layers
        arrays: dict[Atom, Any] = dict(zip(layers.block.inputs, given, strict=True))
        _run(self.before, arrays)
        with at_line_of(self.first[0]):
            carry, stacked, of_weights = self._scan(arrays)
        final = dict(zip([x for x, _ in self.window.carried], carry, strict=False))
        num = len(self.window.carried)
        final |= zip(self.extra, carry[num:], strict=True)
        of_places = dict(zip(self.stacked, stacked, strict=True))
        for x, (number, place) in self.places.items():
            arrays[x] = _row(of_places[place], number) if place in of_places else final[place]
        of_keys = dict(zip(self.keys, of_weights, strict=True))
        for x, key in self.weights.items():
            arrays[x] = _row(of_keys[key], layers.number[x])
        _run(self.after, arrays)
        return [_value(x, arrays) for x in layers.block.outputs]

    def _scan(self, known: dict[Atom, Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Run the layers in one scan, or in two if the first layers are arrays of their own.

        Args:
            known: the arrays of the values from outside that the layers read.

        Returns:
            The carry after the last layer; a stack over layers of the value at each place in
            `self.stacked`; and a stack over layers of each value that depends on weights alone.
        """
        layers, window = self.layers, self.window
        differing = {
            (k, j): _stack([_value(x, known) for x in read[1]], input_dtypes(self.first[k])[j])
            for k, reads in enumerate(window.reads)
            for j, read in enumerate(reads)
            if read[0] == "stack"
        }

        def body(carry: list[Any], given: Any) -> tuple[list[Any], Any]:
            stacks, differing = given
            weights = _Weights(layers, stacks)
            results: dict[Place, Any] = {}
            for k, operation in enumerate(self.first):
                inputs = []
                for j, (kind, what) in enumerate(window.reads[k]):
                    match kind:
                        case "inside":
                            inputs.append(results[what])
                        case "carry":
                            inputs.append(carry[what])
                        case "weights":
                            inputs.append(weights(what))
                        case "same":
                            inputs.append(_value(what, known))
                        case _:
                            inputs.append(differing[k, j])
                with at_line_of(operation):
                    outputs = operation.bind(inputs)
                results |= {(k, i): x for i, x in enumerate(outputs)}
            new = [results[x] for x, _ in window.carried] + [results[x] for x in self.extra]
            of_weights = [weights(layers.of_key[key]) for key in self.keys]
            return new, ([results[x] for x in self.stacked], of_weights)

        start = [_typed(_value(x, known), self._value(place).dtype) for place, x in window.carried]
        # No layer reads the extra carry. After the scan, its value from the last layer is read.
        extra = [jnp.zeros(x.shape, x.dtype) for x in map(self._value, self.extra)]
        segments = []
        for a, b in layers.segments():
            given = layers.between(a, b, known), {k: rows(x, a, b) for k, x in differing.items()}
            carry, new = lax.scan(body, [*start, *extra], given)
            start = carry[: len(start)]
            segments.append(new)
        return carry, *jax.tree.map(lambda *xs: lax.concatenate(xs, 0), *segments)

    def _value(self, place: Place) -> Value:
        return self.first[place[0]].outputs[place[1]]


class _Weights:
    """Computes values that depend on one layer's weights alone, in that layer's iteration.

    It is called with the first layer's value, and returns that of the layer whose weights are
    `rows`.
    """

    def __init__(self, layers: LayersOf, rows: dict[int, Any]):
        self._layers = layers
        self._rows = rows
        self._known: dict[Hashable, Any] = {}

    def __call__(self, value: Value) -> Any:
        key = self._layers.key[value]
        if key not in self._known:
            if value in self._layers.rows:
                row = self._rows[self._layers.rows[value]]
                self._known[key] = row if row.ndim == len(value.shape) else row[None]
            else:
                operation = self._layers.block.makers[value]
                inputs = [x.value if isinstance(x, Constant) else self(x) for x in operation.inputs]
                with at_line_of(operation):
                    outputs = operation.bind(inputs)
                keys = [self._layers.key[x] for x in operation.outputs]
                self._known.update(zip(keys, outputs, strict=True))
        return self._known[key]


def _run(operations: Sequence[Operation], known: dict[Atom, Any]) -> None:
    for operation in operations:
        with at_line_of(operation):
            outputs = operation.bind([_value(x, known) for x in operation.inputs])
        known.update(zip(operation.outputs, outputs, strict=True))


def _value(atom: Atom, known: dict[Atom, Any]) -> Any:
    return atom.value if isinstance(atom, Constant) else known[atom]


def _typed(x: Any, dtype: Any) -> Any:
    """Convert `x`, such as a Python number, to an array of `dtype`; return random keys as is."""
    return x if jnp.issubdtype(dtype, jax.dtypes.extended) else jnp.asarray(x, dtype)


def _stack(values: Sequence[Any], dtype: Any) -> Any:
    return jnp.stack([_typed(x, dtype) for x in values])


def _row(stack: Any, number: int) -> Any:
    return lax.index_in_dim(stack, number, keepdims=False)
