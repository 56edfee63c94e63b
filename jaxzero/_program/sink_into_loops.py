"""Move operations on whole stacks of weights, and on their gradients, into the loops over them.

A stack of weights is sharded, and a loop that scans it gathers one layer at a time. An operation
outside of the loop would need all layers at once:

    scan(f, x, w * mask)  ->  scan(lambda x, wm: f(x, wm[0] * wm[1]), x, (w, mask)).

Differentiation adds two more such operations: it keeps the masked stack for backward, and it
multiplies the stack of gradients by the mask after the loop. All three are rewritten here:

1. A stack that a loop scans is computed in the loop's body, layer by layer, if operations treat
   each layer by itself (`layer_form`) and read only weights and constants. A stack that an earlier
   loop made in this way is not kept, but computed again.
2. Operations on the stacked gradients that a loop returns are moved to the end of its body, if they
   end in the gradient of a weight and a reduction over devices cannot be moved before them.
3. A reduction of a stack to something small, such as the sum of squares of a regularizer, is
   computed layer by layer in a loop that scans the same stack.

A program without such operations is returned as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp

from . import movable_ops
from .ir import ADDITIONS, Atom, Block, Constant, Loop, Operation, Value
from .operation_kinds import REDUCTIONS, dtype_of, reduction_over_layers, shape_of
from .trace import rewritten, without_dead_code
from .weight_values import SMALL, Saved, StackValues, fixed_of


class LoopEditor:
    """Collects changes to one loop of a block; `finish` returns the changed loop.

    New operations run before the old operations of the body, or after them if they read results of
    old operations.
    """

    def __init__(self, values: StackValues, loop: Loop):
        self.values = values
        self.loop = loop
        self._constants: dict[Atom, Atom] = {}  # new inputs, by what is outside
        self._stacks: dict[Atom, Atom] = {}
        self._outputs: list[tuple[Atom, Value]] = []  # new stacked outputs: inside, outside
        self._before: list[Operation] = []
        self._after: list[Operation] = []
        self._replaced: dict[Atom, Atom] = {}
        pairs = zip(loop.inputs, loop.body.inputs[: loop.num_constants], strict=False)
        self._whole: dict[Atom, Atom] = dict(pairs)
        self._layers: dict[Atom, Atom] = {x: y for x, y in loop.stacks if not values.is_lazy(x)}
        stacked = list(zip(loop.outputs, loop.body.outputs, strict=True))
        self._layers.update(stacked[loop.num_carry :])

    def layer(self, atom: Atom, behind: Mapping[Value, Operation] | None = None) -> Atom:
        """Return the body's value for this iteration's layer of a stack outside of the loop.

        Args:
            atom: the stack.
            behind: operations after the loop that may move into it, by their outputs. If it is
                given, operations that this call adds run at the end of the body.
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
        """Return the body's input for the whole array `atom` outside of the loop; add it if new."""
        if isinstance(atom, Constant):
            return atom
        if atom not in self._whole:
            self._whole[atom] = self._constants[atom] = Value(atom)
        return self._whole[atom]

    def emit(
        self, operation: Operation, function: Callable, inputs: Sequence[Atom], last: bool = False
    ) -> list[Atom]:
        """Trace a function into the body, at the line of `operation`; return its outputs.

        If `last`, it runs after the body's old operations, otherwise before them.
        """
        made, outputs = rewritten(operation, function, inputs)
        (self._after if last else self._before).extend(made)
        return outputs

    def stacked(self, inside: Atom) -> Value:
        """Add an output to the loop that stacks a value of the body; return the output."""
        shape = (self.loop.length, *shape_of(inside))
        outside = Value(jax.ShapeDtypeStruct(shape, dtype_of(inside)))
        self._outputs.append((inside, outside))
        return outside

    def replace(self, inside: Value, other: Atom) -> None:
        """Let the body read `other` in place of its value `inside`."""
        self._replaced[inside] = other

    def finish(self) -> Loop:
        """Return the loop with all changes."""
        loop, cut = self.loop, self.loop.num_constants
        inputs = [*loop.inputs[:cut], *self._constants, *loop.inputs[cut:], *self._stacks]
        inner = loop.body.inputs
        inner = [*inner[:cut], *self._constants.values(), *inner[cut:], *self._stacks.values()]
        outputs = (*loop.body.outputs, *(x for x, _ in self._outputs))
        operations = (*loop.body.operations, *self._after)
        body = Block(
            tuple(inner),
            tuple(self._replaced.get(x, x) for x in outputs),
            (*self._before, *(x.reading(self._replaced) for x in operations)),
        )
        return dataclasses.replace(
            loop,
            inputs=tuple(inputs),
            outputs=(*loop.outputs, *(out for _, out in self._outputs)),
            body=body,
            num_constants=cut + len(self._constants),
        )

    def _apply(self, operation: Operation, behind: Mapping[Value, Operation] | None) -> None:
        """Compute in the body the layers of what an operation outside of the loop makes."""
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
        """Copy into this body what another loop's body computes from weights; return the result."""
        loop, first = saved.loop, saved.loop.first_stack
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


