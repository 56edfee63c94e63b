"""The intermediate representation of a traced program: blocks of operations that can be re-bound.

`trace` makes blocks from functions; `per_device` and `layout_requests` handle what jaxprs contain
about meshes, `loop_order` orders them for CPUs, and `memory` has a primitive of its own. Only these
six modules know jaxprs, so a new JAX release affects only them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from .._mesh import in_host, is_traced, reduce_scatter
from .._mesh import simulated as simulate
from .._warnings import is_of_user
from .._xla_of_jax import COUNTERS_INDEX_HOST
from . import movable_ops

_ELEMENTWISE = {"neg", "reduce_precision"}
_LOCAL = {"axis_index", "pvary", "pcast"}  # they name an axis and send nothing
ADDITIONS = ("add", "add_any")  # of the user, and of differentiation
_EXCHANGES = {"all_gather", "reduce_scatter", "ppermute", "all_to_all"}


class Value:
    """An output of an operation, or an input of a block, with shape and dtype.

    Values compare by identity and carry no data.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, aval: Any):
        self.shape: tuple[int, ...] = getattr(aval, "shape", ())
        self.dtype: Any = None if is_ref(aval) else getattr(aval, "dtype", None)

    @property
    def is_array(self) -> bool:
        """Whether this is an ordinary array of numbers rather than a key, token or reference."""
        return isinstance(self.dtype, np.dtype) and self.dtype != jax.dtypes.float0

    @property
    def num_bytes(self) -> int:
        """The size of the full array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A value known while tracing."""

    value: Any

    @property
    def is_zero(self) -> bool:
        """Whether this is a scalar zero; False for a traced value, which is not known."""
        return (
            not is_traced(self.value) and np.ndim(self.value) == 0 and bool(np.all(self.value == 0))
        )


Atom = Value | Constant


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One application of a primitive."""

    name: str  # of the primitive
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    equation: Any  # the jaxpr equation it comes from, with the primitive's parameters
    caller: Any = dataclasses.field(default=None, kw_only=True)  # the call that it was inlined from

    @property
    def has_effects(self) -> bool:
        return bool(self.equation.effects)

    @property
    def uses_host_memory(self) -> bool:
        """Whether it reads or makes an array in host memory."""
        variables = [*self.equation.invars, *self.equation.outvars]
        spaces = {getattr(x.aval, "memory_space", None) for x in variables}
        return jax.memory.Space.Host in spaces

    def bind(self, inputs: Sequence[Any]) -> list[Any]:
        """Apply the primitive to arrays with the shapes and dtypes of `self.inputs`."""
        equation = self.equation
        if simulate.is_simulating():
            if self.name in _EXCHANGES:
                with scope(equation):
                    return [_exchange(self.name, inputs[0], equation.params)]
            _refuse_exchanges_inside(equation)
        if self.name == "reduce_scatter" and equation.params["axis_index_groups"] is None:
            with scope(equation):
                axes, dim = equation.params["axis_name"], equation.params["scatter_dimension"]
                return [reduce_scatter(inputs[0], axes, dim, tiled=equation.params["tiled"])]
        params = equation.primitive.get_bind_params(equation.params)
        args, params = params if isinstance(params, tuple) else ((), params)
        with scope(equation), equation.ctx.manager:
            out = equation.primitive.bind(*args, *inputs, **params)
        return list(out) if equation.primitive.multiple_results else [out]

    @property
    def source(self) -> Value | None:
        """The input that is not a constant; None unless there is exactly one."""
        values = [atom for atom in self.inputs if isinstance(atom, Value)]
        return values[0] if len(values) == 1 else None

    @property
    def products(self) -> int:
        """The number of multiplications of a matrix product; 0 for other operations."""
        if self.name != "dot_general":
            return 0
        (contracted, _), _ = self.equation.params["dimension_numbers"]
        left = self.equation.invars[0].aval.shape
        return math.prod(self.outputs[0].shape) * math.prod(left[dim] for dim in contracted)

    @property
    def where(self) -> str:
        """File, line and function, outside of JAX, that it comes from.

        JAX caches what a nested `jit` traces to, with the lines of the first call. So for an
        operation in one, it is the line that calls the outermost `jit`.
        """
        return source_info_util.summarize((self.caller or self.equation).source_info)

    @property
    def frames(self) -> list[tuple[str, int]]:
        """Files and lines of the Python calls that it was traced in, the innermost first.

        For an operation in a nested `jit` that was traced before, they are those of the `jit`.
        """
        inner = _frames(self.equation)
        outer = _frames(self.caller) if self.caller else inner
        called_at = next((x for x in outer if is_of_user(x[0])), None)
        return inner if called_at in inner else outer

    def view(self) -> movable_ops.Op | None:
        """This operation as an `Op` that can be moved past a gather; None if it cannot."""
        return _view(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Barrier(Operation):
    """An `optimization_barrier` on all inputs, from `jax.checkpoint`."""

    @property
    def has_effects(self) -> bool:
        return False

    def bind(self, inputs: Sequence[Any]) -> list[Any]:
        return list(jax.lax.optimization_barrier(tuple(inputs)))


@dataclasses.dataclass(frozen=True, eq=False)
class Loop(Operation):
    """A `lax.scan`. Its inputs are constants, carry and stacks; its outputs carry and stacks."""

    body: Block
    num_constants: int
    num_carry: int

    @property
    def length(self) -> int:
        return self.equation.params["length"]

    @property
    def products(self) -> int:
        """The number of multiplications of the matrix products of all iterations."""
        return self.length * sum(operation.products for operation in self.body.operations)

    @property
    def is_reversed(self) -> bool:
        """Whether it scans its stacks from the last element to the first."""
        return self.equation.params["reverse"]

    def scan(
        self, body: Callable, carry: Any, stacks: Any, length: int | None = None
    ) -> tuple[Any, Any]:
        """Run `lax.scan` with another body, but this loop's length, direction and unrolling.

        `length` is that of the stacks, if it is shorter than the loop's.
        """
        params, length = self.equation.params, length or self.length
        unroll = min(params["unroll"], length)
        if self.is_reversed and not COUNTERS_INDEX_HOST:
            body, stacks = _indexed(body, stacks, length)
        with scope(self.equation):
            return jax.lax.scan(body, carry, stacks, length, self.is_reversed, unroll)


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A list of operations in program order: a full program, or the body of a loop."""

    inputs: tuple[Value, ...]
    outputs: tuple[Atom, ...]
    operations: tuple[Operation, ...]


