"""The values of a program that are equal on all devices, by which all decide alike.

Literals, constants, counters of loops and replicated arguments are, and what deterministic
operations make of these. What comes from weights or the batch is not, nor what any operation makes
that is not listed here. A matrix product, for one: two hosts may run different kernels for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

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
    return _made_of(block, given, _is_uniform_constant, _is_deterministic)


def values_made_of(block: Block, given: Iterable[Value]) -> set[Atom]:
    """Find the values of a block that constants and the inputs `given` decide, and no other input.

    Of an operation such as a `cond`, every output counts as made of every input.
    """
    return _made_of(block, given, lambda constant: True, lambda operation: True)


def _made_of(
    block: Block,
    given: Iterable[Value],
    is_known: Callable[[Constant], bool],
    keeps: Callable[[Operation], bool],
) -> set[Atom]:
    """Find the values that operations for which `keeps` is true make of known values."""
    known: set[Atom] = {*given}
    read = functools.partial(_is_in, known, is_known)
    for operation in block.operations:
        inputs = [read(x) for x in operation.inputs]
        if isinstance(operation, Barrier):
            known.update(x for x, same in zip(operation.outputs, inputs, strict=True) if same)
        elif isinstance(operation, Loop):
            inside = functools.partial(_is_in, _in_body(operation, read, is_known, keeps), is_known)
            outputs = zip(operation.outputs, operation.body.outputs, strict=True)
            known.update(out for out, x in outputs if inside(x))
        elif all(inputs) and keeps(operation):
            known.update(operation.outputs)
    return known


def uniform_in_body(loop: Loop, uniform: set[Atom]) -> set[Atom]:
    """Find the values in the body of a loop that are equal on all devices, in each iteration.

    Args:
        loop: the loop, which runs equally often on all devices.
        uniform: the values outside of it that are.
    """
    read = functools.partial(_is_in, uniform, _is_uniform_constant)
    return _in_body(loop, read, _is_uniform_constant, _is_deterministic)


def _in_body(
    loop: Loop,
    read: Callable[[Atom], bool],
    is_known: Callable[[Constant], bool],
    keeps: Callable[[Operation], bool],
) -> set[Atom]:
    """`_made_of` for the body of a loop, in each iteration; `read` is whether an input is known."""
    first, body = loop.num_constants + loop.num_carry, loop.body
    given = {i for i, x in enumerate(loop.inputs) if read(x)}
    while True:
        inside = _made_of(body, [body.inputs[i] for i in given], is_known, keeps)
        lost = {
            i
            for i in given
            if loop.num_constants <= i < first
            and not _is_in(inside, is_known, body.outputs[i - loop.num_constants])
        }
        if not lost:
            return inside
        given -= lost


def _is_in(known: set[Atom], is_known: Callable[[Constant], bool], atom: Atom) -> bool:
    return is_known(atom) if isinstance(atom, Constant) else atom in known


def _is_uniform_constant(constant: Constant) -> bool:
    return not is_traced(constant.value)


def _is_deterministic(operation: Operation) -> bool:
    return is_elementwise(operation) or operation.name in _DETERMINISTIC