def sink_into_loops(block: Block, weights: Collection[Value], gradients: Sequence[int]) -> Block:
    """Move operations on stacks of weights and gradients into loops.

    Args:
        block: the program.
        weights: the inputs of the program that are sharded weights.
        gradients: the indices of the outputs that are gradients of weights.
    """
    num_loops = sum(isinstance(operation, Loop) for operation in block.operations)
    if not weights or not num_loops:
        return block
    sinking = _Sinking(block, weights, gradients)
    for number in range(num_loops):
        sinking.scanned(number)
    for number in reversed(range(num_loops)):
        sinking.gradients(number)
    if sinking.block is not block:  # `reductions` must not see operations that nothing reads now
        sinking.set(without_dead_code(sinking.block))
    for number in range(len(sinking.loops)):
        sinking.reductions(number)
    return block if sinking.block is block else without_dead_code(sinking.block)


class _Sinking:
    """A block. Its methods replace the block by one that has more operations inside of loops."""

    def __init__(self, block: Block, weights: Collection[Value], gradients: Sequence[int]):
        self.weights = weights
        self.gradient_outputs = gradients
        self.set(block)

    def set(self, block: Block) -> None:
        """Take this block as the one to rewrite from here on."""
        self.block = block
        self.values = StackValues(fixed_of(block, self.weights))
        self.loops = [(i, x) for i, x in enumerate(block.operations) if isinstance(x, Loop)]

    def scanned(self, number: int) -> None:
        """Let loop `number` compute layers of stacks in its body, and not scan the stacks."""
        index, loop = self.loops[number]
        sunk = {inside: outside for outside, inside in loop.stacks if self.values.is_lazy(outside)}
        if not sunk:
            return
        editor = LoopEditor(self.values, loop)
        for inside, outside in sunk.items():
            editor.replace(inside, editor.layer(outside))
        self.set(_with(self.block, {index: [editor.finish()]}))

    def reductions(self, number: int) -> None:
        """Move reductions of stacks to small arrays into loop `number`, which scans the stacks."""
        loop = self.loops[number][1]
        scanned = frozenset().union(*(self.values.fixed.of(x) or () for x, _ in loop.stacks))
        movable = []
        for operation in self.block.operations:
            stack = _reduced_stack(operation, self.values)
            weights = None if stack is None else self.values.fixed.of(stack)
            if stack and weights and weights <= scanned and stack.shape[0] == loop.length:
                movable.append(operation)
        # The loop may read one of these results, or one reduction may read the result of another.
        if movable and not self._reduce(number, movable) and len(movable) > 1:
            for operation in movable:
                if operation in self.block.operations:
                    self._reduce(number, [operation])

    def _reduce(self, number: int, operations: Sequence[Operation]) -> bool:
        """Move reductions into loop `number`; return whether that was possible."""
        index, loop = self.loops[number]
        editor, changes, moved = LoopEditor(self.values, loop), {}, {}
        places = {operation: place for place, operation in enumerate(self.block.operations)}
        for operation in operations:
            (out,) = operation.outputs
            if (parts := reduction_over_layers(operation)) is None:
                moved[out] = editor.stacked(editor.layer(out))
                continue
            of_layer, over_layers = parts
            (small,) = editor.emit(operation, of_layer, [editor.layer(operation.inputs[0])])
            (*made, last), _ = rewritten(operation, over_layers, [editor.stacked(small)])
            changes[places[operation]] = [*made, dataclasses.replace(last, outputs=(out,))]
        block = _with(self.block, {**changes, index: [editor.finish()]})
        return self._set_in_order(_substituted(block, moved))

    def gradients(self, number: int) -> None:
        """Move operations on stacks of gradients into loop `number`, which makes the stacks."""
        index, loop = self.loops[number]
        behind = _Behind(self.values, index, loop)
        ends = behind.ends([self.block.outputs[i] for i in self.gradient_outputs])
        if not ends:
            return
        editor = LoopEditor(self.values, loop)
        moved: dict[Atom, Value] = {x: editor.stacked(editor.layer(x, behind.made)) for x in ends}
        block = _with(self.block, {index: [editor.finish()]})
        self._set_in_order(_substituted(block, moved))

    def _set_in_order(self, block: Block) -> bool:
        """Go on with `block`, its operations put in order; return False if no order works."""
        ordered = _in_order(block)
        if ordered is not None:
            self.set(ordered)
        return ordered is not None


