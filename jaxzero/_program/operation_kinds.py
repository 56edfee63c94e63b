"""Kinds of operations: elementwise ones, those on each layer of a stack, reductions, and sums.

Elementwise operations and reductions can run on any part of an array: on a device's shard, or on
one window of it.

[Note: layer forms] An operation on stacks `[layers, ...]` has a form for one layer if element `i`
of its output depends only on element `i` of each stack, and on values that all layers share:

    operation(stack, shared)[i] = form(stack[i], shared).

Differentiation sums the gradients of a loop's constants in values that the loop carries
(`carried_sums`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._mesh import EXCHANGES, equations_inside
from . import movable_ops
from .ir import (
    ADDITIONS,
    Atom,
    Constant,
    Loop,
    Operation,
    Value,
    is_matrix_product,
    is_split,
    scope,
)

# A list of names, because JAX does not mark elementwise primitives. An input may also be a scalar.
_ELEMENTWISE = {
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh"),
    *("cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "cos", "cosh"),
    *("digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge"),
    *("gt", "igamma", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log"),
    *("log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or"),
    *("one_minus_square", "population_count", "pow", "real", "reduce_precision", "rem", "round"),
    *("rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign"),
    *("sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
}
_RESHAPES = {"broadcast_in_dim", "expand_dims", "reshape", "squeeze"}
_FULL_REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "max",
    "reduce_and": "min",
}
_COSTLY = {
    *("cond", "conv_general_dilated", "fft", "gather", "pallas_call", "ragged_dot", "scan"),
    *("ragged_dot_general", "scatter", "scatter-add", "shard_map", "sort", "while"),
}
_DECOMPOSITIONS = {
    *("cholesky", "eig", "eigh", "hessenberg", "householder_product", "lu", "qr", "geqrf"),
    *("schur", "svd", "triangular_solve", "tridiagonal"),
}
_MOVES = {"device_put", "optimization_barrier", *EXCHANGES}
REDUCTIONS = {*("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")}


def is_elementwise(operation: Operation) -> bool:
    """Return whether each output element depends only on the input elements at its index."""
    return operation.name in _ELEMENTWISE


def may_be_copied(operation: Operation) -> bool:
    """Return whether an operation may run twice: no loop, barrier or collective, no effects."""
    is_plain = type(operation) is Operation  # subclasses do not compute their equation
    return is_plain and not (operation.has_effects or operation.name in _MOVES)


def is_costly(operation: Operation) -> bool:
    """Return whether an operation takes long enough for a collective to overlap with it.

    XLA writes the results of costly operations to memory anyway, so a barrier on these costs
    nothing. XLA fuses other operations with those around them. A product that sums nothing, or one
    factor of which has no dims of its own (the state of Mamba), is such an operation. A function
    with its own derivative (`jax.custom_jvp`) is one too, if nothing in it is costly.
    """
    if operation.name in ("custom_jvp_call", "custom_vjp_call"):
        return any(map(_is_costly, equations_inside(operation.equation)))
    return _is_costly(operation.equation)


def _is_costly(equation: Any) -> bool:
    if equation.primitive.name != "dot_general":
        return equation.primitive.name in _COSTLY
    return is_matrix_product(equation)


def multiplies_matrices(operation: Operation) -> bool:
    """Return whether an operation, or a loop's body, has products or decompositions of matrices."""
    return operation.name != "cond" and any(
        is_matrix_product(equation)
        if equation.primitive.name == "dot_general"
        else equation.primitive.name in _DECOMPOSITIONS
        for equation in equations_inside(operation.equation)
    )


def is_reshape(operation: Operation) -> bool:
    """Return whether the output has the elements of the only input, in the same order."""
    if operation.name not in _RESHAPES or len(operation.inputs) != 1:
        return False
    if operation.name == "reshape" and operation.equation.params["dimensions"] is not None:
        return False
    return math.prod(operation.outputs[0].shape) == math.prod(shape_of(operation.inputs[0]))


def is_broadcast(operation: Operation) -> bool:
    """Return whether an operation repeats the elements of its only input."""
    return operation.name == "broadcast_in_dim" and len(operation.inputs) == 1


