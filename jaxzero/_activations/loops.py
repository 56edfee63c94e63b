"""Rewrite pairs of a forward loop and the backward loops that scan the stacks that it makes.

For the body of the forward loop, a part of the program, a cut is chosen: what is kept for backward
and what backward repeats (`min_cut`). Repeated operations are copied into the bodies of backward
loops. The first two lines show loops as traced, the last two the same loops if only `a` is kept:

    for layer:            a, b, c = forward(x)      stacks of a, b and c
    for layer, reversed:  backward(a, b, c)
    for layer:            a, b, c = forward(x)      a stack of a
    for layer, reversed:  b, c = again(a); backward(a, b, c)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from .._program import (
    Atom,
    Block,
    Copies,
    Loop,
    Operation,
    Value,
    fixed_of,
    is_elementwise,
    like,
    rewritten,
    without_dead_code,
)
from .costs import bytes_of, copies_in_host, seconds_of
from .min_cut import Choice, Cost, Part

_SMALLER = 8  # a constant made of values of so many times fewer bytes is made in the loop's body


class Pair(NamedTuple):
    """A loop of forward, and the loops of backward that scan the stacks that it makes.

    Attributes:
        forward: the loop of forward.
        saved: of the loop's outputs, the indices of the stacks that backward only scans.
        readers: the loops of backward that scan stacks of `saved`.
        held: the indices of the stacks that are held whatever is chosen: they are results, or
            backward does not only scan them.
    """

    forward: Loop
    saved: tuple[int, ...]
    readers: tuple[Loop, ...]
    held: tuple[int, ...] = ()


def stacked_once(block: Block, end: int) -> tuple[Block, dict[Atom, Atom]]:
    """Let each loop, and each loop inside of it, stack up a value of its body once only.

    A value that a scan returns is often a residual too, for which JAX makes a second stack. Loops
    of backward, behind the first `end` operations, keep a second stack if it is an output or read
    by other operations than loops. It is a gradient, which is reduced by itself.

    Returns:
        The block; and a dict from each stack that is dropped to the one that is read in its place.
    """
    instead: dict[Atom, Atom] = {}
    others = (x for x in block.operations[end:] if not isinstance(x, Loop))
    read = {*block.outputs, *(x for operation in others for x in operation.values)}
    operations = []
    for i, operation in enumerate(block.operations):
        operation = operation.reading(instead)
        if isinstance(operation, Loop):
            body = operation.body
            body, _ = stacked_once(body, len(body.operations) if i < end else 0)
            operation = dataclasses.replace(operation, body=body)
            first: dict[Value, Value] = {}
            for x, stack in stacked_values(operation):
                if first.setdefault(x, stack) is not stack and (i < end or stack not in read):
                    instead[stack] = first[x]
        operations.append(operation)
    outputs = tuple(instead.get(x, x) for x in block.outputs)
    return without_dead_code(Block(block.inputs, outputs, tuple(operations))), instead


def find_pairs(block: Block, end: int, results: Collection[Atom]) -> list[Pair]:
    """Return a pair for each forward loop that makes stacks which backward only scans.

    Forward may read these stacks too, as a decoder reads the states of an encoder.

    Args:
        block: a program.
        end: the number of the block's first operations that are forward.
        results: values that are kept whatever is chosen.
    """
    readers: dict[Atom, list[tuple[Operation, int]]] = {}
    for operation in block.operations:
        for i, atom in enumerate(operation.inputs):
            readers.setdefault(atom, []).append((operation, i))
    backward = {*block.operations[end:]}
    returned = {*block.outputs}
    pairs = []
    for loop in block.operations[:end]:
        if not isinstance(loop, Loop) or not loop.length:
            continue
        in_host = stacks_in_host(loop)
        saved, held, found = [], [], {}
        for i, value in enumerate(loop.outputs[loop.num_carry :], loop.num_carry):
            of_value = [x for x in readers.get(value, ()) if x[0] in backward]
            scanned = all(_scans(x, at, loop) for x, at in of_value)
            if value not in returned and of_value and scanned and value not in in_host:
                saved.append(i)
                found |= {reader: None for reader, _ in of_value}
            elif value in results or of_value:
                held.append(i)
        if saved:
            pairs.append(Pair(loop, tuple(saved), tuple(found), tuple(held)))
    return pairs


def stacks_in_host(loop: Loop) -> set[Value]:
    """Return the stacks of a loop that are in host memory."""
    made = {x for operation in loop.body.operations for x in copies_in_host(operation)}
    return {stack for x, stack in stacked_values(loop) if x in made}


def _scans(reader: Operation, i: int, loop: Loop) -> bool:
    is_loop = isinstance(reader, Loop)
    return is_loop and i >= reader.first_stack and reader.length == loop.length


def part_of(
    pair: Pair,
    outside: dict[Value, Cost],
    never: Collection[Operation],
    weights: Collection[Value],
    times: int = 1,
) -> Part:
    """Return the body of a pair's forward loop as a `Part`, to choose what it keeps for backward.

    Args:
        pair: a forward loop and the backward loops that scan its stacks.
        outside: for values outside of the loop, the `Cost` of letting a backward loop read one.
        never: operations of the body that backward does not repeat.
        weights: values outside of the loop that are stacks of weights, or views of such stacks.
        times: how often the loop runs: the trips of the loops around it.
    """
    loop = pair.forward
    body = loop.body
    saved, stored = (
        {x for i in indices if isinstance(x := body.outputs[i], Value)}
        for indices in (pair.saved, pair.held)
    )
    fixed = fixed_of(body, layers_of(loop, weights))
    # If backward reads a view of a layer's weight, such as a cast weight, it gathers it anyway.
    gathered = {x for view in saved & fixed.views for x in fixed.of(view) or ()}
    read = {x for reader in pair.readers for x in reader.inputs}
    entering = zip(loop.inputs, body.inputs, strict=True)
    inputs = {
        x: outside[given]
        for given, x in entering
        if given in outside and given not in read and x not in gathered
    }
    return Part(
        body.operations,
        saved,
        body.inputs[loop.num_constants : loop.first_stack],
        inputs,
        stored,
        never,
        times * loop.length,
        is_stacked=True,
        views=fixed.views,
    )


def layers_of(loop: Loop, stacks: Collection[Value]) -> list[Value]:
    """Return the inputs of a loop's body that are layers of `stacks`, if the loop scans these."""
    return [inside for outside, inside in loop.stacks if outside in stacks]


