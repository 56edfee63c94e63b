"""The values of a program that are equal on all devices, by which all decide alike.

Literals, constants, counters of loops and replicated arguments are, and what deterministic
operations make of these. What comes from weights or the batch is not, nor what any operation makes
that is not listed here. A matrix product, for one: two hosts may run different kernels for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .._mesh import is_traced
from .elementwise import is_elementwise
from .ir import Atom, Barrier, Block, Constant, Loop, Operation, Value

_DETERMINISTIC = {
    *("argmax", "argmin", "bitcast_convert_type", "broadcast_in_dim", "concatenate"),
    *("dynamic_slice", "expand_dims"),
    *("gather", "iota", "pad", "random_bits", "random_clone", "random_fold_in", "random_seed"),
    *("random_split", "random_unwrap", "random_wrap", "reduce_and", "reduce_max", "reduce_min"),
    *("reduce_or", "reshape", "rev", "select_n", "slice", "split", "squeeze", "threefry2x32"),
    *("transpose", "unstack"),
}


def uniform_values(block: Block, given: Iterable[Value]) -> set[Atom]:
    """Find the values of a block that are equal on all devices.

    Args:
        block: a program, or the body of a loop.
        given: its inputs that are.
    """
    uniform: set[Atom] = {*given}
    for operation in block.operations:
        inputs = [_is_uniform(x, uniform) for x in operation.inputs]
        if isinstance(operation, Barrier):
            uniform.update(x for x, same in zip(operation.outputs, inputs, strict=True) if same)
        elif isinstance(operation, Loop):
            inside = uniform_in_body(operation, uniform)
            outputs = zip(operation.outputs, operation.body.outputs, strict=True)
            uniform.update(out for out, x in outputs if _is_uniform(x, inside))
        elif all(inputs) and _is_deterministic(operation):
            uniform.update(operation.outputs)
    return uniform


def uniform_in_body(loop: Loop, uniform: set[Atom]) -> set[Atom]:
    """Find the values in the body of a loop that are equal on all devices, in each iteration.

    Args:
        loop: the loop, which runs equally often on all devices.
        uniform: the values outside of it that are.
    """
    first, body = loop.num_constants + loop.num_carry, loop.body
    given = {i for i, x in enumerate(loop.inputs) if _is_uniform(x, uniform)}
    while True:
        inside = uniform_values(body, [body.inputs[i] for i in given])
        lost = {
            i
            for i in given
            if loop.num_constants <= i < first
            and not _is_uniform(body.outputs[i - loop.num_constants], inside)
        }
        if not lost:
            return inside
        given -= lost


def _is_uniform(atom: Atom, uniform: set[Atom]) -> bool:
    return not is_traced(atom.value) if isinstance(atom, Constant) else atom in uniform


def _is_deterministic(operation: Operation) -> bool:
    return is_elementwise(operation) or operation.name in _DETERMINISTIC
