"""Find the input that a block only passes on as one of its outputs, perhaps moved or cast."""

from __future__ import annotations

from typing import NamedTuple

from .ir import Atom, Barrier, Block, Loop, Operation, Value
from .movable_ops import Op


class Passed(NamedTuple):
    """A value of a block, and movable operations on it."""

    value: Value
    ops: tuple[Op, ...] = ()


def passed_on(block: Block, out: Atom) -> Passed | None:
    """The input that `out`, a value of a block, is made of by movable operations alone.

    A loop passes on a stack if its body passes on each layer of it.
    """
    makers: dict[Value, Operation] = {x: op for op in block.operations for x in op.outputs}
    ops: tuple[Op, ...] = ()
    while isinstance(out, Value) and out in makers:
        operation = makers[out]
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
    """The stack that a loop scans and passes on, layer by layer, as output `number`."""
    passed = passed_on(loop.body, loop.body.outputs[number])
    if number < loop.num_carry or passed is None:
        return None
    position = loop.body.inputs.index(passed.value)
    outside = loop.inputs[position]
    if position < loop.num_constants + loop.num_carry or not isinstance(outside, Value):
        return None
    return Passed(outside, tuple(op.of_stack(loop.length) for op in passed.ops))