def repeating(
    block: Block,
    pair: Pair,
    choice: Choice,
    stack_of: dict[Value, Value],
    in_host: Collection[Value] = (),
) -> Block:
    """Let a pair's forward loop stack up kept values, and its backward loops recompute the others.

    Stacks that nothing reads any more remain, until `without_dead_code` drops them.

    Args:
        block: the program.
        pair: loops of the program.
        choice: the values that the body of the forward loop keeps, and what backward repeats.
        stack_of: stacks of kept values that the traced loop does not stack up. New ones are added,
            so that all choices, made at several prices of a kept byte, share the stack of a value.
        in_host: the kept values that are in host memory between forward and backward.
    """
    made_inside = _made_inside(block, pair.forward)
    # Forward repeats nothing, but makes large constants in its body too.
    loop = _Recomputing(pair.forward, pair.forward, {}, made_inside, []).result()
    copies = [_to_host_and_back(loop, x) for x in in_host]
    at = dict(stacked_values(loop))
    kept = [x for x in choice.kept if x not in in_host] + [to.outputs[0] for to, _ in copies]
    new = [x for x in kept if x not in at]
    stacks = {x: stack_of.setdefault(x, like(x, (loop.length, *x.shape))) for x in new}
    body = Block(
        loop.body.inputs,
        (*loop.body.outputs, *new),
        (*loop.body.operations, *(to for to, _ in copies)),
    )
    forward = dataclasses.replace(loop, outputs=(*loop.outputs, *stacks.values()), body=body)
    changed: dict[Operation, Operation] = {pair.forward: forward}
    again = [*(back for _, back in copies), *choice.repeated]
    for reader in pair.readers:
        changed[reader] = _Recomputing(forward, reader, at | stacks, made_inside, again).result()
    return _with_others(block, changed)


