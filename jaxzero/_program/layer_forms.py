"""The form of an operation for one layer, where it treats each layer of a stack by itself.

An operation on stacks `[layers, ...]` has such a form if element `i` of its output depends on
element `i` of each stack that it reads, and on inputs that all layers share:

    operation(stack, shared)[i] = form(stack[i], shared).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from . import movable_ops
from .elementwise import is_elementwise, shape_of
from .ir import Constant, Operation, is_split

REDUCTIONS = {*("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")}


class LayerForm(NamedTuple):
    """An operation for one layer.

    Attributes:
        sliced: for each input, whether it is a stack of layers; the others are read whole.
        apply: takes one layer of each stack, and the other inputs as they are; returns the layer of
            the output, or a list of those of several outputs.
    """

    sliced: tuple[bool, ...]
    apply: Callable[..., Any]


def layer_form(operation: Operation) -> LayerForm | None:
    """The form of `operation` for one layer of a stack along dim 0 of its outputs; None if none."""
    outputs, params = operation.outputs, operation.equation.params
    if not outputs or not all(out.is_array and out.shape for out in outputs):
        return None
    if is_split(params.get("sharding")) or is_split(params.get("out_sharding")):
        return None
    if operation.name == "reshard":
        unsplit = not is_split(params.get("dst_sharding"))
        return LayerForm((True,), lambda x: x) if unsplit else None
    if is_elementwise(operation):
        return _elementwise(operation)
    if operation.name == "broadcast_in_dim":
        return _broadcast(operation)
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
    """Split a reduction over layers and other dims in two; None for any other operation.

    Returns:
        The reduction of one layer, and that of the stack of its results over layers.
    """
    axes = operation.equation.params.get("axes", ())
    if operation.name not in REDUCTIONS or 0 not in axes or len(axes) < 2:
        return None
    return _bound(operation, axes=_less_one(x for x in axes if x)), _bound(operation, axes=(0,))


def _bound(operation: Operation, **changes: Any) -> Callable:
    """The primitive of an operation with some parameters changed, as a function of its inputs."""
    primitive = operation.equation.primitive
    params = {**operation.equation.params, **changes}
    return lambda *inputs: primitive.bind(*inputs, **params)


def _less_one(dims: Any) -> tuple[int, ...]:
    return tuple(int(dim) - 1 for dim in dims)


def _elementwise(operation: Operation) -> LayerForm | None:
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


def _broadcast(operation: Operation) -> LayerForm | None:
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
    """The form of an operation along one dim, such as a cumulative sum; `name` is its parameter."""
    dim = int(operation.equation.params[name])
    if dim == 0:
        return None
    return LayerForm((True,) * len(operation.inputs), _bound(operation, **{name: dim - 1}))


def _product(operation: Operation) -> LayerForm | None:
    """A matrix product with the layer as first batch dim, or of each layer with one matrix."""
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
    """A transpose, reshape, slice, padding or reversal within each layer."""
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
