"""Choose the dim that each leaf is split on: shapes in, layouts out; pad arrays to their layout.

A leaf of a parameter tree is split on one dim into equal shards, one for each device along
`config.axes`. With `split="all"` the axes are `("local", "node")`, local major. A gather over
`node` then yields a contiguous part of the array, the node slice, and a gather over `local`
completes it: the shards arrive in order, and nothing is shuffled.

The split dim is the first of the last two dims (those of a matrix) that divides evenly and is long:
shards of rows are contiguous in memory, and need no transposing. Earlier dims, and short ones, may
count layers or experts; a loop scans over them, so they must not be split. If neither of the last
two dims qualifies, the largest dim that divides is taken (the first of equals). If none divides,
the largest is padded with zeros. Only scalars and empty leaves are replicated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from .._codecs import Codec
from .._mesh import (
    AXES,
    LOCAL,
    MIN_FEATURES,
    STAGE,
    TOKENS,
    AnyMesh,
    axes_of_dims,
    weight_dim_of_tokens,
)
from .config import ZeroConfig


@dataclasses.dataclass(frozen=True)
class DimSharding:
    """The split of an array on one dim, padded with zeros to a multiple of `num_shards`.

    Attributes:
        dim: index of the split dim.
        size: the true size of the dim.
        num_shards: the number of shards of the dim, over all mesh axes that split it; the stored
            size is a multiple of it.
    """

    dim: int
    size: int
    num_shards: int

    @property
    def padded(self) -> int:
        """The stored size of the dim, with padding."""
        return math.ceil(self.size / self.num_shards) * self.num_shards

    @property
    def is_padded(self) -> bool:
        return self.padded != self.size

    def moved(self, dim: int) -> DimSharding:
        """Return this layout with the split dim at index `dim`, as after a transpose."""
        return self if dim == self.dim else dataclasses.replace(self, dim=dim)

    def pad_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return `shape` with this dim at its padded size."""
        return (*shape[: self.dim], self.padded, *shape[self.dim + 1 :])


