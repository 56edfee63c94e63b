"""Find the values of a program that are equal on all devices, and integers known while tracing.

Some integers are known while tracing, whatever the batch is: counters of loops, and integers that
are computed from counters. A counter is a stack that a loop scans (`jnp.arange`), or a value that
it carries (as `lax.fori_loop` does). Its value in each iteration is found by running the integer
operations of the body, and no others, in NumPy.

A value that is equal on all devices is *uniform*. Literals, constants, counters of loops and
replicated arguments are uniform, and so are results of deterministic operations on uniform values:
devices that branch by them take the same branch. Values that depend on weights or the batch are not
uniform. Nor are results of an operation that is not listed here, such as a matrix product: two
hosts may run different kernels for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._mesh import STAGE, is_traced
from .ir import Atom, Barrier, Block, Constant, Loop, Operation, Value
from .operation_kinds import is_elementwise

Known = dict[Value, np.ndarray]

# Integers are computed by numpy while a step is traced, which must stay quick: up to so many
# elements of an array, and iterations of a loop, nested ones included. Indices of layers are few.
_MAX_SIZE = 2**12
_MAX_ITERATIONS = 2**10
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "sub": np.subtract,
}
_RESHAPES = {"expand_dims", "reshape", "squeeze"}
_DETERMINISTIC = {
    *("argmax", "argmin", "bitcast_convert_type", "broadcast_in_dim", "concatenate"),
    *("dynamic_slice", "expand_dims"),
    *("gather", "iota", "pad", "random_bits", "random_clone", "random_fold_in", "random_seed"),
    *("random_split", "random_unwrap", "random_wrap", "reduce_and", "reduce_max", "reduce_min"),
    *("reduce_or", "reshape", "rev", "select_n", "slice", "split", "squeeze", "threefry2x32"),
    *("transpose", "unstack"),
}


def known_integers(block: Block, given: Mapping[Value, np.ndarray]) -> Known:
    """Compute the integers and booleans of a block that follow from constants and known inputs.

    The indices at which layers of a stack are read are such integers, equal on all devices.

    Args:
        block: a program, or the body of a loop.
        given: the inputs of the block that are known.

    Returns:
        Integers and booleans, by the inputs of the block and the outputs of its operations.
    """
    return _run(given, [x for x in block.operations if _makes_integers(x)], _MAX_ITERATIONS)


def known_in_body(
    loop: Loop, known: Mapping[Value, np.ndarray], most: int = _MAX_ITERATIONS
) -> Known:
    """Find the known integers in the body of a loop.

    Args:
        loop: the loop.
        known: the known integers outside of the loop.
        most: nothing is found in a loop of more iterations, or of none.

    Returns:
        For each known integer its values in all iterations, `[length, *shape]`. They are in the
        order of the stacks that the loop scans; a reversed loop runs through these from the end.
    """
    if not 0 < loop.length <= most:
        return {}
    outside = [_value(x, known) for x in loop.inputs]
    first = loop.first_stack
    operations = [x for x in loop.body.operations if _makes_integers(x)]
    carried = [i for i in range(loop.num_constants, first) if outside[i] is not None]
    while True:
        found, unknown = _iterations(loop, outside, carried, operations, most)
        if not unknown:
            return found
        carried = [i for i in carried if i not in unknown]


def unchanged_in_body(loop: Loop, known: Mapping[Value, np.ndarray]) -> Known:
    """Return the known inputs of a loop's body that keep one value in all iterations."""
    inside = known_in_body(loop, known)
    inputs = ((x, inside[x]) for x in loop.body.inputs if x in inside)
    return {
        x: values[0, ...] for x, values in inputs if len(values) and (values == values[0]).all()
    }


