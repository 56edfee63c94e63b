"""Turn each branch of a `lax.cond` into a `Branch`, a loop that runs once or not at all.

A loop can gather the weights that it closes over in its body (`_plan.held_by_loops`), and reduce
their gradients there. So can a branch then, and devices gather only what the taken branch uses:

    y = cond(i, f, g, x)  ->  y = Branch(i == 0, f, x, zeros);  y = Branch(i == 1, g, x, y).

A gradient of a weight is a sum over the branches, so that it can be reduced in the one that runs:

    dw = Branch(i == 0, df, x, zeros) + Branch(i == 1, dg, x, zeros).

All devices have to take the same branch: the index must be uniform (`uniform_values`). Other
`cond`s, and those without weights, stay one operation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
from jax import lax

from .branch import Branch
from .carried_sums import makes_zeros
from .dependence import Fixed
from .ir import Atom, Block, Constant, Loop, Operation, Value, exchanged_or_effect
from .trace import branch_blocks, rewritten, without_dead_code
from .uniform import uniform_in_body, uniform_values


def split_conds(block: Block, weights: Collection[Value], uniform: Collection[Value]) -> Block:
    """Split the `cond`s that use weights and in which all devices take the same branch.

    Args:
        block: the program.
        weights: its inputs that are sharded weights.
        uniform: its inputs that are equal on all devices.
    """
    if not weights or not _has_cond(block):
        return block
    shapes = {x.shape for x in weights if x.shape}
    splitter = _Splitter(block, weights, shapes, lambda: uniform_values(block, uniform))
    split = splitter.block()
    return block if split is block else without_dead_code(split)


def _has_cond(block: Block) -> bool:
    loops = (x for x in block.operations if isinstance(x, Loop))
    return any(x.name == "cond" for x in block.operations) or any(_has_cond(x.body) for x in loops)


class _Splitter:
    """A block whose `cond`s are to be split."""

    def __init__(
        self,
        block: Block,
        weights: Collection[Value],
        shapes: set[tuple[int, ...]],
        uniform: Callable[[], set[Atom]],
    ):
        self.given = block
        self.shapes = shapes  # of weights, and of their layers
        self.fixed = Fixed(block, {x: frozenset({x}) for x in weights}, weights, scalars=True)
        self._find_uniform = uniform

    @functools.cached_property
    def uniform(self) -> set[Atom]:
        return self._find_uniform()

    def block(self) -> Block:
        """The block with `cond`s split, inside loops and branches too; the same without any."""
        operations: list[Operation] = []
        for operation in self.given.operations:
            if isinstance(operation, Loop):
                operations.append(self._with_split_body(operation))
            elif operation.name == "cond" and self._is_split(operation):
                split = _split(operation, self.shapes)
                operations += [
                    self._with_split_body(x) if isinstance(x, Loop) else x for x in split
                ]
            else:
                operations.append(operation)
        if operations == list(self.given.operations):
            return self.given
        return dataclasses.replace(self.given, operations=tuple(operations))

    def _with_split_body(self, loop: Loop) -> Loop:
        if not _has_cond(loop.body):
            return loop
        first = loop.num_constants + loop.num_carry
        weights, shapes = [], {*self.shapes}
        for i, (outside, inside) in enumerate(zip(loop.inputs, loop.body.inputs, strict=True)):
            if loop.num_constants <= i < first:
                continue
            if self.fixed.of(outside):
                weights.append(inside)
            if i >= first and isinstance(outside, Value) and outside.shape in self.shapes:
                shapes.add(inside.shape)
        shapes |= {
            out.shape[1:] for out in loop.outputs[loop.num_carry :] if out.shape in self.shapes
        }
        splitter = _Splitter(
            loop.body, weights, shapes, lambda: uniform_in_body(loop, self.uniform)
        )
        body = splitter.block()
        return loop if body is loop.body else dataclasses.replace(loop, body=body)

    def _is_split(self, operation: Operation) -> bool:
        """Whether a `cond` uses weights, or makes their gradients, and can be split."""
        index, *operands = operation.inputs
        uses = any(self.fixed.of(x) for x in operands)
        makes = any(_is_gradient(x, self.shapes) for x in operation.outputs)
        return (
            (uses or makes)
            and isinstance(index, Value)
            and index in self.uniform
            and all(x.is_array for x in operation.outputs)
            and not operation.has_effects
            and exchanged_or_effect(operation) is None
        )


def _is_gradient(value: Value, shapes: Collection[tuple[int, ...]]) -> bool:
    """Whether a result of a `cond` may be the gradient of a weight."""
    return value.is_array and value.shape in shapes and jnp.issubdtype(value.dtype, jnp.floating)


def _split(operation: Operation, shapes: Collection[tuple[int, ...]]) -> list[Operation]:
    """The operations that take the place of a `cond`."""
    index, *operands = operation.inputs
    blocks = branch_blocks(operation)
    made: list[Operation] = []

    def emit(function: Callable, *inputs: Atom) -> list[Atom]:
        operations, outputs = rewritten(operation, function, inputs)
        made.extend(operations)
        return outputs

    is_sum = [_is_gradient(out, shapes) for out in operation.outputs]
    sums: list[list[Atom]] = [[] for _ in operation.outputs]
    latest: list[Atom] = [Constant(None)] * len(is_sum)
    for i, out in enumerate(operation.outputs):
        (latest[i],) = emit(functools.partial(jnp.zeros, out.shape, out.dtype))
    zeros = list(latest)
    for number, block in enumerate(blocks):
        (taken,) = emit(functools.partial(_is_taken, number, len(blocks)), index)
        makers = {x: maker for maker in block.operations for x in maker.outputs}
        results = [
            i for i, x in enumerate(block.outputs) if not (is_sum[i] and _is_zero(x, makers))
        ]
        before = [zeros[i] if is_sum[i] else latest[i] for i in results]
        branch = _branch(operation, block, operands, results, is_sum, [*before, taken])
        made.append(branch)
        for i, value in zip(results, branch.outputs, strict=False):
            if is_sum[i]:
                sums[i].append(value)
            else:
                latest[i] = value
    moved: dict[Atom, Value] = {}
    for i, out in enumerate(operation.outputs):
        if len(sums[i]) > 1:
            (latest[i],) = emit(lambda *terms: functools.reduce(lax.add, terms), *sums[i])
        elif sums[i]:
            (latest[i],) = sums[i]
        moved[latest[i]] = out
    return [_renamed(x, moved) for x in made]


def _is_taken(number: int, num: int, index: Any) -> Any:
    """Whether branch `number` of `num` runs: the last one does for an index out of range too."""
    if number < num - 1:
        return index == number
    return (index < 0) | (index >= number)


def _branch(
    operation: Operation,
    block: Block,
    operands: list[Atom],
    results: list[int],
    is_sum: list[bool],
    carry: list[Atom],
) -> Branch:
    """One branch, which adds to those results that are sums and makes the others.

    Args:
        operation: the `cond`.
        block: the branch.
        operands: its inputs.
        results: indices of those that it makes.
        is_sum: for all results of the `cond`, whether they are sums over its branches.
        carry: for each of `results`, what there is before; and whether the branch runs.
    """
    inside = tuple(Value(x) for x in carry)
    added, outputs = [], []
    for i, before in zip(results, inside, strict=False):
        out = block.outputs[i]
        if is_sum[i]:
            operations, (out,) = rewritten(operation, lax.add, [before, out])
            added += operations
        outputs.append(out)
    body = Block((*block.inputs, *inside), (*outputs, inside[-1]), (*block.operations, *added))
    return Branch(
        "cond",
        (*operands, *carry),
        tuple(Value(x) for x in carry),
        operation.equation,
        body,
        len(operands),
        len(carry),
        caller=operation.caller,
    )


def _is_zero(atom: Atom, makers: dict[Value, Operation]) -> bool:
    if isinstance(atom, Constant):
        return atom.is_zero
    return atom in makers and makes_zeros(makers[atom])


def _renamed(operation: Operation, moved: dict[Atom, Value]) -> Operation:
    """The operation with other values in place of some."""

    def read(x: Any) -> Any:
        return moved.get(x, x)

    return dataclasses.replace(
        operation,
        inputs=tuple(map(read, operation.inputs)),
        outputs=tuple(map(read, operation.outputs)),
    )