def layouts_by_preference(
    shape: tuple[int, ...], num_shards: int, busy: tuple[int, ...] = ()
) -> list[DimSharding]:
    """Return all layouts that split `shape` into `num_shards`, best first; none if it is too small.

    Args:
        shape: the full array's shape.
        num_shards: number of devices that share the array.
        busy: for each dim, the number of parts into which other mesh axes split it. A dim with more
            than one part is taken only if there is no other dim. `()`: no dim is split.
    """
    if math.prod(shape) <= 1:
        return []
    busy = busy or (1,) * len(shape)

    def rank(dim: int) -> tuple[bool, bool, bool, int, int]:
        uneven = shape[dim] % (num_shards * busy[dim]) != 0
        is_long = not uneven and shape[dim] >= MIN_FEATURES and dim >= len(shape) - 2
        return (busy[dim] > 1, uneven, not is_long, 0 if is_long else -shape[dim], dim)

    def layout(dim: int) -> DimSharding:
        return DimSharding(dim, shape[dim], num_shards * busy[dim])

    return [layout(dim) for dim in sorted(range(len(shape)), key=rank)]


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """A leaf of a tree: its true shape and dtype, and the layout in which it is stored."""

    path: str
    shape: tuple[int, ...]  # true shape, without padding
    dtype: Any
    layout: DimSharding | None  # None if replicated
    # The split over further mesh axes, and over `local` of a leaf of `Ungathered`.
    other_axes: PartitionSpec = PartitionSpec()
    codec: Codec | None = None  # stored encoded, one message for each device; never trained
    memory_kind: str | None = None  # of the stored array: "pinned_host"; None for device memory
    stages: DimSharding | None = None  # the split over pipeline stages, of `other_axes`

    def split_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of `axes` that split the leaf by `layout`, which excludes `other_axes`."""
        others = axes_of(self.other_axes)
        return tuple(axis for axis in axes if axis not in others)

    def on_device(self, mesh: AnyMesh) -> LeafSpec:
        """Return the leaf as a program sees it: a device's part, if ungathered over `local`."""
        names = axes_of_dims(self.other_axes, len(self.shape))
        shape = (
            size // mesh.shape[LOCAL] if LOCAL in axes else size
            for size, axes in zip(self.shape, names, strict=True)
        )
        return dataclasses.replace(self, shape=tuple(shape))

    @property
    def padded_dims(self) -> tuple[DimSharding, ...]:
        """The splits that pad a dim with zeros, each of a different dim."""
        return tuple(x for x in (self.layout, self.stages) if x is not None and x.is_padded)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The leaf's shape, with the split dims at their padded sizes."""
        return functools.reduce(lambda shape, x: x.pad_shape(shape), self.padded_dims, self.shape)

    def pad(self, x: Shaped[Array, ...]) -> Shaped[Array, ...]:
        """Append the zeros of all padded dims to an array of the true shape."""
        return functools.reduce(pad, self.padded_dims, x)

    def unpad(self, x: Shaped[Array, ...]) -> Shaped[Array, ...]:
        """Drop the zeros that `pad` appended."""
        return functools.reduce(unpad, self.padded_dims, x)

    @property
    def num_lead(self) -> int:
        """How many leading dims (0 or 1) count layers that are encoded separately.

        A stack of matrices is encoded layer by layer, because a loop may scan it.
        """
        stacked = self.layout is not None and len(self.shape) >= 3 and self.layout.dim != 0
        return 1 if stacked else 0

    @property
    def layer_size(self) -> int:
        """Elements that are encoded together: one layer, or all of a leaf that is not a stack."""
        return math.prod(self.shape[self.num_lead :])

    def messages(self, codec: Codec, num_shards: int) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of the leaf as messages of `codec`: `[*lead, num_shards, m]`."""
        lead = self.num_lead
        size = math.prod(self.padded_shape[lead:]) // num_shards
        message = codec.message(size, self.dtype)
        shape = (*self.shape[:lead], num_shards, *message.shape)
        return jax.ShapeDtypeStruct(shape, message.dtype)

    @property
    def is_plain(self) -> bool:
        """Whether the array is stored in its own shape and dtype, as a plain `jax.Array`."""
        return self.codec is None and not self.padded_dims

    @property
    def stored(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the global array: padded, or encoded."""
        if self.codec is None or self.layout is None:
            return jax.ShapeDtypeStruct(self.padded_shape, self.dtype)
        return self.messages(self.codec, self.layout.num_shards)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the global array."""
        return self.stored.shape

    def shard_bytes(self, mesh: Mesh, axes: tuple[str, ...]) -> int:
        """Return the bytes of one device's shard of the stored array, split over `axes`."""
        shard = self.sharding(mesh, axes).shard_shape(self.stored_shape)
        return math.prod(shard) * self.stored.dtype.itemsize

    def sharding(self, mesh: Mesh, axes: tuple[str, ...]) -> NamedSharding:
        """Return the sharding of the stored array, split over `axes`, in its memory."""
        return NamedSharding(mesh, self.spec(axes), memory_kind=self.memory_kind)

    def spec(self, axes: tuple[str, ...], *, manual_only: bool = False) -> PartitionSpec:
        """Return the `PartitionSpec` of the stored array, split over `axes`.

        With `manual_only`, the spec omits further mesh axes (`other_axes`). The specs of a
        `shard_map` may name only the axes that it is manual over: `stage`, `node` and `local`. If
        no `axes` are given, as for weights below stage 3, the array is not split over `tokens`
        either.
        """
        if self.codec is not None:
            return PartitionSpec(*[None] * self.num_lead, axes or None)
        entries: list[Any] = [None] * len(self.shape)
        entries[: len(self.other_axes)] = [
            None
            if manual_only and entry not in (STAGE, LOCAL) or entry == TOKENS and not axes
            else entry
            for entry in self.other_axes
        ]
        axes = self.split_axes(axes)
        if self.layout and axes:
            others = axes_of_dims(PartitionSpec(*entries))[self.layout.dim]
            entries[self.layout.dim] = (*axes, *others)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)