def _iterations(
    loop: Loop,
    outside: Sequence[np.ndarray | None],
    carried: Sequence[int],
    operations: Sequence[Operation],
    most: int,
) -> tuple[Known, set[int]]:
    """Run a loop's iterations on known integers, assuming that the inputs `carried` stay known.

    Returns:
        The values that are known in all iterations; and the inputs of `carried` that do not stay
        known. If there are any of these, the first result is empty.
    """
    body, first = loop.body, loop.first_stack
    constants = {x: outside[i] for i, x in enumerate(body.inputs[: loop.num_constants])}
    carry = {body.inputs[i]: outside[i] for i in carried}
    by_iteration: list[Known] = []
    for iteration in range(loop.length):
        position = loop.length - 1 - iteration if loop.is_reversed else iteration
        stacks = zip(body.inputs[first:], outside[first:], strict=True)
        layers = {x: stack[position, ...] for x, stack in stacks if stack is not None}
        given = {x: array for x, array in (constants | carry).items() if array is not None}
        values = _run(given | layers, operations, most // loop.length)
        after = {i: _value(body.outputs[i - loop.num_constants], values) for i in carried}
        if unknown := {i for i, array in after.items() if array is None}:
            return {}, unknown
        carry = {body.inputs[i]: array for i, array in after.items()}
        by_iteration.append(values)
    if loop.is_reversed:
        by_iteration.reverse()
    everywhere = [x for x in by_iteration[0] if all(x in known for known in by_iteration)]
    return {x: np.stack([known[x] for known in by_iteration]) for x in everywhere}, set()


def _run(given: Mapping[Value, np.ndarray], operations: Sequence[Operation], most: int) -> Known:
    """Run the operations whose inputs are known, in NumPy; return all known values."""
    values = {**given}
    for operation in operations:
        if isinstance(operation, Loop):
            inside = known_in_body(operation, values, most)
            stacked = range(operation.num_carry, len(operation.outputs))
            for i in stacked:
                out = operation.body.outputs[i]
                if isinstance(out, Value) and out in inside:
                    values[operation.outputs[i]] = inside[out]
            continue
        inputs = [_value(x, values) for x in operation.inputs]
        if isinstance(operation, Barrier):
            pairs = zip(operation.outputs, inputs, strict=True)
            values |= {out: array for out, array in pairs if array is not None}
        elif (array := _computed(operation, inputs)) is not None:
            values[operation.outputs[0]] = array
    return values


def _makes_integers(operation: Operation) -> bool:
    """Return whether an operation may have known integers as outputs."""
    if isinstance(operation, Loop):
        return any(map(_is_small, operation.outputs[operation.num_carry :]))
    if isinstance(operation, Barrier):
        return any(map(_is_small, operation.outputs))
    return len(operation.outputs) == 1 and _is_small(operation.outputs[0])


def _is_small(value: Value) -> bool:
    return value.is_array and value.dtype.kind in "biu" and math.prod(value.shape) <= _MAX_SIZE


def small_integers(constant: Constant) -> np.ndarray | None:
    """Return the array of a constant; None if it is traced, large, or not of integers."""
    x = constant.value
    if is_traced(x) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    if np.size(x) > _MAX_SIZE or not isinstance(getattr(x, "dtype", np.dtype(int)), np.dtype):
        return None  # a random key has a dtype of its own
    array = np.asarray(x)
    return array if array.dtype.kind in "biu" else None


def _value(atom: Atom, known: Mapping[Value, np.ndarray]) -> np.ndarray | None:
    return small_integers(atom) if isinstance(atom, Constant) else known.get(atom)


def _computed(operation: Operation, inputs: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Compute an operation on integers in NumPy; None if unsupported or an input is unknown."""
    (out,), name, params = operation.outputs, operation.name, operation.equation.params
    if any(x is None for x in inputs):
        return None
    arrays = [x for x in inputs if x is not None]
    if name == "iota":
        dim = params["dimension"]
        shape = [size if i == dim else 1 for i, size in enumerate(out.shape)]
        array = np.broadcast_to(np.arange(out.shape[dim]).reshape(shape), out.shape)
    elif name == "select_n" and len(arrays) == 3 and arrays[0].dtype == bool:
        array = np.where(*(arrays[i] for i in (0, 2, 1)))
    elif name == "convert_element_type":
        array = arrays[0]
    elif name == "broadcast_in_dim" and len(arrays) == 1:
        dims = params["broadcast_dimensions"]
        shape = [1] * len(out.shape)
        for dim, size in zip(dims, arrays[0].shape, strict=True):
            shape[dim] = size
        array = np.broadcast_to(arrays[0].reshape(shape), out.shape)
    elif name in _RESHAPES and len(arrays) == 1:
        (array,) = arrays
        if (order := params.get("dimensions")) is not None and name == "reshape":
            array = array.transpose(order)  # as `jnp.reshape(order="F")` asks of the primitive
        array = array.reshape(out.shape)
    elif name == "rev":
        array = np.flip(arrays[0], params["dimensions"])
    elif name == "slice":
        steps = params["strides"] or (1,) * len(out.shape)
        bounds = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
        array = arrays[0][tuple(slice(*bound) for bound in bounds)]
    elif name in _ELEMENTWISE:
        with np.errstate(over="ignore"):  # integers wrap around
            array = _ELEMENTWISE[name](*arrays)
    else:
        return None
    return np.asarray(array, out.dtype)  # NumPy makes scalars of arrays without dims


def uniform_values(block: Block, given: Iterable[Value]) -> set[Atom]:
    """Find the values of a block that are equal on all devices.

    Args:
        block: a program, or the body of a loop.
        given: the inputs of the block that are equal on all devices.
    """
    return _made_of(block, given, _UNIFORM)


def values_made_of(block: Block, given: Iterable[Value]) -> set[Atom]:
    """Find the values of a block that depend only on constants and on the inputs `given`.

    Every output of an operation counts as depending on all its inputs, also for a `cond`.
    """
    return _made_of(block, given, _Rule(lambda constant: True, lambda operation: True))


class _Rule(NamedTuple):
    """A rule for what counts as known: some constants, and the results of some operations.

    A constant is known if `constant` accepts it. The results of an operation are known if
    `operation` accepts it and all its inputs are known.
    """

    constant: Callable[[Constant], bool]
    operation: Callable[[Operation], bool]

    def knows(self, known: set[Atom], atom: Atom) -> bool:
        """Return whether an atom is a constant that counts as known, or is in `known`."""
        return self.constant(atom) if isinstance(atom, Constant) else atom in known


def _is_deterministic(operation: Operation) -> bool:
    if operation.name == "axis_index":  # all devices of a stage take the same branch
        axes = operation.equation.params["axis_name"]
        return axes in (STAGE, (STAGE,))
    return is_elementwise(operation) or operation.name in _DETERMINISTIC


_UNIFORM = _Rule(lambda constant: not is_traced(constant.value), _is_deterministic)


def _made_of(block: Block, given: Iterable[Value], rule: _Rule) -> set[Atom]:
    """Return the values of a block that are known by `rule` once the inputs `given` are known."""
    uniform: set[Atom] = {*given}
    for operation in block.operations:
        inputs = [rule.knows(uniform, x) for x in operation.inputs]
        if isinstance(operation, Barrier):
            uniform.update(x for x, same in zip(operation.outputs, inputs, strict=True) if same)
        elif isinstance(operation, Loop):
            inside = _in_body(operation, uniform, rule)
            outputs = zip(operation.outputs, operation.body.outputs, strict=True)
            uniform.update(out for out, x in outputs if rule.knows(inside, x))
        elif all(inputs) and rule.operation(operation):
            uniform.update(operation.outputs)
    return uniform


def uniform_in_body(loop: Loop, uniform: set[Atom]) -> set[Atom]:
    """Find the values in the body of a loop that are equal on all devices, in each iteration.

    Args:
        loop: the loop, which runs equally often on all devices.
        uniform: the values outside of the loop that are equal on all devices.
    """
    return _in_body(loop, uniform, _UNIFORM)


def _in_body(loop: Loop, known: set[Atom], rule: _Rule) -> set[Atom]:
    """Find the values in a loop's body that `rule` knows in each iteration; see `_made_of`.

    `known` are the known values outside of the loop.
    """
    body = loop.body
    given = {i for i, x in enumerate(loop.inputs) if rule.knows(known, x)}
    while True:
        inside = _made_of(body, [body.inputs[i] for i in given], rule)
        carried = {i for i in given if loop.num_constants <= i < loop.first_stack}
        after = {i: body.outputs[i - loop.num_constants] for i in carried}
        lost = {i for i, out in after.items() if not rule.knows(inside, out)}
        if not lost:
            return inside
        given -= lost
