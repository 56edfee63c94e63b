"""The intermediate representation of a traced program: blocks of operations that run on arrays.

`trace` makes blocks from functions, `layout_requests` handles what jaxprs contain about meshes, and
`frozen_part` runs jaxprs. In `_mesh`, `per_device` reads and evaluates jaxprs, `loop_order` orders
them for CPUs, and `emission` copies their equations. `tests/test_rooms.py` lists the few others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from .._mesh import (
    EXCHANGES,
    NAMING_ONLY,
    bind,
    equations_inside,
    exchange_in_turn,
    in_host,
    is_simulating,
    is_traced,
    reduce_scatter,
    refuse_exchanges_inside,
)
from .._warnings import is_of_user
from .._xla_of_jax import COUNTERS_INDEX_HOST
from . import movable_ops
from .multiplications import multiplications

_ELEMENTWISE = {"neg", "reduce_precision"}
ADDITIONS = ("add", "add_any")  # of the user, and of differentiation


class Value:
    """An output of an operation, or an input of a block, with shape and dtype.

    Values compare by identity and carry no data.
    """

    __slots__ = ("dtype", "is_array", "shape")

    def __init__(self, aval: Any):
        self.shape: tuple[int, ...] = getattr(aval, "shape", ())
        self.dtype: Any = None if is_ref(aval) else getattr(aval, "dtype", None)
        # Whether this is an ordinary array of numbers rather than a key, token or reference.
        self.is_array: bool = isinstance(self.dtype, np.dtype) and self.dtype != jax.dtypes.float0

    @property
    def num_bytes(self) -> int:
        """The size of the full array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An input of an operation that is known while tracing, such as a number."""

    value: Any

    @property
    def is_zero(self) -> bool:
        """Whether this is a scalar zero. A traced value is not known, and gives False."""
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
        """Whether the operation reads or makes an array in host memory."""
        variables = [*self.equation.invars, *self.equation.outvars]
        spaces = {getattr(x.aval, "memory_space", None) for x in variables}
        return jax.memory.Space.Host in spaces

    @property
    def outputs_in_host(self) -> list[Value]:
        """The outputs that are in host memory."""
        made = zip(self.outputs, self.equation.outvars, strict=True)
        return [x for x, out in made if out.aval.memory_space == jax.memory.Space.Host]

    def bind(self, inputs: Sequence[Any]) -> list[Any]:
        """Apply the primitive to arrays with the shapes and dtypes of `self.inputs`."""
        equation = self.equation
        if is_simulating():
            if self.name in EXCHANGES:
                with scope(equation):
                    return [exchange_in_turn(self.name, inputs[0], equation.params)]
            refuse_exchanges_inside(equation)
        # The user's own `psum_scatter` too: with several CPU processes it goes by the workaround.
        if self.name == "reduce_scatter" and equation.params["axis_index_groups"] is None:
            with scope(equation):
                axes, dim = equation.params["axis_name"], equation.params["scatter_dimension"]
                return [reduce_scatter(inputs[0], axes, dim, tiled=equation.params["tiled"])]
        with scope(equation):
            return bind(equation, inputs)

    def reading(self, others: Mapping[Any, Atom]) -> Operation:
        """Return this operation with each input `x` that is in `others` replaced by `others[x]`."""
        if others.keys().isdisjoint(self.inputs):
            return self
        return dataclasses.replace(self, inputs=tuple(others.get(x, x) for x in self.inputs))

    @functools.cached_property
    def values(self) -> list[Value]:
        """The inputs that are not constants."""
        return [atom for atom in self.inputs if isinstance(atom, Value)]

    @property
    def source(self) -> Value | None:
        """The input that is not a constant; None unless there is exactly one."""
        return self.values[0] if len(self.values) == 1 else None

    @functools.cached_property
    def products(self) -> int:
        """The number of multiplications; 0 if this is no matrix product and no convolution."""
        return multiplications(self.equation)

    @property
    def where(self) -> str:
        """File, line and function, outside of JAX, that the operation comes from.

        In a nested `jit` it is the line that calls the outer `jit`, as JAX caches inner lines.
        """
        callers = (x.source_info for x in (self.caller, self.equation) if x is not None)
        return next(filter(None, map(source_info_util.summarize, callers)), "")

    @property
    def frames(self) -> list[tuple[str, int]]:
        """Files and lines of the Python calls in which the operation was traced, innermost first.

        In a nested `jit` that was traced before, they are the calls that led to the `jit`.
        """
        inner = _frames(self.equation)
        outer = _frames(self.caller) if self.caller else inner
        called_at = next((x for x in outer if is_of_user(x[0])), None)
        return inner if called_at in inner else outer

    def view(self) -> movable_ops.Op | None:
        """Return this operation as an `Op` that can be moved past a gather; None if it cannot."""
        return self._op

    @functools.cached_property
    def _op(self) -> movable_ops.Op | None:
        return _view(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Barrier(Operation):
    """An `optimization_barrier` on the inputs of what a `jax.checkpoint` computes again."""

    @property
    def has_effects(self) -> bool:
        return False

    def bind(self, inputs: Sequence[Any]) -> list[Any]:
        return list(jax.lax.optimization_barrier(tuple(inputs)))


@dataclasses.dataclass(frozen=True, eq=False)
class Loop(Operation):
    """A `lax.scan`. Inputs are constants, carry and stacks; outputs are carry and stacks."""

    body: Block
    num_constants: int
    num_carry: int

    @property
    def length(self) -> int:
        return self.equation.params["length"]

    @property
    def first_stack(self) -> int:
        """The index of the first stack among the inputs."""
        return self.num_constants + self.num_carry

    @property
    def stacks(self) -> list[tuple[Atom, Value]]:
        """Each stack that the loop scans, with the input of the body that is a layer of it."""
        first = self.first_stack
        return list(zip(self.inputs[first:], self.body.inputs[first:], strict=True))

    @property
    def products(self) -> int:
        """The number of multiplications in the matrix products of all iterations."""
        return self.length * sum(operation.products for operation in self.body.operations)

    @property
    def is_reversed(self) -> bool:
        """Whether the loop scans its stacks from the last element to the first."""
        return self.equation.params["reverse"]

    def scan(
        self, body: Callable, carry: Any, stacks: Any, length: int | None = None
    ) -> tuple[Any, Any]:
        """Run `lax.scan` over `body` with the direction and unrolling of this loop.

        `length` is the length of the stacks if it is shorter than the loop.
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

    @functools.cached_property
    def makers(self) -> dict[Any, Operation]:
        """The operation that makes each value, by value."""
        return {x: operation for operation in self.operations for x in operation.outputs}

    @functools.cached_property
    def positions(self) -> dict[Any, int]:
        """The index of the operation that makes each value, by value."""
        return {x: i for i, operation in enumerate(self.operations) for x in operation.outputs}