def _indexed(body: Callable, stacks: Any, length: int) -> tuple[Callable, Any]:
    """The body and stacks of a reversed loop, with stacks in host memory indexed by an array.

    XLA before JAX 0.12 reads and writes host memory forward in a reversed loop, without a word
    (seen with 0.10.2), where the index is a function of the loop's counter.
    """
    leaves, treedef = jax.tree.flatten(stacks)
    host = {i: x for i, x in enumerate(leaves) if in_host(x)}
    scanned = [None if i in host else x for i, x in enumerate(leaves)]

    def indexed(carry: Any, given: Any) -> tuple[Any, Any]:
        position, layers = given
        for i, x in host.items():
            layers[i] = jax.lax.dynamic_index_in_dim(x, position, 0, keepdims=False)
        carry, outputs = body(carry, jax.tree.unflatten(treedef, layers))
        if any(in_host(x) for x in jax.tree.leaves(outputs)):
            raise NotImplementedError(
                "A loop with `reverse=True` stacks arrays in host memory, which XLA before JAX "
                "0.12 writes in the wrong order. Take a newer JAX, or keep them on the device."
            )
        return carry, outputs

    return indexed, (jnp.arange(length), scanned)


def exchanged_or_effect(operation: Operation) -> str | None:
    """The name of a collective, or of an effect on the host, in an operation; None without one.

    `axis_index` is none: it tells a device where it is, and sends nothing.
    """
    for equation in _equations(operation.equation):
        name, params = equation.primitive.name, equation.params
        axes = params.get("axis_name", params.get("axes", ()))
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        if any(isinstance(axis, str) for axis in axes) and name not in _LOCAL:
            return name
        if any("Named" not in type(effect).__name__ for effect in equation.effects):
            return name
    return None


def _equations(equation: Any) -> Iterator[Any]:
    """An equation, and those of the jaxprs inside it."""
    yield equation
    for param in equation.params.values():
        for inner in param if isinstance(param, tuple | list) else (param,):
            for other in getattr(getattr(inner, "jaxpr", inner), "eqns", ()):
                yield from _equations(other)


def is_ref(aval: Any) -> bool:
    """Whether `aval` is the type of a mutable reference."""
    return hasattr(aval, "inner_aval")


def is_mutable(x: Any) -> bool:
    """Whether `x` is a mutable array (`jax.Ref`), traced or not."""
    return isinstance(x, jax.Ref) or (is_traced(x) and is_ref(jax.typeof(x)))


