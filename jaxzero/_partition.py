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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._codecs import Codec
from ._config import ZeroConfig
from ._simulate import AnyMesh

_LONG = 256  # large models have fewer layers, and at least as many features


@dataclasses.dataclass(frozen=True)
class Layout:
    """One dim of a full array, cut into equal pieces; zeros at its end make it a multiple.

    Attributes:
        dim: which.
        size: its true size.
        unit: what its stored size is a multiple of.
        extra: units more than are needed (see `_registry`).
    """

    dim: int
    size: int
    unit: int
    extra: int = 0

    @property
    def padded(self) -> int:
        """The stored size."""
        return (math.ceil(self.size / self.unit) + self.extra) * self.unit

    @property
    def is_padded(self) -> bool:
        return self.padded != self.size

    def moved(self, dim: int) -> Layout:
        """The same cut where the dim has come to be at another position."""
        return dataclasses.replace(self, dim=dim)

    def pad_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`shape` with this dim at its padded size."""
        return (*shape[: self.dim], self.padded, *shape[self.dim + 1 :])


def layouts_by_preference(
    shape: tuple[int, ...], pieces: int, busy: tuple[int, ...] = ()
) -> list[Layout]:
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

    def layout(dim: int) -> Layout:
        return Layout(dim, shape[dim], pieces * busy[dim])

    return [layout(dim) for dim in sorted(range(len(shape)), key=rank)]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a tree: its own shape, and how it is cut (`layout` None: not at all)."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    layout: Layout | None
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
        row = jax.ShapeDtypeStruct((math.prod(self.padded_shape[lead:]) // pieces,), self.dtype)
        message = jax.eval_shape(codec.encode, row)
        shape = (*self.shape[:lead], pieces, *message.shape)
        return jax.ShapeDtypeStruct(shape, message.dtype)

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


@dataclasses.dataclass(frozen=True)
class TreePlan:
    """How every leaf of one tree is stored."""

    treedef: Any
    leaves: tuple[Leaf, ...]

    @property
    def stored_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(leaf.stored_shape for leaf in self.leaves)

    def shardings(self, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        """The tree of `NamedSharding`s of the global arrays, split over `axes`."""
        specs = [NamedSharding(mesh, leaf.spec(axes)) for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, specs)


def plan_tree(
    tree: Any, mesh: AnyMesh, config: ZeroConfig, specs: Any = None, codec: Codec | None = None
) -> TreePlan:
    """Lay out a tree of arrays or `ShapeDtypeStruct`s of true shapes.

    Args:
        tree: the leaves need `shape` and `dtype`.
        mesh: gives the number of pieces.
        config: gives axes, stage and the persistence threshold.
        specs: a tree prefix of `PartitionSpec`s over mesh axes that are not ours.
        codec: store float leaves of at least `min_quantized_size` elements as its messages.

    Raises:
        ValueError: a leaf is not an array, or `specs` names one of our axes; a codec is given
            where parameters are not split.
    """
    if codec is not None and (not isinstance(codec, Codec) or config.stage < 3):
        raise ValueError(
            f"`codec` must be a codec such as `jz.Int8()`, at ZeRO stage 3; got {codec!r} at "
            f"stage {config.stage}."
        )
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    others = _broadcast_specs(specs, tree, config)
    leaves = []
    for (path, leaf), other in zip(paths_and_leaves, others, strict=True):
        name = path_name(path)
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(
                f"The leaf `{name}` is not an array; got {type(leaf).__name__}. Keep functions "
                "and settings out of the tree (`nnx.split`, `equinox.partition`)."
            )
        layout = _layout_of_leaf(leaf, mesh, config, other)
        new = Leaf(name, tuple(leaf.shape), _jax_dtype(leaf.dtype), layout, other)
        if codec is not None and layout and not other and _is_large_float(new, config):
            new = dataclasses.replace(new, codec=codec)
        leaves.append(new)
    return TreePlan(treedef, tuple(leaves))


def _is_large_float(leaf: Leaf, config: ZeroConfig) -> bool:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return is_float and math.prod(leaf.shape) >= max(config.min_quantized_size, 1)


def _jax_dtype(dtype: Any) -> Any:
    """What JAX makes of a dtype: without x64, 32 bits of 64."""
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return dtype if extended else jax.dtypes.canonicalize_dtype(dtype)


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as a person writes it: `layers.0.kernel`; the root is `.`."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "."


def spread_prefix(prefix: Any, tree: Any, kind: type) -> list[Any]:
    """For each leaf of `tree`, the leaf of a tree prefix that stands for it.

    Args:
        prefix: its leaves are of type `kind`.
        tree: what it is a prefix of.
        kind: of the prefix's leaves, even where JAX would take them apart.

    Raises:
        ValueError: it is no prefix of `tree`.
    """

    def is_leaf(x: Any) -> bool:
        return isinstance(x, kind)

    spread = jax.tree.map(
        lambda leaf, subtree: jax.tree.map(lambda _: leaf, subtree), prefix, tree, is_leaf=is_leaf
    )
    return jax.tree.leaves(spread, is_leaf=is_leaf)


def _broadcast_specs(specs: Any, tree: Any, config: ZeroConfig) -> list[PartitionSpec]:
    if specs is None:
        return [PartitionSpec()] * len(jax.tree.leaves(tree))
    flat = spread_prefix(specs, tree, PartitionSpec)
    for spec in flat:
        if any(axis in config.axes or axis in ("node", "local") for axis in axes_of(spec)):
            raise ValueError(
                f"`specs` may name only mesh axes other than `node` and `local`; got {spec}. "
                "Those two are laid out by `Zero`."
            )
    return flat


def axes_of(spec: PartitionSpec) -> list[str]:
    """The mesh axes that a spec names."""
    entries = [(entry,) if isinstance(entry, str) else entry for entry in spec if entry]
    return [axis for entry in entries for axis in entry]


def _layout_of_leaf(
    leaf: Any, mesh: AnyMesh, config: ZeroConfig, other: PartitionSpec
) -> Layout | None:
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