def replaced(block: Block, pair: Pair, by: Pair) -> Block:
    """Return the block with the loops of `by` in the place of those of `pair`."""
    others = zip((pair.forward, *pair.readers), (by.forward, *by.readers), strict=True)
    return _with_others(block, dict(others))


def _with_others(block: Block, others: Mapping[Any, Operation]) -> Block:
    return dataclasses.replace(block, operations=tuple(others.get(x, x) for x in block.operations))


def _made_inside(block: Block, loop: Loop) -> list[Operation]:
    """Return operations that make large constants of a loop, such as masks, from small values.

    The caller copies them into the loop's body. A broadcast mask that is made outside of the loop
    would be read from memory in full in each iteration.
    """
    operations: dict[Operation, None] = {}
    for outside, inside in zip(loop.inputs[: loop.num_constants], loop.body.inputs, strict=False):
        made = _made_of_small(block, outside, bytes_of(inside) // _SMALLER)
        if made:
            *others, last = made
            operations |= dict.fromkeys((*others, dataclasses.replace(last, outputs=(inside,))))
    return [*operations]


def _made_of_small(block: Block, value: Atom, most: int) -> list[Operation]:
    """Return in program order the operations that make a value from values of at most `most` bytes.

    Each operation is a view or elementwise, so XLA fuses it with its readers. If the value needs
    any other operation, the list is empty.
    """
    found: set[int] = set()
    waiting = [value]
    while waiting:
        x = waiting.pop()
        if not isinstance(x, Value) or (bytes_of(x) <= most and x is not value):
            continue
        maker = block.makers.get(x)
        if maker is None or not (is_elementwise(maker) or seconds_of(maker) == 0):
            return []
        if block.positions[x] not in found:
            found.add(block.positions[x])
            waiting += maker.inputs
    return [block.operations[i] for i in sorted(found)]


def _to_host_and_back(loop: Loop, value: Value) -> tuple[Operation, Operation]:
    """Return a copy of a value to host memory, and a copy back whose output is `value` itself."""

    def copy(x: Array) -> Array:
        host = jax.device_put(x, jax.memory.Space.Host)
        return jax.device_put(host, jax.memory.Space.Device)

    (to_host, back), _ = rewritten(loop, copy, [value])
    return to_host, dataclasses.replace(back, outputs=(value,))


def stacked_values(loop: Loop) -> list[tuple[Value, Value]]:
    """Return each value of a loop's body that is stacked up, with its stack: a loop output."""
    first = loop.num_carry
    made = zip(loop.body.outputs[first:], loop.outputs[first:], strict=True)
    return [(x, stack) for x, stack in made if isinstance(x, Value)]


def _before_readers(
    made_inside: Sequence[Operation], repeated: Sequence[Operation]
) -> list[Operation]:
    """Merge operations: those in `made_inside`, of constants, stand before their first reader.

    The plan counts a constant, such as a mask of all attention scores, among the arrays that a
    layer holds from the operation on that makes it.
    """
    makers = {x: operation for operation in made_inside for x in operation.outputs}
    ordered: dict[Operation, None] = {}

    def add(operation: Operation) -> None:
        for maker in (makers[x] for x in operation.values if x in makers):
            if maker not in ordered:
                add(maker)
        ordered[operation] = None

    for operation in (*repeated, *made_inside):
        add(operation)
    return [*ordered]


class _Recomputing(Copies):
    """Builds a loop whose body makes values by copies of operations, instead of reading them.

    `loop` is the `forward` loop of a pair or one of its backward loops. Its new body has copies of
    `repeated`, operations of the forward body, and of `made_inside`, which make large constants
    outside of the loop. `stacks` maps values of the forward body to stacks that `loop` may scan.
    """

    def __init__(
        self,
        forward: Loop,
        loop: Loop,
        stacks: dict[Value, Value],
        made_inside: list[Operation],
        repeated: list[Operation],
    ):
        self.forward = forward
        self.loop = loop
        self.stacks = stacks
        super().__init__(_before_readers(made_inside, repeated))
        self.outside = {
            x for operation in made_inside for x in operation.values
        } - self._makers.keys()
        given = zip(loop.inputs, loop.body.inputs, strict=True)
        carry = range(loop.num_constants, loop.first_stack)
        self.constants, self.scanned = {}, {}  # from a value outside of the loop to that inside
        for i, (outside, inside) in enumerate(given):
            if i not in carry:
                (self.constants if i < loop.num_constants else self.scanned)[outside] = inside
        self.new_constants: dict[Atom, Value] = {}
        self.new_stacks: dict[Atom, Value] = {}

    def result(self) -> Loop:
        loop, body = self.loop, self.loop.body
        replaced = self._replaced()
        for operation in body.operations:
            self.add(operation.reading(replaced))
        results = (replaced.get(x, x) for x in body.outputs)
        made = tuple(self.of(x) if isinstance(x, Value) else x for x in results)
        first, n = loop.num_constants, len(self.new_constants)

        def widened(inputs: tuple, constants: Collection, stacks: Collection) -> tuple:
            return (*inputs[:first], *constants, *inputs[first:], *stacks)

        inside = widened(body.inputs, self.new_constants.values(), self.new_stacks.values())
        return dataclasses.replace(
            loop,
            inputs=widened(loop.inputs, [*self.new_constants], [*self.new_stacks]),
            body=Block(inside, made, tuple(self.operations)),
            num_constants=first + n,
        )

    def _replaced(self) -> dict[Atom, Atom]:
        """Return a dict from inputs of `loop`'s body to values that copied operations now make."""
        forward, loop = self.forward, self.loop
        replaced: dict[Atom, Atom] = {}
        made: dict[Atom, Value] = {stack: x for x, stack in stacked_values(forward)}
        for stack, inside in loop.stacks:
            x = made.get(stack)
            if x in self._makers:
                replaced[inside] = x
        given = zip(forward.inputs, forward.body.inputs, strict=True)
        constants = {outside: inside for outside, inside in given if inside in self._makers}
        for outside, inside in zip(
            loop.inputs, loop.body.inputs[: loop.num_constants], strict=False
        ):
            if outside in constants:
                replaced[inside] = constants[outside]
        return replaced

    def read(self, value: Value, copied: Operation) -> Atom:
        forward = self.forward
        if value in self.stacks and value not in forward.body.inputs:
            return self._scan(self.stacks[value], value)
        if value in self.outside:
            return self._entering(value, value, self.constants, self.new_constants)
        i = forward.body.inputs.index(value)
        if i < forward.num_constants:
            return self._entering(forward.inputs[i], value, self.constants, self.new_constants)
        outside = self.stacks[value] if i < forward.first_stack else forward.inputs[i]
        return self._scan(outside, value)

    def _scan(self, outside: Atom, value: Value) -> Atom:
        return self._entering(outside, value, self.scanned, self.new_stacks)

    def _entering(self, outside: Atom, value: Value, known: dict, new: dict) -> Atom:
        if not isinstance(outside, Value):
            return outside if known is self.constants else self._new(outside, value, new)
        return known[outside] if outside in known else self._new(outside, value, new)

    def _new(self, outside: Atom, value: Value, new: dict[Atom, Value]) -> Value:
        return new.setdefault(outside, like(value))