def full_reduction(operation: Operation) -> str | None:
    """Return how an operation reduces all elements of its inputs to a scalar; None if it does not.

    Returns:
        "sum", "max", "min" (of booleans: "max" for any, "min" for all), or "dot" for the inner
        product of two vectors.
    """
    params = operation.equation.params
    if operation.name in _FULL_REDUCTIONS and operation.outputs[0].shape == ():
        return _FULL_REDUCTIONS[operation.name]
    if operation.name == "dot_general" and operation.outputs[0].shape == ():
        (left, right), _ = params["dimension_numbers"]
        return "dot" if len(left) == len(right) == 1 else None
    return None


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Return the shape of a value or a constant."""
    return atom.shape if isinstance(atom, Value) else np.shape(atom.value)


def dtype_of(atom: Atom) -> Any:
    """Return the dtype of a value or a constant."""
    return atom.dtype if isinstance(atom, Value) else jnp.result_type(atom.value)


class LayerForm(NamedTuple):
    """An operation on stacks, converted to one layer.

    Attributes:
        sliced: for each input, whether it is a stack of layers; other inputs are read whole.
        apply: takes one layer of each stack, and the other inputs as they are. It returns the layer
            of the output, or a list of layers if there are several outputs.
    """

    sliced: tuple[bool, ...]
    apply: Callable[..., Any]


def layer_form(operation: Operation) -> LayerForm | None:
    """Return the form of `operation` for one layer of its outputs (along dim 0); None if none."""
    outputs, params = operation.outputs, operation.equation.params
    if not outputs or not all(out.is_array and out.shape for out in outputs):
        return None
    # A requested sharding names an axis for each dim of the stack; a layer has one dim fewer.
    if is_split(params.get("sharding")) or is_split(params.get("out_sharding")):
        return None
    if operation.name == "reshard":
        unsplit = not is_split(params.get("dst_sharding"))
        return LayerForm((True,), lambda x: x) if unsplit else None
    if is_elementwise(operation):
        return _elementwise_form(operation)
    if operation.name == "broadcast_in_dim":
        return _broadcast_form(operation)
    if operation.name in REDUCTIONS:
        return _reduction(operation, params["axes"])
    if operation.name == "concatenate":
        return _along(operation, "dimension")
    if operation.name == "split":
        return _along(operation, "axis")
    if operation.name == "dot_general":
        return _product(operation)
    return _moved(operation)


def reduction_over_layers(operation: Operation) -> tuple[Callable, Callable] | None:
    """Split a reduction over layers and other dims into two functions; None for other operations.

    Returns:
        A function that reduces one layer; one that reduces the stack of its results over layers.
    """
    axes = operation.equation.params.get("axes", ())
    if operation.name not in REDUCTIONS or 0 not in axes or len(axes) < 2:
        return None
    return _bound(operation, axes=_less_one(x for x in axes if x)), _bound(operation, axes=(0,))


def _bound(operation: Operation, **changes: Any) -> Callable:
    """Return a function that applies the primitive of an operation with changed parameters."""
    primitive = operation.equation.primitive
    params = {**operation.equation.params, **changes}
    return lambda *inputs: primitive.bind(*inputs, **params)


def _less_one(dims: Any) -> tuple[int, ...]:
    return tuple(int(dim) - 1 for dim in dims)


def _elementwise_form(operation: Operation) -> LayerForm | None:
    shapes = [shape_of(atom) for atom in operation.inputs]
    out = operation.outputs[0].shape
    # An input of size 1 along a dim is repeated along it.
    if any(shape and len(shape) != len(out) for shape in shapes):
        return None
    sliced = tuple(bool(shape) and shape[0] == out[0] for shape in shapes)
    apply = _bound(operation)

    def of_layer(*inputs: Any) -> Any:
        pairs = zip(inputs, shapes, sliced, strict=True)
        return apply(
            *(lax.squeeze(x, (0,)) if shape and not is_stack else x for x, shape, is_stack in pairs)
        )

    return LayerForm(sliced, of_layer)


def _broadcast_form(operation: Operation) -> LayerForm | None:
    if len(operation.inputs) != 1:
        return None
    dims = tuple(map(int, operation.equation.params["broadcast_dimensions"]))
    (num, *shape), dtype = operation.outputs[0].shape, operation.outputs[0].dtype
    given = shape_of(operation.inputs[0])
    has_layers = bool(dims) and dims[0] == 0
    is_stack = has_layers and given[0] == num
    inner = _less_one(dims[1:] if has_layers else dims)

    def apply(x: Any) -> Any:
        x = jnp.asarray(x, dtype)
        if has_layers and not is_stack:
            x = lax.squeeze(x, (0,))
        return lax.broadcast_in_dim(x, shape, inner)

    return LayerForm((is_stack,), apply)


def _reduction(operation: Operation, axes: tuple[int, ...]) -> LayerForm | None:
    if 0 in axes or len(operation.inputs) != 1:
        return None
    return LayerForm((True,), _bound(operation, axes=_less_one(axes)))


def _along(operation: Operation, name: str) -> LayerForm | None:
    """Return the layer form of a `concatenate` or `split`, whose dim is the parameter `name`."""
    dim = int(operation.equation.params[name])
    if dim == 0:
        return None
    return LayerForm((True,) * len(operation.inputs), _bound(operation, **{name: dim - 1}))


def _product(operation: Operation) -> LayerForm | None:
    """Return the layer form of a product of two stacks, or of a stack and a matrix; or None."""
    (left, right), (left_batch, right_batch) = operation.equation.params["dimension_numbers"]
    left, left_batch = _less_one(left), _less_one(left_batch)
    if left_batch and left_batch[0] == -1 and right_batch[0] == 0:
        batch = left_batch[1:], _less_one(right_batch[1:])
        numbers = (left, _less_one(right)), batch
        return LayerForm((True, True), _bound(operation, dimension_numbers=numbers))
    if left_batch or -1 in left:
        return None
    numbers = (left, tuple(map(int, right))), ((), ())
    return LayerForm((True, False), _bound(operation, dimension_numbers=numbers))


def _moved(operation: Operation) -> LayerForm | None:
    """Return the layer form of a transpose, reshape, slice, padding or reversal, or None."""
    op = operation.view()
    others = operation.inputs[1:]
    if op is None or isinstance(op, movable_ops.Elementwise) or not operation.source:
        return None
    if operation.inputs[0] is not operation.source:
        return None
    if not all(isinstance(atom, Constant) for atom in others):
        return None
    of_layer = op.of_slice(operation.source.shape)
    if of_layer is None:
        return None
    return LayerForm((True, *(False for _ in others)), lambda x, *_: of_layer.apply(x))


@dataclasses.dataclass(frozen=True)
class CarriedSum:
    """A sum that a loop carries: each iteration only adds terms to it."""

    before: Value  # the sum before an iteration: an input of the body
    additions: tuple[int, ...]  # operations of the body
    terms: tuple[Value, ...]  # what they add


def carried_sums(loop: Loop, starts: Callable[[Atom], bool]) -> dict[int, CarriedSum]:
    """Return the sums that a loop carries, by index of the output.

    Args:
        loop: the loop.
        starts: returns whether a sum may start from a value outside of the loop, such as zero.
    """
    body, sums = loop.body, {}
    readers: dict[Atom, list[int]] = {atom: [] for atom in (*body.inputs, *body.outputs)}
    for index, operation in enumerate(body.operations):
        for atom in operation.inputs:
            readers.setdefault(atom, []).append(index)
    num_outputs = Counter(body.outputs)
    first, computed = loop.num_constants, {x for op in body.operations for x in op.outputs}
    for position in range(loop.num_carry):
        before, out = body.inputs[first + position], body.outputs[position]
        additions, terms, value = [], [], before
        while value is not out and len(readers[value]) == 1 and not num_outputs[value]:
            operation = body.operations[readers[value][0]]
            others = [x for x in addends(operation) if x is not value]
            if len(others) != 1 or others[0] not in computed:
                break
            additions.append(readers[value][0])
            terms += others
            value = operation.outputs[0]
            readers.setdefault(value, [])
        alone = all(len(readers[x]) == 1 and not num_outputs[x] for x in terms)
        is_sum = value is out and not readers[value] and num_outputs[value] == 1
        if terms and is_sum and alone and starts(loop.inputs[first + position]):
            sums[position] = CarriedSum(before, tuple(additions), tuple(terms))
    return sums


def addends(operation: Operation) -> list[Value]:
    """Return the inputs of an addition of two arrays of equal shape; `[]` for other operations."""
    if operation.name not in ADDITIONS:
        return []
    arrays = operation.values
    alike = len(arrays) == 2 and arrays[0].shape == arrays[1].shape
    return arrays if alike else []


def is_zero(atom: Atom, makers: Mapping[Value, Operation]) -> bool:
    """Return whether an atom is the constant 0, or an array of zeros that one of `makers` makes."""
    if isinstance(atom, Constant):
        return atom.is_zero
    return atom in makers and makes_zeros(makers[atom])


def makes_zeros(operation: Operation) -> bool:
    """Return whether an operation is a broadcast of the constant 0."""
    if operation.name != "broadcast_in_dim":
        return False
    source = operation.inputs[0]
    return isinstance(source, Constant) and source.is_zero


@dataclasses.dataclass(frozen=True, eq=False)
class Fork(Operation):
    """A `cond` in which devices may take different branches."""


@dataclasses.dataclass(frozen=True, eq=False)
class Branch(Loop):
    """A branch of a `cond`: a loop that runs once or not at all, and scans nothing.

    The carry is the branch's results, followed by a boolean: whether the branch runs. A branch that
    does not run returns the carry that it is given.
    """

    operands: tuple[Atom, ...] = ()  # what any branch of the `cond` reads

    @property
    def length(self) -> int:
        return 1

    @property
    def is_reversed(self) -> bool:
        return False

    def scan(
        self, body: Callable, carry: Any, stacks: Any, length: int | None = 1
    ) -> tuple[Any, Any]:
        """Run the body once if the last carried value is true. The body must return no stacks."""
        assert length == 1
        layers, stacked = jax.tree.map(lambda x: x[0], stacks), None

        def run(carry: Any) -> Any:
            nonlocal stacked
            results, stacked = body(carry, layers)
            assert not jax.tree.leaves(stacked)
            # A result may be a Python scalar, whose type is weaker.
            return jax.tree.map(lambda x, y: lax.convert_element_type(x, y.dtype), results, carry)

        with scope(self.equation):
            return lax.cond(carry[-1], run, lambda carry: carry, carry), stacked