def _indexed(body: Callable, stacks: Any, length: int) -> tuple[Callable, Any]:
    """Return the body and stacks of a reversed loop, changed to read host memory in reverse.

    The new body indexes stacks in host memory by a scanned array of positions. By the loop's
    counter, XLA before JAX 0.12 silently reads and writes them forward (seen with 0.10.2).
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
    """Return the name of the first collective or host effect in an operation; None without one.

    `axis_index` is no collective: it tells a device where it is, and sends nothing.
    """
    for equation in equations_inside(operation.equation):
        if _has_effects(equation) or _exchanged_axes(equation):
            return equation.primitive.name
    return None


def has_host_effect(operation: Operation) -> bool:
    """Return whether an operation has an effect on the host, such as a print."""
    return _has_effects(operation.equation)


def _has_effects(equation: Any) -> bool:
    return any("Named" not in type(effect).__name__ for effect in equation.effects)


def is_matrix_product(equation: Any) -> bool:
    """Return whether a `dot_general` multiplies matrices, not vectors, and sums over a dim."""
    summed, batch = equation.params["dimension_numbers"]
    shapes = [x.aval.shape for x in equation.invars]
    sizes = [math.prod(shapes[0][i] for i in summed[0])]
    for shape, dims in zip(shapes, zip(summed, batch, strict=True), strict=True):
        sizes.append(math.prod(n for i, n in enumerate(shape) if i not in (*dims[0], *dims[1])))
    return min(sizes) > 1


def exchanges(operation: Operation) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each collective in an operation: its name, and the mesh axes over which it runs."""
    for equation in equations_inside(operation.equation):
        if axes := _exchanged_axes(equation):
            yield equation.primitive.name, axes


def _exchanged_axes(equation: Any) -> tuple[str, ...]:
    """Return the mesh axes over which a collective runs; `()` for other equations."""
    if equation.primitive.name in NAMING_ONLY:
        return ()
    axes = equation.params.get("axis_name", equation.params.get("axes", ()))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def is_ref(aval: Any) -> bool:
    """Return whether `aval` is the type of a mutable reference."""
    return hasattr(aval, "inner_aval")


def is_mutable(x: Any) -> bool:
    """Return whether `x` is a mutable array (`jax.Ref`), traced or not."""
    return isinstance(x, jax.Ref) or (is_traced(x) and is_ref(jax.typeof(x)))


def _frames(equation: Any) -> list[tuple[str, int]]:
    traceback = equation.source_info.traceback
    return [(x.file_name, x.line_num) for x in traceback.frames] if traceback else []


def scope(equation: Any) -> contextlib.AbstractContextManager:
    """Open a context in which new operations get the name scopes of an equation."""
    name = str(equation.source_info.name_stack)
    return jax.named_scope(name) if name else contextlib.nullcontext()


def _view(operation: Operation) -> movable_ops.Op | None:
    """Return the `Op` of an operation that only moves, scales or rounds elements, or None."""
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
    """Return the scalar by which an operation multiplies or divides an array; None if unknown."""
    if operation.name == "div" and not isinstance(operation.inputs[1], Constant):
        return None
    constants = [atom.value for atom in operation.inputs if isinstance(atom, Constant)]
    known = len(constants) == 1 and not is_traced(constants[0]) and np.ndim(constants[0]) == 0
    is_float = known and jax.numpy.issubdtype(operation.outputs[0].dtype, jax.numpy.floating)
    return float(constants[0]) if is_float else None


def is_split(sharding: Any) -> bool:
    """Return whether a requested sharding splits any dim, and does not only name a mesh."""
    return sharding is not None and any(entry is not None for entry in sharding.spec)


def _ints(sequence: Sequence[Any]) -> tuple[int, ...]:
    """Convert to Python ints, since rules of differentiation leave numpy integers in params."""
    return tuple(int(x) for x in sequence)


def _narrows(old: Any, new: Any) -> bool:
    both_floats = all(jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in (old, new))
    return both_floats and np.dtype(new).itemsize < np.dtype(old).itemsize
