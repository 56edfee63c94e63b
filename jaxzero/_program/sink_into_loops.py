"""Move operations on whole stacks of weights, and on their gradients, into the loops over them.

A stack of weights is sharded, and a loop that scans it gathers one layer at a time. An operation
outside of the loop would need all layers at once:

    scan(f, x, w * mask)  ->  scan(lambda x, wm: f(x, wm[0] * wm[1]), x, (w, mask)).

So does what differentiation makes of it: the masked stack that is kept for backward, and the
product of the stack of gradients with the mask after the loop. All three are rewritten here:

1. What a loop scans is computed in its body, if operations treat each layer by itself
   (`layer_form`) and read weights and constants alone. A stack that an earlier loop made so is not
   kept, but computed again.
2. A reduction over all layers to something small, such as the sum of squares of a regularizer, is
   computed layer by layer in a loop that scans the same stack.
3. Operations on the stacked gradients that a loop returns are moved to the end of its body, if they
   end in the gradient of a weight and a reduction over devices cannot be moved before them.

Programs in which nothing of this occurs are returned as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import jax.numpy as jnp

from .dependence import Fixed
from .ir import Atom, Block, Constant, Loop, Operation, Value
from .layer_forms import reduction_over_layers
from .loop_editor import LoopEditor
from .stack_values import StackValues
from .trace import rewritten, without_dead_code

_SMALL = 4  # a result is small if it has this many times fewer bytes than what it is made of
_ADDITIONS = ("add", "add_any")


def sink_into_loops(block: Block, weights: Collection[Value], gradients: Sequence[int]) -> Block:
    """Move operations on stacks of weights and gradients into loops.

    Args:
        block: the program.
        weights: its inputs that are sharded weights.
        gradients: the indices of its outputs that are gradients of weights.
    """
    num_loops = sum(isinstance(operation, Loop) for operation in block.operations)
    before = block
    if not weights:
        return block
    for number in range(num_loops):
        block = _sink_scanned(block, weights, number)
    for number in range(num_loops):
        block = _sink_reductions(block, weights, number)
    for number in reversed(range(num_loops)):
        block = _sink_gradients(block, weights, gradients, number)
    return block if block is before else without_dead_code(block)


def _facts(block: Block, weights: Collection[Value], number: int) -> tuple[StackValues, int, Loop]:
    """What is known of the block's values; the index of its loop `number`; and the loop."""
    fixed = Fixed(block, {x: frozenset({x}) for x in weights}, weights, scalars=True)
    loops = [(i, x) for i, x in enumerate(block.operations) if isinstance(x, Loop)]
    return StackValues(fixed), *loops[number]


def _sink_scanned(block: Block, weights: Collection[Value], number: int) -> Block:
    """Compute stacks that a loop scans in its body."""
    values, index, loop = _facts(block, weights, number)
    first = loop.num_constants + loop.num_carry
    pairs = zip(loop.inputs[first:], loop.body.inputs[first:], strict=True)
    sunk = {inside: outside for outside, inside in pairs if values.is_lazy(outside)}
    if not sunk:
        return block
    editor = LoopEditor(values, loop)
    for inside, outside in sunk.items():
        editor.replace(inside, editor.layer(outside))
    return _with(block, {index: [editor.finish()]})


def _sink_reductions(block: Block, weights: Collection[Value], number: int) -> Block:
    """Reduce stacks to small arrays layer by layer, in a loop that gathers all they are made of."""
    values, index, loop = _facts(block, weights, number)
    scanned = frozenset().union(
        *(values.fixed.of(atom) or () for atom in loop.inputs[loop.num_constants :])
    )
    editor, changes = LoopEditor(values, loop), {}
    for place, operation in enumerate(block.operations):
        reductions = _of_lazy_stack(operation, values)
        if reductions is None or place == index:
            continue
        (stack,) = operation.inputs
        made_of = values.fixed.of(stack)
        if stack.shape[0] != loop.length or not made_of or not made_of <= scanned:
            continue
        of_layer, over_layers = reductions
        (small,) = editor.emit(operation, of_layer, [editor.layer(stack)])
        outputs = editor.stacked(small)
        made, (out,) = rewritten(operation, over_layers, [outputs])
        last = dataclasses.replace(made[-1], outputs=operation.outputs)
        assert out in made[-1].outputs
        changes[place] = [*made[:-1], last]
    if not changes:
        return block
    return _in_order(_with(block, {**changes, index: [editor.finish()]})) or block