def _exchange(name: str, x: Any, params: dict[str, Any]) -> Any:
    """Run a collective of the user's program between simulated devices."""
    axes = params["axis_name"]
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    if params.get("axis_index_groups") is not None:
        raise NotImplementedError(
            f"`{name}` with `axis_index_groups` cannot be simulated. Use the mesh axes."
        )
    match name:
        case "all_gather":
            return simulate.gather_in_turn(x, axes, params["all_gather_dimension"], params["tiled"])
        case "reduce_scatter":
            return simulate.scatter_in_turn(x, axes, params["scatter_dimension"], params["tiled"])
        case "ppermute":
            return simulate.permute(x, axes, params["perm"])
    x = simulate.varying(x, axes)
    return jax.lax.all_to_all(x, axes, params["split_axis"], params["concat_axis"], tiled=True)


def _refuse_exchanges_inside(equation: Any) -> None:
    """Raise `NotImplementedError` for nested collectives that `vmap` computes wrongly."""
    for param in equation.params.values():
        for inner in param if isinstance(param, tuple | list) else (param,):
            for other in getattr(getattr(inner, "jaxpr", inner), "eqns", ()):
                name, axes = other.primitive.name, other.params.get("axis_name", ())
                if name == "all_to_all" or (name in _EXCHANGES and len(axes) > 1):
                    raise NotImplementedError(
                        f"`{name}` over {axes} inside `{equation.primitive.name}` cannot be "
                        "simulated. Call it outside, or `all_gather` over one axis at a time."
                    )
                _refuse_exchanges_inside(other)


def _frames(equation: Any) -> list[tuple[str, int]]:
    traceback = equation.source_info.traceback
    return [(x.file_name, x.line_num) for x in traceback.frames] if traceback else []


def scope(equation: Any) -> contextlib.AbstractContextManager:
    """Name operations as those of an equation."""
    name = str(equation.source_info.name_stack)
    return jax.named_scope(name) if name else contextlib.nullcontext()


def _view(operation: Operation) -> movable_ops.Op | None:
    """The `Op` of an operation that only moves, scales or rounds elements; None for any other."""
    source = operation.source
    if source is None or not source.is_array or not operation.outputs:
        return None
    out, params = operation.outputs[0], operation.equation.params
    if is_split(params.get("sharding")) or is_split(params.get("out_sharding")):
        return None
    match operation.name:
        case "convert_element_type":
            return movable_ops.ConvertDtype(out.dtype, _narrows(source.dtype, out.dtype))
        case "transpose":
            return movable_ops.Transpose(_ints(params["permutation"]))
        case "reshape" if params["dimensions"] is None:
            return movable_ops.Reshape(out.shape)
        case "squeeze" | "expand_dims":
            return movable_ops.Reshape(out.shape)
        case "broadcast_in_dim" if len(operation.inputs) == 1:
            return movable_ops.Broadcast(out.shape, _ints(params["broadcast_dimensions"]))
        case "slice":
            start, limit = _ints(params["start_indices"]), _ints(params["limit_indices"])
            return movable_ops.Slice(start, limit, _ints(params["strides"] or (1,) * len(start)))
        case "rev":
            return movable_ops.Reverse(_ints(params["dimensions"]))
        case "mul" | "div" if (factor := _factor(operation)) is not None:
            return movable_ops.Scale(factor, operation.name == "div")
        case "pad" if isinstance(operation.inputs[1], Constant) and operation.inputs[1].is_zero:
            config = tuple((int(a), int(b), int(c)) for a, b, c in params["padding_config"])
            return movable_ops.Pad(config)
        case name if name in _ELEMENTWISE:
            return movable_ops.Elementwise(operation)
    return None


def _factor(operation: Operation) -> float | None:
    """The constant that an array is multiplied with or divided by; None if it is not known."""
    if operation.name == "div" and not isinstance(operation.inputs[1], Constant):
        return None
    constants = [atom.value for atom in operation.inputs if isinstance(atom, Constant)]
    known = len(constants) == 1 and not is_traced(constants[0]) and np.ndim(constants[0]) == 0
    is_float = known and jax.numpy.issubdtype(operation.outputs[0].dtype, jax.numpy.floating)
    return float(constants[0]) if is_float else None


def is_split(sharding: Any) -> bool:
    """Whether a requested sharding splits any dim; one that only names a mesh does not."""
    return sharding is not None and any(entry is not None for entry in sharding.spec)


def _ints(sequence: Sequence[Any]) -> tuple[int, ...]:
    """Convert to Python ints, since rules of differentiation leave numpy integers in params."""
    return tuple(int(x) for x in sequence)


def _narrows(old: Any, new: Any) -> bool:
    both_floats = all(jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in (old, new))
    return both_floats and np.dtype(new).itemsize < np.dtype(old).itemsize
