"""Choose the layout of each leaf, the dim on which it is split; pad arrays to their layout.

A leaf of a parameter tree is split on one dim into equal shards, one for each device along
`config.axes`. With `split="all"` the axes are `("local", "node")`, local major. A gather over
`node` then yields a contiguous part of the array, the node slice, and a gather over `local`
completes it: the shards arrive in order, and nothing is shuffled.

The split dim is the first of the last two dims (those of a matrix) that is long and that the
devices divide evenly: shards of rows are contiguous in memory, and need no transposing. Earlier
dims, and short ones, may count layers or experts; a loop scans over them, so they must not be
split. If neither of the last two dims qualifies, the largest dim that the devices divide is taken
(the first of equals). If they divide none, the largest is padded with zeros. Leaves of at most one
element are replicated, and so are those below `config.param_persistence_threshold`.
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
    """Return a layout for each dim that may be split into `num_shards` shards, the best first.

    An array of at most one element has none.

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
    """An array of a tree: its true shape and dtype, and the layout in which it is stored.

    Attributes:
        path: its path in the tree, as text.
        shape: the true shape, without padding.
        dtype: the true dtype.
        layout: the split over `config.axes`; None if it is replicated over them.
        other_axes: the split over further mesh axes, and over `local` if it is `Ungathered`.
        codec: the codec in which it is stored, one message for each device; it is then not
            trained. None: it is stored unencoded.
        memory_kind: "pinned_host" if the stored array is there; None for device memory.
        stages: the split over pipeline stages, which `other_axes` contains too; None: no split.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    layout: DimSharding | None
    other_axes: PartitionSpec = PartitionSpec()
    codec: Codec | None = None
    memory_kind: str | None = None
    stages: DimSharding | None = None

    def split_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return which of `axes` split the leaf by `layout`: those that are not in `other_axes`."""
        others = axes_of(self.other_axes)
        return tuple(axis for axis in axes if axis not in others)

    def on_device(self, mesh: AnyMesh) -> LeafSpec:
        """Return the leaf with the shape that a step's loss sees on a device.

        A dim that stays split over `local` (`Ungathered`) has the size of a device's part.
        """
        names = axes_of_dims(self.other_axes, len(self.shape))
        shape = (
            size // mesh.shape[LOCAL] if LOCAL in axes else size
            for size, axes in zip(self.shape, names, strict=True)
        )
        return dataclasses.replace(self, shape=tuple(shape))

    @property
    def padded_dims(self) -> tuple[DimSharding, ...]:
        """The splits, over `config.axes` and over stages, that pad their dim with zeros."""
        return tuple(x for x in (self.layout, self.stages) if x is not None and x.is_padded)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The leaf's shape, with the split dims at their padded sizes."""
        return functools.reduce(lambda shape, x: x.pad_shape(shape), self.padded_dims, self.shape)

    def pad(self, x: Shaped[Array, ...]) -> Shaped[Array, ...]:
        """Pad an array of the true shape with zeros, in all padded dims."""
        return functools.reduce(pad, self.padded_dims, x)

    def unpad(self, x: Shaped[Array, ...]) -> Shaped[Array, ...]:
        """Drop the zeros that `pad` appended."""
        return functools.reduce(unpad, self.padded_dims, x)

    @property
    def num_lead(self) -> int:
        """Number of leading dims, 0 or 1, whose entries are encoded separately.

        It is 1 for a stack of matrices, whose dim 0 counts layers: a loop may scan it.
        """
        stacked = self.layout is not None and len(self.shape) >= 3 and self.layout.dim != 0
        return 1 if stacked else 0

    @property
    def layer_size(self) -> int:
        """Number of elements that are encoded together: of a layer of a stack, or of the leaf."""
        return math.prod(self.shape[self.num_lead :])

    def messages(self, codec: Codec, num_shards: int) -> jax.ShapeDtypeStruct:
        """Return the struct of the leaf as messages: `[*lead, num_shards, *shape of a message]`."""
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
        """Shape and dtype of the global array that is stored: padded, or encoded."""
        if self.codec is None or self.layout is None:
            return jax.ShapeDtypeStruct(self.padded_shape, self.dtype)
        return self.messages(self.codec, self.layout.num_shards)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the global array that is stored."""
        return self.stored.shape

    def shard_bytes(self, mesh: Mesh, axes: tuple[str, ...]) -> int:
        """Return the bytes of one device's shard of the stored array, split over `axes`."""
        shard = self.sharding(mesh, axes).shard_shape(self.stored_shape)
        return math.prod(shard) * self.stored.dtype.itemsize

    def sharding(self, mesh: Mesh, axes: tuple[str, ...]) -> NamedSharding:
        """Return the sharding of the stored array, split over `axes`, with its kind of memory."""
        return NamedSharding(mesh, self.spec(axes), memory_kind=self.memory_kind)

    def spec(self, axes: tuple[str, ...], *, manual_only: bool = False) -> PartitionSpec:
        """Return the `PartitionSpec` of the stored array, split over `axes`.

        If `axes` is empty, as for weights below stage 3, the array is not split over `tokens`
        either.

        With `manual_only`, the spec names no axes but `stage`, `node` and `local`. Only these may
        be in the specs of a `shard_map` that is manual over them.
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
    """Return the leaf with its array stored in `memory_kind`; None: device memory.

    A leaf in host memory gets a layout even on one device, where leaves in device memory have none.
    Then the code that gathers shards also fetches this leaf from the host where it is used.
    """
    layout = leaf.layout
    if memory_kind is not None and layout is None and num_shards == 1:
        layout = next(iter(layouts_by_preference(leaf.shape, 1)), None)
    return dataclasses.replace(leaf, layout=layout, memory_kind=memory_kind)


def layout_of_leaf(
    leaf: Any, mesh: AnyMesh, config: ZeroConfig, other: PartitionSpec
) -> DimSharding | None:
    """Return the split of an array over the config's axes; None if it is replicated.

    Args:
        leaf: anything with the true `shape` and `dtype`.
        mesh: gives the number of shards.
        config: gives axes, stage and the persistence threshold.
        other: the split of the array over other mesh axes, and over `local` if `Ungathered`.
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
    """Return the split of an array over mesh axis `tokens`, along another dim than the layout's.

    Since the dims differ, a gather over `node` and `local` leaves the parts along `tokens` in
    order. An array without a second dim to split, such as a vector, is not split over `tokens`.
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
        shape: the true shape of the array.
        other: the split of the array over mesh axes other than `node` and `local`.
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
