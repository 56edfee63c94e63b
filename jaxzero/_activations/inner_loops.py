"""Loops inside of layers, such as those over experts, blocks of tokens or steps in time.

What such a loop stacks up for backward leaves the loop over layers as a stack of stacks. To choose
what the loops inside keep, one trip of the forward loop over layers and the trip of the backward
loop that reads its stacks are joined into one block, a program of forward and backward in which
they are loops like any others. Then the block is divided again into the bodies of both loops over
layers: each value of the forward half that the backward half reads becomes a stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._program import Atom, Block, Loop, Operation, Value, like, without_dead_code
from .loops import Pair, stacked_values


class Trip(NamedTuple):
    """One trip of a forward loop and of the backward loop that reads its stacks, as one block.

    Attributes:
        block: the operations of both bodies. Its inputs and outputs are those of the forward body,
            without the outputs that are stacked up for backward, and then those of the backward
            body.
        end: how many of the operations are forward.
        own: indices of the backward loop's inputs that the forward loop neither reads nor makes.
    """

    block: Block
    end: int
    own: tuple[int, ...]


def joined(pair: Pair) -> Trip:
    """Join the bodies of a pair that has one backward loop."""
    forward, (backward,) = pair.forward, pair.readers
    first, num = forward.first_stack, forward.num_constants
    constants = dict(zip(forward.inputs[:num], forward.body.inputs, strict=False))
    stacks = dict(zip(forward.inputs[first:], forward.body.inputs[first:], strict=True))
    stacks |= {forward.outputs[i]: forward.body.outputs[i] for i in pair.saved}
    given: dict[Atom, Atom] = {}
    own = []
    for i, (outside, inside) in enumerate(zip(backward.inputs, backward.body.inputs, strict=True)):
        if i >= backward.first_stack and outside in stacks:
            given[inside] = stacks[outside]
        elif i < backward.num_constants and outside in constants:
            given[inside] = constants[outside]
        else:
            own.append(i)
    inputs = (*forward.body.inputs, *(backward.body.inputs[i] for i in own))
    results = (x for i, x in enumerate(forward.body.outputs) if i not in pair.saved)
    outputs = (*results, *(given.get(x, x) for x in backward.body.outputs))
    operations = (
        *forward.body.operations,
        *(x.reading(given) for x in backward.body.operations),
    )
    return Trip(Block(inputs, outputs, operations), len(forward.body.operations), tuple(own))


def divided(pair: Pair, trip: Trip) -> Pair:
    """Divide a joined trip, after its block was rewritten, into the two loops of its pair."""
    forward, (backward,) = pair.forward, pair.readers
    before, after = trip.block.operations[: trip.end], trip.block.operations[trip.end :]
    results = trip.block.outputs[-len(backward.outputs) :]
    # Loops inside may stack up values that nothing reads any more; those must not cross.
    after = without_dead_code(Block((), results, after)).operations
    of_forward = {*forward.body.inputs, *(x for operation in before for x in operation.outputs)}
    read = [*(x for operation in after for x in operation.values), *results]
    crossing = [x for x in dict.fromkeys(read) if x in of_forward]
    forward, outside = _stacking(forward, before, crossing)
    inside: dict[Any, Value] = {x: like(x) for x in crossing}
    constants = [x for x in crossing if x in forward.body.inputs[: forward.num_constants]]
    stacked = [x for x in crossing if x not in constants]
    num_own = sum(i < backward.num_constants for i in trip.own)

    def entering(given: Sequence[Atom], new: Mapping[Any, Atom]) -> tuple:
        own = [given[i] for i in trip.own]
        own[num_own:num_own] = [new[x] for x in constants]
        return (*own, *(new[x] for x in stacked))

    body = Block(
        entering(backward.body.inputs, inside),
        tuple(inside.get(x, x) for x in results),
        tuple(x.reading(inside) for x in after),
    )
    inputs = entering(backward.inputs, outside)
    num_constants = num_own + len(constants)
    changed = dataclasses.replace(backward, inputs=inputs, body=body, num_constants=num_constants)
    returned = {x for i, x in enumerate(pair.forward.outputs) if i not in pair.saved}
    saved = (i for i, x in enumerate(forward.outputs) if x in inputs and x not in returned)
    return Pair(forward, tuple(saved), (changed,), pair.held)


def _stacking(
    loop: Loop, operations: Sequence[Operation], values: Sequence[Value]
) -> tuple[Loop, dict[Value, Atom]]:
    """The loop with a body of `operations` that also stacks up `values`.

    Returns:
        The loop; and for each value of its body, but for carried ones, the value outside of which
        it is a layer: an input of the loop, or a stack that it makes.
    """
    first = loop.first_stack
    outside = dict(zip(loop.body.inputs, loop.inputs, strict=True))
    for x in loop.body.inputs[loop.num_constants : first]:
        del outside[x]
    outside |= {x: stack for x, stack in stacked_values(loop) if x not in outside}
    new = {x: like(x, (loop.length, *x.shape)) for x in values if x not in outside}
    body = Block(loop.body.inputs, (*loop.body.outputs, *new), tuple(operations))
    changed = dataclasses.replace(loop, outputs=(*loop.outputs, *new.values()), body=body)
    return changed, outside | new