def _reduced_stack(operation: Operation, values: StackValues) -> Value | None:
    """Return the stack of weights that `operation` reduces to something small, or None."""
    if operation.name not in REDUCTIONS or len(operation.inputs) != 1:
        return None
    (stack,), (out,) = operation.inputs, operation.outputs
    if not isinstance(stack, Value) or not values.is_layered(stack):
        return None
    parts = reduction_over_layers(operation)
    if parts is None and not values.is_lazy(out):
        return None
    # Partial sums in 16 bits would be rounded once for each layer.
    if parts and jnp.issubdtype(out.dtype, jnp.floating) and out.dtype.itemsize < 4:
        return None
    size = out.num_bytes * (stack.shape[0] if parts else 1)
    return stack if size * SMALL <= stack.num_bytes else None


class _Behind:
    """The operations after a loop that act on its stacked outputs, layer by layer."""

    def __init__(self, values: StackValues, index: int, loop: Loop):
        self.values = values
        self.made: dict[Value, Operation] = {}  # what can be computed in the loop
        self.stacked = {*loop.outputs[loop.num_carry :]}
        block = values.fixed.block
        self.num_reads = Counter(atom for x in block.operations for atom in x.inputs)
        self.num_reads.update(block.outputs)
        later = {*loop.outputs}  # all that depends on the loop
        for operation in block.operations[index + 1 :]:
            if later.isdisjoint(operation.inputs):
                continue
            if not isinstance(operation, Loop) and self._can_move(operation, later):
                self.made |= dict.fromkeys(operation.outputs, operation)
            later |= {*operation.outputs}

    def _can_move(self, operation: Operation, later: set[Value]) -> bool:
        form = self.values.form(operation)
        if form is None or operation.has_effects:
            return False
        for atom, sliced in zip(operation.inputs, form.sliced, strict=True):
            inside = atom in self.made or atom in self.stacked
            if atom in later and not (inside and sliced):
                return False
            if atom not in later and not self.values.is_free(atom, sliced):
                return False
        return True

    def ends(self, gradients: Sequence[Atom]) -> list[Value]:
        """Return the values that the loop should compute for `gradients`: the last that it can."""
        last: dict[Value, None] = {}
        pending, seen = list(gradients), set()
        while pending:
            atom = pending.pop()
            if not isinstance(atom, Value) or atom in seen:
                continue
            seen.add(atom)
            if atom in self.made:
                if self._is_needed(atom):
                    last[atom] = None
            elif atom in self.values.fixed.makers:
                _, operation = self.values.fixed.makers[atom]
                if operation.name in ADDITIONS or operation.view() is not None:
                    pending += operation.inputs
        return list(last)

    def _is_needed(self, value: Value) -> bool:
        """Return whether gradients cannot be reduced before `value` is made of them."""
        pending, seen = [value], set()
        while pending:
            atom = pending.pop()
            if atom in seen:
                continue
            seen.add(atom)
            if atom is not value and self.num_reads[atom] > 1:
                return True
            if atom in self.stacked:
                continue
            operation = self.made.get(atom)
            if operation is None or not _passes_reductions(operation):
                return True
            pending += operation.values
        return False


def _passes_reductions(operation: Operation) -> bool:
    """Return whether `_plan` can reduce the inputs of an operation in place of its output."""
    if operation.name in ADDITIONS:
        return True
    op, source = operation.view(), operation.source
    if op is None or source is None or isinstance(op, movable_ops.Slice):
        return False
    is_same_size = math.prod(source.shape) == math.prod(operation.outputs[0].shape)
    return is_same_size or not isinstance(op, movable_ops.Broadcast)


def _with(block: Block, changes: Mapping[int, Sequence[Operation]]) -> Block:
    """Replace the operation at each index in `changes` by the operations that it maps to."""
    operations = []
    for index, operation in enumerate(block.operations):
        operations += changes.get(index, [operation])
    return dataclasses.replace(block, operations=tuple(operations))


def _substituted(block: Block, moved: Mapping[Atom, Value]) -> Block:
    """Let operations read, and the block return, `moved[x]` in place of each value `x` in it."""
    outputs = tuple(moved.get(x, x) for x in block.outputs)
    return Block(block.inputs, outputs, tuple(x.reading(moved) for x in block.operations))


def _in_order(block: Block) -> Block | None:
    """Reorder the operations, as little as needed, so that values are made before they are read.

    Return None if there is no such order, or if loops or effects would have to change places.
    """
    computed: set[Atom] = {*block.inputs}
    ordered: list[Operation] = []
    waiting: list[Operation] = []
    for operation in block.operations:
        waiting.append(operation)
        while ready := next((x for x in waiting if computed.issuperset(x.values)), None):
            waiting.remove(ready)
            ordered.append(ready)
            computed.update(ready.outputs)
    fixed = [x for x in block.operations if isinstance(x, Loop) or x.has_effects]
    if waiting or [x for x in ordered if isinstance(x, Loop) or x.has_effects] != fixed:
        return None
    return dataclasses.replace(block, operations=tuple(ordered))
