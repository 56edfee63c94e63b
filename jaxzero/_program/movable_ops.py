"""Cheap one-input operations, as data, that can be moved past a gather or a reduction.

A weight that is cast, transposed, reshaped or sliced is not needed in full yet. The analysis keeps
it as its shard and the list of these operations (a `View`). A gradient can also be reduced before
these operations, which then run on its shard. For this, an operation has five methods. `through`
returns the layout of its output, given that of its input; `back` does the reverse. `on_shard`
returns the same operation for a shard. `of_slice` returns it for one layer of a stack, as values
pass into `lax.scan`. `of_stack` returns it for a stack of layers, as values pass out of `lax.scan`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import dtypes, lax
from jaxtyping import Array, Shaped

from .._sharding import DimSharding

Shape = tuple[int, ...]


class Op(abc.ABC):
    """One operation of a view. In its methods, `shape` is the full shape of its input."""

    narrows = False  # whether its output has fewer bytes to send than its input

    @abc.abstractmethod
    def apply(self, x: Shaped[Array, ...]) -> Shaped[Array, ...]:
        """Apply the operation to an array."""

    def out_shape(self, shape: Shape) -> Shape:
        return shape

    def through(self, layout: DimSharding, shape: Shape) -> DimSharding | None:
        """Return the layout of the output, given `layout` of an input of full shape `shape`.

        Return None if the operation cannot run on shards with this layout.
        """
        return layout

    def back(self, layout: DimSharding, shape: Shape) -> DimSharding | None:
        """Return the input's layout for which the output has `layout`; None if there is none."""
        for dim, size in enumerate(shape):
            if size == layout.size and self.through(layout.moved(dim), shape) == layout:
                return layout.moved(dim)
        return None

    def on_shard(self, layout: DimSharding, local: int, shape: Shape) -> Op:
        """Return this operation for a shard with `local` elements along the split dim."""
        return self

    def of_slice(self, shape: Shape) -> Op | None:
        """Return the operation `f` for one layer, such that `f(x[i])` is `self.apply(x)[i]`.

        Return None if this operation does not treat dim 0 of its input as a stack of layers.
        """
        return self

    def of_stack(self, num: int) -> Op:
        """Return the operation that applies this one to each of `num` arrays, stacked on dim 0."""
        return self


@dataclasses.dataclass(frozen=True)
class ConvertDtype(Op):
    """The primitive `convert_element_type`, a cast."""

    dtype: Any
    narrows: bool

    def apply(self, x):
        with _with_types_of(self.dtype):
            return x.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Elementwise(Op):
    """An elementwise operation (`neg`, `reduce_precision`), applied by binding it again."""

    operation: Any  # a `_program.Operation`

    def apply(self, x):
        return self.operation.bind([x])[0]


@dataclasses.dataclass(frozen=True)
class Scale(Op):
    """Multiplication with, or division by, a constant scalar."""

    factor: float
    divides: bool

    def apply(self, x):
        with _with_types_of(x.dtype):
            factor = jnp.asarray(self.factor, x.dtype)
            return x / factor if self.divides else x * factor


@dataclasses.dataclass(frozen=True)
class Reverse(Op):
    """The primitive `rev`, which reverses the order of elements along `dims`."""

    dims: tuple[int, ...]

    def apply(self, x):
        return lax.rev(x, self.dims)

    def through(self, layout, shape):
        return None if layout.dim in self.dims else layout

    def of_slice(self, shape):
        return None if 0 in self.dims else Reverse(tuple(dim - 1 for dim in self.dims))

    def of_stack(self, num):
        return Reverse(tuple(dim + 1 for dim in self.dims))


@dataclasses.dataclass(frozen=True)
class Transpose(Op):
    """The primitive `transpose`."""

    permutation: tuple[int, ...]

    def apply(self, x):
        return lax.transpose(x, self.permutation)

    def out_shape(self, shape):
        return tuple(shape[dim] for dim in self.permutation)

    def through(self, layout, shape):
        return layout.moved(self.permutation.index(layout.dim))

    def of_slice(self, shape):
        if self.permutation[0] != 0:
            return None
        return Transpose(tuple(dim - 1 for dim in self.permutation[1:]))

    def of_stack(self, num):
        return Transpose((0, *(dim + 1 for dim in self.permutation)))


@dataclasses.dataclass(frozen=True)
class Reshape(Op):
    """The primitives `reshape`, `squeeze` and `expand_dims`; `shape` is that of the output."""

    shape: Shape

    def apply(self, x):
        return lax.reshape(x, self.shape)

    def out_shape(self, shape):
        return self.shape

    def through(self, layout, shape):
        before = math.prod(shape[: layout.dim])
        for dim, size in enumerate(self.shape):
            if size == layout.size and math.prod(self.shape[:dim]) == before:
                return layout.moved(dim)
        return None

    def on_shard(self, layout, local, shape):
        out = self.through(layout, shape)
        assert out is not None
        return Reshape((*self.shape[: out.dim], local, *self.shape[out.dim + 1 :]))

    def of_slice(self, shape):
        if not shape or not self.shape or shape[0] != self.shape[0]:
            return None
        return Reshape(self.shape[1:])

    def of_stack(self, num):
        return Reshape((num, *self.shape))


