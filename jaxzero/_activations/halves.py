"""Split a loop of forward, and the loops of backward that read its stacks, into two loops each.

Between two points of the frontier, some layers keep what one says and the rest what the other does:

    for layer:            a, b = forward(x)         stacks of a and b
    for layer, reversed:  backward(a, b)

    for layer < n:        a, b = forward(x)         stacks of n layers
    for layer >= n:       a, b = forward(x)         stacks of the rest
    for layer >= n, reversed:  backward(a, b)
    for layer < n, reversed:   backward(a, b)

The loops scan slices of the stacks of weights. Their gradients are padded with zeros and added, as
those of slices are, and the plan moves reductions before both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._program import Atom, Block, Loop, Operation, Value, rewritten
from .copies import like, renewed_block
from .loops import Pair

_Halves = dict[Atom, tuple[Atom, Atom]]  # of stacks


def can_split(pair: Pair) -> bool:
    """Whether the loops of a pair can be split: they pass something on, and run forward first."""
    return pair.forward.num_carry > 0 and not pair.forward.is_reversed and pair.forward.length > 3


def in_halves(block: Block, pair: Pair, num: int) -> tuple[Block, Value]:
    """The block with the loops of a pair split, and the first output of the second loop of forward.

    Args:
        block: the program.
        pair: loops of it.
        num: of the layers in the first loop.
    """
    forward = pair.forward
    saved = {forward.outputs[i] for i in pair.saved}
    halves: _Halves = {}
    operations: list[Operation] = []
    for operation in block.operations:
        if operation is forward or operation in pair.readers:
            assert isinstance(operation, Loop)
            operations += _split(operation, num, halves, saved)
        else:
            operations.append(operation)
    return dataclasses.replace(block, operations=tuple(operations)), forward.outputs[0]


def _split(loop: Loop, num: int, halves: _Halves, saved: Collection[Value]) -> list[Operation]:
    """The two loops, after the slices that they scan and before what joins their stacks.

    Args:
        loop: the loop.
        num: of the layers in the first half.
        halves: of the stacks that are in two already; those of this loop are added.
        saved: the stacks that are read in two.
    """
    made = []
    for stack, _ in loop.stacks:
        if stack not in halves:
            operations, halves[stack] = _sliced(loop, stack, num)
            made += operations
    sizes = num, loop.length - num
    stacks = loop.outputs[loop.num_carry :]
    parts = [tuple(like(x, (size, *x.shape[1:])) for x in stacks) for size in sizes]
    carry = loop.inputs[loop.num_constants : loop.first_stack]
    order = (1, 0) if loop.is_reversed else (0, 1)
    for i in order:
        is_last = i == order[1]
        passed = loop.outputs[: loop.num_carry]
        passed = passed if is_last else tuple(map(like, passed))
        scanned = (halves[stack][i] for stack, _ in loop.stacks)
        length = {**loop.equation.params, "length": sizes[i]}
        made.append(
            dataclasses.replace(
                loop,
                equation=loop.equation.replace(params=length),
                inputs=(*loop.inputs[: loop.num_constants], *carry, *scanned),
                outputs=(*passed, *parts[i]),
                body=renewed_block(loop.body) if is_last else loop.body,
            )
        )
        carry = passed
    for whole, *of_whole in zip(stacks, *parts, strict=True):
        halves[whole] = of_whole[0], of_whole[1]
        if whole not in saved:
            made += _joined(loop, whole, halves[whole])
    return made


def _sliced(loop: Loop, stack: Atom, num: int) -> tuple[list[Operation], tuple[Atom, Atom]]:
    def cut(x: Array) -> list[Array]:
        return [lax.slice_in_dim(x, 0, num), lax.slice_in_dim(x, num, x.shape[0])]

    operations, (first, second) = rewritten(loop, cut, [stack])
    return operations, (first, second)


def _joined(loop: Loop, whole: Value, halves: tuple[Atom, Atom]) -> list[Operation]:
    def join(x: Array, y: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return lax.concatenate([x, y], 0)
        sides = [(0, 0, 0)] * (x.ndim - 1)
        zero = jnp.zeros((), x.dtype)
        first = lax.pad(x, zero, [(0, y.shape[0], 0), *sides])
        return lax.add(first, lax.pad(y, zero, [(x.shape[0], 0, 0), *sides]))

    operations, _ = rewritten(loop, join, halves)
    return [*operations[:-1], dataclasses.replace(operations[-1], outputs=(whole,))]