def _of_lazy_stack(operation: Operation, values: StackValues):
    """The two parts of a reduction of a stack made of weights to a small array, else None."""
    if len(operation.inputs) != 1 or (reductions := reduction_over_layers(operation)) is None:
        return None
    (stack,), (out,) = operation.inputs, operation.outputs
    if not isinstance(stack, Value) or not values.is_layered(stack):
        return None
    # Partial sums in 16 bits would be rounded once for each layer.
    if jnp.issubdtype(out.dtype, jnp.floating) and out.dtype.itemsize < 4:
        return None
    small = out.num_bytes * stack.shape[0] * _SMALL <= stack.num_bytes
    return reductions if small else None


def _sink_gradients(
    block: Block, weights: Collection[Value], gradients: Sequence[int], number: int
) -> Block:
    """Move operations on stacks of gradients into the loop that makes them."""
    values, index, loop = _facts(block, weights, number)
    behind = _Behind(values, index, loop)
    ends = behind.ends([block.outputs[i] for i in gradients])
    if not ends:
        return block
    editor = LoopEditor(values, loop)
    moved: dict[Value, Value] = {}
    for value in ends:
        moved[value] = editor.stacked(editor.layer(value, behind.made))
    edited = _with(block, {index: [editor.finish()]})
    return _in_order(_substituted(edited, moved)) or block


class _Behind:
    """The operations after a loop that act on its stacked outputs, layer by layer."""

    def __init__(self, values: StackValues, index: int, loop: Loop):
        self.values = values
        self.made: dict[Value, Operation] = {}  # what can be computed in the loop
        self.stacked = {*loop.outputs[loop.num_carry :]}
        later = {*loop.outputs}  # all that depends on the loop
        for operation in values.fixed.block.operations[index + 1 :]:
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
        """The last values to compute in the loop, from which `gradients` are made."""
        found: dict[Value, None] = {}
        pending, seen = list(gradients), set()
        while pending:
            atom = pending.pop()
            if not isinstance(atom, Value) or atom in seen:
                continue
            seen.add(atom)
            if atom in self.made:
                if self._is_needed(atom):
                    found[atom] = None
            elif atom in self.values.fixed.makers:
                _, operation = self.values.fixed.makers[atom]
                if operation.name in _ADDITIONS or operation.view() is not None:
                    pending += operation.inputs
        return list(found)

    def _is_needed(self, value: Value) -> bool:
        """Whether an operation between the loop and `value` is one that no reduction can pass."""
        pending, seen = [value], set()
        while pending:
            value = pending.pop()
            if value in self.stacked or value in seen:
                continue
            seen.add(value)
            operation = self.made.get(value)
            if operation is None or (
                operation.name not in _ADDITIONS and operation.view() is None
            ):
                return True
            pending += [atom for atom in operation.inputs if isinstance(atom, Value)]
        return False


def _with(block: Block, changes: Mapping[int, Sequence[Operation]]) -> Block:
    """The block with other operations in place of some, by index."""
    operations = []
    for index, operation in enumerate(block.operations):
        operations += changes.get(index, [operation])
    return dataclasses.replace(block, operations=tuple(operations))


def _substituted(block: Block, moved: Mapping[Value, Value]) -> Block:
    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Constant) else moved.get(atom, atom)

    operations = (
        dataclasses.replace(x, inputs=tuple(map(read, x.inputs))) for x in block.operations
    )
    return Block(block.inputs, tuple(map(read, block.outputs)), tuple(operations))


def _in_order(block: Block) -> Block | None:
    """The operations in an order in which each follows what it reads, changed as little as needed.

    None if there is none, or if a loop or an operation with an effect would have to change places.
    """
    known: set[Atom] = {*block.inputs}
    ordered: list[Operation] = []
    waiting: list[Operation] = []
    for operation in block.operations:
        waiting.append(operation)
        progress = True
        while progress:
            ready = [x for x in waiting if _is_ready(x, known)]
            progress = bool(ready)
            for x in ready[:1]:
                waiting.remove(x)
                ordered.append(x)
                known.update(x.outputs)
    fixed = [x for x in block.operations if isinstance(x, Loop) or x.has_effects]
    if waiting or [x for x in ordered if isinstance(x, Loop) or x.has_effects] != fixed:
        return None
    return dataclasses.replace(block, operations=tuple(ordered))


def _is_ready(operation: Operation, known: set[Atom]) -> bool:
    return all(isinstance(atom, Constant) or atom in known for atom in operation.inputs)
