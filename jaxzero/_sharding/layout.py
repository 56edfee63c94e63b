"""Which dim of which leaf is split over which devices: shapes in, layouts out.

A leaf of a parameter tree is split on one dim into equal pieces, one for each device
along `config.axes`. With `split="all"` these are `("local", "node")`, local major: a
gather over `node` then yields exactly the run of pieces that this device's node shares
out over `local`, and a gather over `local` completes it, in order, without shuffling.

The dim is the first of a matrix, the last two dims, that divides evenly and is long: pieces of
its rows lie in memory one after another, and need no transposing. Dims before, and short ones, may
count layers or experts: a leaf stacked over them is scanned over them, and they must stay whole for
that. So where a matrix has no such dim, the largest of all that divide is taken (the first of
equals). If none divides, the largest is padded with zeros: nothing but single numbers and empty
leaves falls back to replication.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._codecs import Codec
from .._mesh import AnyMesh
from .config import ZeroConfig

_LONG = 256  # large models have fewer layers, and at least as many features


@dataclasses.dataclass(frozen=True)
class DimSharding:
    """One dim of a full array, cut into equal pieces; zeros at its end make it a multiple.

    Attributes:
        dim: which.
        size: its true size.
        unit: what its stored size is a multiple of.
    """

    dim: int
    size: int
    unit: int

    @property
    def padded(self) -> int:
        """The stored size."""
        return math.ceil(self.size / self.unit) * self.unit

    @property
    def is_padded(self) -> bool:
        return self.padded != self.size

    def moved(self, dim: int) -> DimSharding:
        """The same cut where the dim has come to be at another position."""
        return dataclasses.replace(self, dim=dim)

    def pad_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`shape` with this dim at its padded size."""
        return (*shape[: self.dim], self.padded, *shape[self.dim + 1 :])


def layouts_by_preference(
    shape: tuple[int, ...], pieces: int, busy: tuple[int, ...] = ()
) -> list[DimSharding]:
    """Every way to cut `shape` into `pieces`, best first; empty if it stays whole.

    Args:
        shape: the full array's shape.
        pieces: how many devices share it.
        busy: for each dim, how many ways other mesh axes cut it already. Such a dim is
            taken only if there is no other. `()`: none is.
    """
    if pieces == 1 or math.prod(shape) <= 1:
        return []
    busy = busy or (1,) * len(shape)

    def rank(dim: int) -> tuple[bool, bool, bool, int, int]:
        uneven = shape[dim] % (pieces * busy[dim]) != 0
        is_long = not uneven and shape[dim] >= _LONG and dim >= len(shape) - 2
        return (busy[dim] > 1, uneven, not is_long, 0 if is_long else -shape[dim], dim)

    def layout(dim: int) -> DimSharding:
        return DimSharding(dim, shape[dim], pieces * busy[dim])

    return [layout(dim) for dim in sorted(range(len(shape)), key=rank)]


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One leaf of a tree: its own shape, and how it is cut (`layout` None: not at all)."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    layout: DimSharding | None
    other_axes: PartitionSpec = PartitionSpec()  # what the user split over axes not ours
    codec: Codec | None = None  # stored as messages, one for each device, and never trained

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """`shape`, with the zeros that make it divisible."""
        return self.layout.pad_shape(self.shape) if self.layout else self.shape

    @property
    def num_lead(self) -> int:
        """How many leading dims are encoded element by element, where messages are stored.

        A stack of matrices is encoded layer by layer, since it may be scanned.
        """
        stacked = self.layout is not None and len(self.shape) >= 3 and self.layout.dim != 0
        return 1 if stacked else 0

    @property
    def layer_size(self) -> int:
        """Elements of what is encoded by itself."""
        return math.prod(self.shape[self.num_lead :])

    def messages(self, codec: Codec, pieces: int) -> jax.ShapeDtypeStruct:
        """The messages of all `pieces`: `[*lead, pieces, numbers]`."""
        lead = self.num_lead
        message = codec.message(math.prod(self.padded_shape[lead:]) // pieces, self.dtype)
        shape = (*self.shape[:lead], pieces, *message.shape)
        return jax.ShapeDtypeStruct(shape, message.dtype)

    @property
    def is_plain(self) -> bool:
        """Whether the array is stored in its own shape and dtype, as a plain `jax.Array`."""
        return self.codec is None and not (self.layout and self.layout.is_padded)

    @property
    def stored(self) -> jax.ShapeDtypeStruct:
        """The global array: padded, or messages."""
        if self.codec is None or self.layout is None:
            return jax.ShapeDtypeStruct(self.padded_shape, self.dtype)
        return self.messages(self.codec, self.layout.unit)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the global array."""
        return self.stored.shape

    def spec(self, axes: tuple[str, ...], *, manual_only: bool = False) -> PartitionSpec:
        """The `PartitionSpec` of the global array; `manual_only` leaves other axes out."""
        if self.codec is not None:
            return PartitionSpec(*[None] * self.num_lead, axes or None)
        entries: list[Any] = [None] * len(self.shape)
        if not manual_only:
            entries[: len(self.other_axes)] = self.other_axes
        if self.layout and axes:
            old = entries[self.layout.dim]
            others = () if old is None else (old,) if isinstance(old, str) else tuple(old)
            entries[self.layout.dim] = (*axes, *others)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)


def layout_of_leaf(
    leaf: Any, mesh: AnyMesh, config: ZeroConfig, other: PartitionSpec
) -> DimSharding | None:
    """How an array of this shape and dtype is cut; None: every device holds all of it.

    Args:
        leaf: anything with the true `shape` and `dtype`.
        mesh: gives the number of pieces.
        config: gives axes, stage and the persistence threshold.
        other: the axes that split it already.
    """
    shape = tuple(leaf.shape)
    if config.stage == 0 or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return None
    if math.prod(shape) < config.param_persistence_threshold:
        return None
    busy = [1] * len(shape)
    for dim, entry in enumerate(other):
        if entry:
            names = (entry,) if isinstance(entry, str) else entry
            busy[dim] = math.prod(mesh.shape[name] for name in names)
    pieces = math.prod(mesh.shape[axis] for axis in config.axes)
    choices = layouts_by_preference(shape, pieces, tuple(busy))
    return choices[0] if choices else None
