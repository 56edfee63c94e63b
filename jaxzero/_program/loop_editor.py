"""Add operations, inputs and stacked outputs to the body of a loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax

from .elementwise import dtype_of, shape_of
from .ir import Atom, Block, Constant, Loop, Operation, Value
from .stack_values import Saved, StackValues
from .trace import rewritten


class LoopEditor:
    """Changes to one loop of a block; `finish` returns the changed loop.

    New operations run before the others of the body, or after them if they read what these make.
    """

    def __init__(self, values: StackValues, loop: Loop):
        self.values = values
        self.loop = loop
        first = loop.num_constants + loop.num_carry
        self._constants: dict[Atom, Atom] = {}  # new inputs, by what is outside
        self._stacks: dict[Atom, Atom] = {}
        self._outputs: list[tuple[Atom, Value]] = []  # new stacked outputs: inside, outside
        self._before: list[Operation] = []
        self._after: list[Operation] = []
        self._replaced: dict[Atom, Atom] = {}
        inputs = list(zip(loop.inputs, loop.body.inputs, strict=True))
        self._whole: dict[Atom, Atom] = dict(inputs[: loop.num_constants])
        self._layers: dict[Atom, Atom] = {
            x: inside for x, inside in inputs[first:] if not values.is_lazy(x)
        }
        stacked = list(zip(loop.outputs, loop.body.outputs, strict=True))
        self._layers.update(stacked[loop.num_carry :])

    def layer(self, atom: Atom, behind: Mapping[Value, Operation] | None = None) -> Atom:
        """This iteration's layer of a stack outside of the loop.

        Args:
            atom: the stack.
            behind: operations after the loop that may be computed in it, by their outputs. What
                this call adds to the body then runs last.
        """
        if atom in self._layers:
            return self._layers[atom]
        values = self.values
        if isinstance(atom, Value) and atom not in values.fixed.views:
            if behind and atom in behind:
                self._apply(behind[atom], behind)
            elif saved := values.saved(atom):
                self._layers[atom] = self._copy(saved, behind)
            elif values.fixed.of(atom) is not None and values.expands(atom):
                passed, operation = values.passed(atom), values.maker(atom)
                if passed is not None:
                    self._layers[atom] = self.layer(passed, behind)
                elif operation is not None:
                    self._apply(operation, behind)
        if atom not in self._layers:
            inside = Value(jax.ShapeDtypeStruct(shape_of(atom)[1:], dtype_of(atom)))
            self._layers[atom] = self._stacks[atom] = inside
        return self._layers[atom]

    def whole(self, atom: Atom) -> Atom:
        """An array outside of the loop, as its body reads it."""
        if isinstance(atom, Constant):
            return atom
        if atom not in self._whole:
            self._whole[atom] = self._constants[atom] = Value(atom)
        return self._whole[atom]

    def emit(
        self, operation: Operation, function: Callable, inputs: Sequence[Atom], last: bool = False
    ) -> list[Atom]:
        """Add a function in the place of `operation` to the body; return its outputs."""
        made, outputs = rewritten(operation, function, inputs)
        (self._after if last else self._before).extend(made)
        return outputs

    def stacked(self, inside: Atom) -> Value:
        """A new output of the loop, which stacks a value of the body."""
        shape = (self.loop.length, *shape_of(inside))
        outside = Value(jax.ShapeDtypeStruct(shape, dtype_of(inside)))
        self._outputs.append((inside, outside))
        return outside

    def replace(self, inside: Value, other: Atom) -> None:
        """Let the body read another value in place of one of its inputs."""
        self._replaced[inside] = other

    def finish(self) -> Loop:
        """The loop with all changes."""
        loop, cut = self.loop, self.loop.num_constants
        inputs = [*loop.inputs[:cut], *self._constants, *loop.inputs[cut:], *self._stacks]
        inner = loop.body.inputs
        inner = [*inner[:cut], *self._constants.values(), *inner[cut:], *self._stacks.values()]
        body = Block(
            tuple(inner),
            (*map(self._read, loop.body.outputs), *(self._read(x) for x, _ in self._outputs)),
            (*self._before, *map(self._reading, (*loop.body.operations, *self._after))),
        )
        return dataclasses.replace(
            loop,
            inputs=tuple(inputs),
            outputs=(*loop.outputs, *(out for _, out in self._outputs)),
            body=body,
            num_constants=cut + len(self._constants),
        )

    def _read(self, atom: Atom) -> Atom:
        return self._replaced.get(atom, atom)

    def _reading(self, operation: Operation) -> Operation:
        if self._replaced.keys().isdisjoint(operation.inputs):
            return operation
        return dataclasses.replace(operation, inputs=tuple(map(self._read, operation.inputs)))

    def _apply(self, operation: Operation, behind: Mapping[Value, Operation] | None) -> None:
        """Compute the layers of an operation's outputs."""
        form = self.values.form(operation)
        assert form is not None
        inputs = [
            self.layer(atom, behind) if sliced else self.whole(atom)
            for atom, sliced in zip(operation.inputs, form.sliced, strict=True)
        ]
        outputs = self.emit(operation, form.apply, inputs, last=bool(behind))
        for value, inside in zip(operation.outputs, outputs, strict=True):
            self._layers[value] = inside

    def _copy(self, saved: Saved, behind: Mapping[Value, Operation] | None) -> Atom:
        """Compute again what another loop's body has made of weights."""
        loop, first = saved.loop, saved.loop.num_constants + saved.loop.num_carry
        outside = {x: i for i, x in enumerate(loop.body.inputs)}
        copies: dict[Atom, Atom] = {}

        def read(atom: Atom) -> Atom:
            if isinstance(atom, Value) and atom not in copies:
                i = outside[atom]
                given = loop.inputs[i]
                copies[atom] = self.layer(given, behind) if i >= first else self.whole(given)
            return copies.get(atom, atom)

        for operation in saved.operations:
            inputs = tuple(map(read, operation.inputs))
            outputs = tuple(map(Value, operation.outputs))
            copies.update(zip(operation.outputs, outputs, strict=True))
            copy = dataclasses.replace(operation, inputs=inputs, outputs=outputs)
            (self._after if behind else self._before).append(copy)
        return read(saved.output)