@dataclasses.dataclass(frozen=True)
class Broadcast(Op):
    """The primitive `broadcast_in_dim`: input dim `i` becomes output dim `dims[i]`."""

    shape: Shape
    dims: tuple[int, ...]

    def apply(self, x):
        return lax.broadcast_in_dim(x, self.shape, self.dims)

    def out_shape(self, shape):
        return self.shape

    def through(self, layout, shape):
        dim = self.dims[layout.dim]
        return layout.moved(dim) if self.shape[dim] == layout.size else None

    def back(self, layout, shape):
        # A gradient may be reduced before a broadcast only if that repeats no values.
        if math.prod(shape) != math.prod(self.shape):
            return None
        return super().back(layout, shape)

    def on_shard(self, layout, local, shape):
        dim = self.dims[layout.dim]
        return Broadcast((*self.shape[:dim], local, *self.shape[dim + 1 :]), self.dims)

    def of_slice(self, shape):
        if not self.dims or self.dims[0] != 0 or self.shape[0] != shape[0]:
            return None
        return Broadcast(self.shape[1:], tuple(dim - 1 for dim in self.dims[1:]))

    def of_stack(self, num):
        return Broadcast((num, *self.shape), (0, *(dim + 1 for dim in self.dims)))


@dataclasses.dataclass(frozen=True)
class Slice(Op):
    """The primitive `slice`, whose bounds are known."""

    start: tuple[int, ...]
    limit: tuple[int, ...]
    strides: tuple[int, ...]
    narrows = True

    def apply(self, x):
        return lax.slice(x, self.start, self.limit, self.strides)

    def out_shape(self, shape):
        bounds = zip(self.start, self.limit, self.strides, strict=True)
        return tuple(len(range(*bound)) for bound in bounds)

    def _keeps(self, dim: int, shape: Shape) -> bool:
        return (self.start[dim], self.limit[dim], self.strides[dim]) == (0, shape[dim], 1)

    def through(self, layout, shape):
        return layout if self._keeps(layout.dim, shape) else None

    def on_shard(self, layout, local, shape):
        limit = (*self.limit[: layout.dim], local, *self.limit[layout.dim + 1 :])
        return dataclasses.replace(self, limit=limit)

    def of_slice(self, shape):
        if not self._keeps(0, shape):
            return None
        return Slice(self.start[1:], self.limit[1:], self.strides[1:])

    def of_stack(self, num):
        return Slice((0, *self.start), (num, *self.limit), (1, *self.strides))


@dataclasses.dataclass(frozen=True)
class Pad(Op):
    """The primitive `pad` with zeros, as in the gradient of a slice."""

    config: tuple[tuple[int, int, int], ...]

    def apply(self, x):
        return lax.pad(x, jnp.zeros((), x.dtype), self.config)

    def out_shape(self, shape):
        return tuple(
            low + high + size + max(size - 1, 0) * interior
            for (low, high, interior), size in zip(self.config, shape, strict=True)
        )

    def through(self, layout, shape):
        return layout if self.config[layout.dim] == (0, 0, 0) else None

    def of_slice(self, shape):
        return Pad(self.config[1:]) if self.config[0] == (0, 0, 0) else None

    def of_stack(self, num):
        return Pad(((0, 0, 0), *self.config))


def _with_types_of(dtype: Any) -> contextlib.AbstractContextManager:
    """Return a context in which JAX has `dtype`.

    An operation that was traced under a `jax.enable_x64` of the user's function is applied outside
    of it, where JAX would make 32 bits of float64.
    """
    is_wide = jnp.issubdtype(dtype, jnp.number) and dtypes.canonicalize_dtype(dtype) != dtype
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


def push(
    ops: tuple[Op, ...], layout: DimSharding, shape: Shape
) -> tuple[DimSharding, Shape] | None:
    """Return the layout and full shape after `ops`; None if one of them cannot run on shards."""
    for op in ops:
        moved = op.through(layout, shape)
        if moved is None:
            return None
        layout, shape = moved, op.out_shape(shape)
    return layout, shape


def apply_all(ops: tuple[Op, ...], x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """Apply `ops`, one after the other."""
    for op in ops:
        x = op.apply(x)
    return x


def apply_on_shard(
    ops: tuple[Op, ...], shard: Shaped[Array, ...], layout: DimSharding, shape: Shape
) -> Shaped[Array, ...]:
    """Apply `ops` to one device's shard of an array that has `layout` and full shape `shape`."""
    for op in ops:
        local = shard.shape[layout.dim]
        shard = op.on_shard(layout, local, shape).apply(shard)
        moved = op.through(layout, shape)
        assert moved is not None
        layout, shape = moved, op.out_shape(shape)
    return shard


def casts_first(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Move narrowing casts in front of operations that only move elements, such as slices.

    This does not change the result, and the moved-past operations then run on fewer bytes. From the
    first operation that computes (elementwise, a scaling or a widening cast) on, the order stays.
    """
    moved: list[Op] = []
    rest: list[Op] = []
    for i, op in enumerate(ops):
        if isinstance(op, (Elementwise, Scale)) or (
            isinstance(op, ConvertDtype) and not op.narrows
        ):
            rest += ops[i:]
            break
        (moved if isinstance(op, ConvertDtype) else rest).append(op)
    return (*moved, *rest)


def before_gather(
    ops: tuple[Op, ...], layout: DimSharding, shape: Shape
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Split a view's operations into those to run on the shard and those to run after the gather.

    Only the leading operations that can run on a shard are candidates for the first part. The first
    part ends with the last candidate that reduces the bytes to send.
    """
    ops = casts_first(ops)
    cut = 0
    for i, op in enumerate(ops):
        moved = op.through(layout, shape)
        if moved is None:
            break
        layout, shape = moved, op.out_shape(shape)
        if op.narrows:
            cut = i + 1
    return ops[:cut], ops[cut:]


def up_to_last_slice(ops: tuple[Op, ...]) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Split a view's operations after the last `Slice`, the only kind that drops elements."""
    cut = max((i + 1 for i, op in enumerate(ops) if isinstance(op, Slice)), default=0)
    return ops[:cut], ops[cut:]
