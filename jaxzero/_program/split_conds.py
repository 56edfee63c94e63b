"""Turn each branch of a `lax.cond` into a `Branch`, a loop that runs once or not at all.

A loop can gather the weights that it closes over in its body (`_plan.held_by_loops`), and reduce
their gradients there. A `Branch` can too, so devices gather only the weights of the taken branch:

    y = cond(i, f, g, x)  ->  y = Branch(i == 0, f, x, zeros);  y = Branch(i == 1, g, x, y).

A gradient of a weight becomes a sum over the branches, so that the branch that runs can reduce it:

    dw = Branch(i == 0, df, x, zeros) + Branch(i == 1, dg, x, zeros).

All devices have to take the same branch: the index must be uniform (`uniform_values`). If it is
not, the `cond` is marked as a `Fork`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .ir import Atom, Barrier, Block, Loop, Operation, Value, exchanged_or_effect
from .movable_ops import Op, apply_all
from .operation_kinds import Branch, Fork, is_zero
from .trace import branch_blocks, rewritten, without_dead_code
from .uniform import uniform_in_body, uniform_values
from .weight_values import fixed_of


class Passed(NamedTuple):
    """An input of a block, and the movable operations that turn it into an output."""

    value: Value
    ops: tuple[Op, ...] = ()


def passed_on(block: Block, out: Atom) -> Passed | None:
    """Return the input that a block passes on as `out`, with the movable operations; or None.

    A loop passes on a stack if its body passes on each layer of the stack.
    """
    ops: tuple[Op, ...] = ()
    while isinstance(out, Value) and out in block.makers:
        operation = block.makers[out]
        if isinstance(operation, Barrier):
            out = operation.inputs[operation.outputs.index(out)]
        elif isinstance(operation, Loop):
            stack = _stack(operation, operation.outputs.index(out))
            if stack is None:
                return None
            out, ops = stack.value, (*stack.ops, *ops)
        elif (op := operation.view()) is not None and operation.source is not None:
            out, ops = operation.source, (op, *ops)
        else:
            return None
    return Passed(out, ops) if isinstance(out, Value) else None


def _stack(loop: Loop, number: int) -> Passed | None:
    """Return the stack that a loop passes on, layer by layer, as output `number`; None if none."""
    passed = passed_on(loop.body, loop.body.outputs[number])
    if number < loop.num_carry or passed is None:
        return None
    position = loop.body.inputs.index(passed.value)
    outside = loop.inputs[position]
    if position < loop.first_stack or not isinstance(outside, Value):
        return None
    return Passed(outside, tuple(op.of_stack(loop.length) for op in passed.ops))


def split_conds(
    block: Block, weights: Collection[Value], uniform: Collection[Value], most_bytes: int
) -> Block:
    """Split the `cond`s that use weights and in which all devices take the same branch.

    Args:
        block: the program.
        weights: the inputs of the program that are sharded weights.
        uniform: the inputs that are equal on all devices.
        most_bytes: a `cond` that reads at most this many bytes of weights stays one operation.
    """
    if not weights or not _has_cond(block):
        return block
    shapes = {x.shape for x in weights if x.shape}
    splitter = _Splitter(block, weights, shapes, most_bytes, lambda: uniform_values(block, uniform))
    split = splitter.block()
    return block if split is block else without_dead_code(split)


def _has_cond(block: Block) -> bool:
    loops = (x for x in block.operations if isinstance(x, Loop))
    return any(x.name == "cond" for x in block.operations) or any(_has_cond(x.body) for x in loops)


class _Splitter:
    """A block whose `cond`s are to be split.

    Args:
        block: a program, or the body of a loop.
        weights: the inputs of the block that are sharded weights, or layers of them.
        shapes: the shapes of weights and of their layers, by which gradients are recognized.
        most_bytes: a `cond` that reads at most this many bytes of weights is not split.
        uniform: returns the values that are equal on all devices; called only if needed.
    """

    def __init__(
        self,
        block: Block,
        weights: Collection[Value],
        shapes: set[tuple[int, ...]],
        most_bytes: int,
        uniform: Callable[[], set[Atom]],
    ):
        self.given = block
        self.shapes = shapes  # of weights, and of their layers
        self.most_bytes = most_bytes
        self.fixed = fixed_of(block, weights)
        self._find_uniform = uniform

    @functools.cached_property
    def uniform(self) -> set[Atom]:
        return self._find_uniform()

    def block(self) -> Block:
        """Split the `cond`s of the block, also inside loops and branches; return the new block.

        If there is nothing to split, the result is the old block itself.
        """
        conds = self._to_split()
        added = _without_saved(conds.values())
        _drop_unread(self.given, conds, added)
        operations: list[Operation] = []
        for operation in self.given.operations:
            split = [operation]
            if self._is_fork(operation):
                fields = (getattr(operation, x.name) for x in dataclasses.fields(Operation)[:4])
                split = [Fork(*fields, caller=operation.caller)]
            if operation in conds:
                split = [*added.get(operation, []), *_split(conds[operation], self.shapes)]
            operations += [self._with_split_body(x) if isinstance(x, Loop) else x for x in split]
        if operations == [*self.given.operations]:
            return self.given
        return dataclasses.replace(self.given, operations=tuple(operations))

    def _with_split_body(self, loop: Loop) -> Loop:
        if not _has_cond(loop.body):
            return loop
        first = loop.first_stack
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
            loop.body, weights, shapes, self.most_bytes, lambda: uniform_in_body(loop, self.uniform)
        )
        body = splitter.block()
        return loop if body is loop.body else dataclasses.replace(loop, body=body)

    def _to_split(self) -> dict[Operation, _Cond]:
        """Return the `cond`s to split. Of `cond`s with one index, all or none are split."""
        sizes: dict[Atom, int] = {}
        conds = []
        for operation in self.given.operations:
            index = operation.inputs[0] if self._num_bytes(operation) else None
            if isinstance(index, Value) and index in self.uniform and _can_split(operation):
                conds.append(operation)
                sizes[index] = max(sizes.get(index, 0), self._num_bytes(operation))
        return {x: _Cond(x) for x in conds if sizes[x.inputs[0]] > self.most_bytes}

    def _is_fork(self, operation: Operation) -> bool:
        if not self._num_bytes(operation):
            return False
        index = operation.inputs[0]
        return isinstance(index, Value) and index not in self.uniform

    def _num_bytes(self, operation: Operation) -> int:
        """Return the bytes of weights that a `cond` reads, or of gradients that it makes, if more.

        They are 0 for any other operation.
        """
        if operation.name != "cond" or isinstance(operation, Loop):
            return 0
        read = {x for x in operation.inputs[1:] if isinstance(x, Value) and self.fixed.of(x)}
        made = [x for x in operation.outputs if _is_gradient(x, self.shapes)]
        return max(sum(x.num_bytes for x in each) for each in (read, made))


def _can_split(operation: Operation) -> bool:
    arrays = all(x.is_array for x in operation.outputs)
    return arrays and not operation.has_effects and exchanged_or_effect(operation) is None


def _is_gradient(value: Value, shapes: Collection[tuple[int, ...]]) -> bool:
    """Return whether a result of a `cond` may be the gradient of a weight, by its shape."""
    return value.is_array and value.shape in shapes and jnp.issubdtype(value.dtype, jnp.floating)


class _Cond:
    """A `cond` to be split.

    Attributes:
        blocks: the branches.
        operands: for each branch, the values that it reads as inputs.
        results: indices of the outputs that are read.
    """

    def __init__(self, operation: Operation):
        self.operation = operation
        self.blocks = branch_blocks(operation)
        self.operands = [list(operation.inputs[1:]) for _ in self.blocks]
        self.results = list(range(len(operation.outputs)))


def _without_saved(conds: Iterable[_Cond]) -> dict[Operation, list[Operation]]:
    """Let a branch read a weight itself, not the copy that an earlier `cond` returned.

    Differentiation makes two `cond`s of the same index, one for forward and one for backward. The
    first returns the values that backward reads. A weight among these would be held whole. So
    `operands` of the second is changed to the weight that the first reads.

    Args:
        conds: the `cond`s of a block, in program order.

    Returns:
        For each `cond` that needs any, the movable operations on weights to run before it.
    """
    saved: dict[tuple[Atom, int, Value], tuple[Atom, tuple[Op, ...]]] = {}
    added: dict[Operation, list[Operation]] = {}
    for cond in conds:
        index = cond.operation.inputs[0]
        for number, (block, operands) in enumerate(zip(cond.blocks, cond.operands, strict=True)):
            for i, x in enumerate(operands):
                if isinstance(x, Value) and (index, number, x) in saved:
                    operands[i], ops = saved[index, number, x]
                    if ops:
                        made, (operands[i],) = rewritten(
                            cond.operation, functools.partial(apply_all, ops), [operands[i]]
                        )
                        added.setdefault(cond.operation, []).extend(made)
            given = dict(zip(block.inputs, operands, strict=True))
            for out, x in zip(cond.operation.outputs, block.outputs, strict=True):
                if (passed := passed_on(block, x)) is not None and passed.value in given:
                    saved[index, number, out] = given[passed.value], passed.ops
    return added


def _drop_unread(
    block: Block, conds: Mapping[Operation, _Cond], added: Mapping[Operation, list[Operation]]
) -> None:
    """Drop from `conds` the results that nothing reads, and the operations that compute these.

    `added` has the operations to run before each `cond`.
    """
    live = {*block.outputs}
    for operation in reversed(block.operations):
        if operation not in conds:
            if operation.has_effects or not live.isdisjoint(operation.outputs):
                live.update(operation.inputs)
            continue
        cond = conds[operation]
        cond.results = [i for i, out in enumerate(operation.outputs) if out in live]
        for number, (branch, operands) in enumerate(zip(cond.blocks, cond.operands, strict=True)):
            outputs = tuple(branch.outputs[i] for i in cond.results)
            narrow = without_dead_code(dataclasses.replace(branch, outputs=outputs))
            read = {x for each in narrow.operations for x in each.inputs} | {*outputs}
            kept = [i for i, x in enumerate(branch.inputs) if x in read]
            cond.blocks[number] = dataclasses.replace(
                narrow, inputs=tuple(branch.inputs[i] for i in kept)
            )
            cond.operands[number] = [operands[i] for i in kept]
            live.update(cond.operands[number])
        live.add(operation.inputs[0])
        live.update(x for before in added.get(operation, ()) for x in before.inputs)


def _split(cond: _Cond, shapes: Collection[tuple[int, ...]]) -> list[Operation]:
    """Make the branches that replace a `cond`, and the other operations that these need.

    Results with one of the shapes `shapes` are taken for gradients of weights.
    """
    operation, index = cond.operation, cond.operation.inputs[0]
    outputs = [operation.outputs[i] for i in cond.results]
    emitted: list[Operation] = []

    def emit(function: Callable, *inputs: Atom) -> list[Atom]:
        operations, outputs = rewritten(operation, function, inputs)
        emitted.extend(operations)
        return outputs

    is_sum = [_is_gradient(out, shapes) for out in outputs]
    sums: list[list[Atom]] = [[] for _ in outputs]
    zeros = [emit(functools.partial(jnp.zeros, x.shape, x.dtype))[0] for x in outputs]
    latest = list(zeros)
    num = len(cond.blocks)
    for number, block in enumerate(cond.blocks):
        (taken,) = emit(functools.partial(_is_taken, number, num), index)
        made_in = enumerate(block.outputs)
        # A branch that does not use a weight adds nothing to its gradient.
        results = [i for i, x in made_in if not (is_sum[i] and is_zero(x, block.makers))]
        before = [zeros[i] if is_sum[i] else latest[i] for i in results]
        branch = _branch(cond, number, results, is_sum, [*before, taken])
        emitted.append(branch)
        for i, value in zip(results, branch.outputs, strict=False):
            if is_sum[i]:
                sums[i].append(value)
            else:
                latest[i] = value
    moved: dict[Atom, Value] = {}
    for i, out in enumerate(outputs):
        if len(sums[i]) > 1:
            (latest[i],) = emit(lambda *terms: functools.reduce(lax.add, terms), *sums[i])
        elif sums[i]:
            (latest[i],) = sums[i]
        moved[latest[i]] = out
    return [_renamed(x, moved) for x in emitted]


def _is_taken(number: int, num: int, index: Any) -> Any:
    """Return whether branch `number` of `num` runs. An index out of range runs the last."""
    if number < num - 1:
        return index == number
    return (index < 0) | (index >= number)


def _branch(
    cond: _Cond, number: int, results: list[int], is_sum: list[bool], carry: list[Atom]
) -> Branch:
    """Make a branch. It adds to results that are sums over branches, and replaces other results.

    Args:
        cond: the `cond`.
        number: the index of the branch.
        results: indices into `cond.results` of the results that the branch makes.
        is_sum: for each of `cond.results`, whether it is a sum over the branches.
        carry: for each of `results` its value before the branch; last, whether the branch runs.
    """
    operation, block, operands = cond.operation, cond.blocks[number], cond.operands[number]
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
        operands=tuple(dict.fromkeys(x for each in cond.operands for x in each)),
    )


def _renamed(operation: Operation, moved: dict[Atom, Value]) -> Operation:
    """Replace each value `x` in `moved` by `moved[x]`, as input and output of an operation."""
    outputs = tuple(moved.get(x, x) for x in operation.outputs)
    return dataclasses.replace(operation.reading(moved), outputs=outputs)