def in_memory(leaf: LeafSpec, memory_kind: str | None, num_shards: int) -> LeafSpec:
    """Return the leaf with `memory_kind`.

    A leaf in host memory gets a layout even on one device, where other leaves have none. With a
    layout, the code that gathers shards fetches it where it is used.
    """
    layout = leaf.layout
    if memory_kind is not None and layout is None and num_shards == 1:
        layout = next(iter(layouts_by_preference(leaf.shape, 1)), None)
    return dataclasses.replace(leaf, layout=layout, memory_kind=memory_kind)


def layout_of_leaf(
    leaf: Any, mesh: AnyMesh, config: ZeroConfig, other: PartitionSpec
) -> DimSharding | None:
    """Choose the layout of an array; None if it is replicated.

    Args:
        leaf: anything with the true `shape` and `dtype`.
        mesh: gives the number of shards.
        config: gives axes, stage and the persistence threshold.
        other: the user's split of the array over further mesh axes.
    """
    shape = tuple(leaf.shape)
    if config.stage == 0 or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return None
    names = axes_of_dims(other, len(shape))
    is_ungathered = any(LOCAL in axes for axes in names)
    if math.prod(shape) < config.param_persistence_threshold and not is_ungathered:
        return None
    busy = tuple(math.prod(mesh.shape[name] for name in axes) for axes in names)
    num_shards = config.num_shards(mesh)
    # An ungathered leaf has a layout even on one node: its gradient is not reduced as others are.
    if is_ungathered:
        num_shards = math.prod(mesh.shape[axis] for axis in config.axes if axis != LOCAL)
    elif num_shards == 1:
        return None
    layouts = layouts_by_preference(shape, num_shards, busy)
    return next((x for x in layouts if {STAGE, LOCAL}.isdisjoint(names[x.dim])), None)


def split_over_tokens_axis(
    shape: tuple[int, ...], layout: DimSharding | None, mesh: AnyMesh
) -> PartitionSpec:
    """Return the split of an array over `tokens`, on another dim than that of its layout.

    Since the dims differ, a gather over `node` and `local` leaves the parts along `tokens` in
    order. Arrays without such a dim, as vectors and small matrices, are whole along the axis.
    """
    if layout is None or TOKENS not in mesh.shape:
        return PartitionSpec()
    dim = weight_dim_of_tokens(shape, layout.dim, mesh.shape[TOKENS])
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, TOKENS)


def split_over_stages(
    shape: tuple[int, ...], other: PartitionSpec, mesh: AnyMesh
) -> DimSharding | None:
    """Return the split of an array over pipeline stages; None if `other` names no stages.

    Args:
        shape: its true shape.
        other: its split over mesh axes other than `node` and `local`.
        mesh: gives the number of stages.
    """
    dims = enumerate(axes_of_dims(other))
    dim = next((dim for dim, axes in dims if STAGE in axes), None)
    return None if dim is None else DimSharding(dim, shape[dim], mesh.shape[STAGE])


def pad(x: Shaped[Array, ...], layout: DimSharding) -> Shaped[Array, ...]:
    """Append zeros to `layout.dim`, up to its stored size."""
    if not layout.is_padded:
        return x
    widths = [(0, 0)] * x.ndim
    widths[layout.dim] = (0, layout.padded - layout.size)
    return jnp.pad(x, widths)


def unpad(x: Shaped[Array, ...], layout: DimSharding) -> Shaped[Array, ...]:
    """Drop the zeros that `pad` appended."""
    return lax.slice_in_dim(x, 0, layout.size, axis=layout.dim) if layout.is_padded else x


def axes_of(spec: PartitionSpec) -> list[str]:
    """Return the mesh axes that a spec names."""
    return [axis for axes in axes_of_dims(spec) for axis in axes]


def split_dim(spec: PartitionSpec) -> int | None:
    """Return the dim that a spec splits over `node` or `local`; None if it splits none."""
    dims = enumerate(axes_of_dims(spec))
    return next((dim for dim, axes in dims if not set(AXES).isdisjoint(axes)), None)
