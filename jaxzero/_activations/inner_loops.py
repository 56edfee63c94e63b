"""Join the loops over layers of forward and backward, to choose what loops inside of layers keep.

An inner loop is, for example, one over experts or blocks of tokens. Its forward half is in the body
of the forward loop over layers, and its backward half in the body of the backward loop. `joined`
puts both bodies into one block, as a program of forward and backward for one layer. For this
program one chooses what its loops keep in the same way as for the whole program. `divided` then
makes two bodies of the block again. Each value of the forward half that the backward half reads is
stacked up by the loop over layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._program import Atom, Block, Loop, Operation, Value, like, without_dead_code
from .loops import Pair, stacked_values


class Trip(NamedTuple):
    """A block of a trip of a forward loop and the trip of the backward loop that reads its values.

    Attributes:
        block: the operations of both bodies. Its inputs are those of the forward body, then those
            of the backward body that `own` lists. Its outputs are those of the forward body, but
            for the values that are stacked up for backward, then those of the backward body.
        end: the number of the block's first operations, which are forward.
        own: the indices of the backward loop's inputs that correspond to no value of the forward
            body.
    """

    block: Block
    end: int
    own: tuple[int, ...]


def joined(pair: Pair) -> Trip:
    """Join the bodies of a pair's forward loop and of its only backward loop into one block."""
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
    """Divide the block of a trip into the bodies of two loops, and return the pair of these loops.

    `trip` is what `joined` returned for `pair`, but with a block that has been rewritten.
    """
    forward, (backward,) = pair.forward, pair.readers
    before, after = trip.block.operations[: trip.end], trip.block.operations[trip.end :]
    results = trip.block.outputs[-len(backward.outputs) :]
    # Inner loops may stack up values that nothing reads any more. What only they read is dropped.
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
    """Replace the body of a loop by `operations`, and let the loop also stack up `values`.

    Returns:
        The new loop; and a dict from values of its body to values outside of it: from a constant
        to the same input of the loop, from a scanned layer to the stack that it is taken from, and
        from a value that the loop stacks up to its stack.
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
