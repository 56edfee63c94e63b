"""Lay out a tree: find its structure, a `LeafSpec` for each array, and its other leaves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._codecs import Codec
from .._mesh import HOST, STAGE, TOKENS, AnyMesh, memory_kind_of
from .config import Offload, Role, ZeroConfig
from .hops import check_codec
from .layout import (
    LeafSpec,
    axes_of,
    in_memory,
    layout_of_leaf,
    split_over_stages,
    split_over_tokens_axis,
)
from .modules import overwritten_leaves, trained_leaves
from .stages import stage_split
from .stored_array import (
    StoredArray,
    array_leaves,
    data_of,
    flatten,
    is_array,
    path_name,
    spread_prefix,
)


@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf that is not an array (a string, a function, a Python number); it is never changed."""

    value: Any


@dataclasses.dataclass(frozen=True)
class TreeLayout:
    """The layout of a tree: its structure, the layout of each array, and its other leaves.

    Attributes:
        treedef: structure of the tree; a `StoredArray` counts as one leaf.
        leaves: the layout of each array.
        statics: one entry for each leaf of `treedef`: None for an array, otherwise the leaf itself
            as a `Static`. An empty `StoredArray` is kept as a `Static` too.
    """

    treedef: Any
    leaves: tuple[LeafSpec, ...]
    statics: tuple[Static | None, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The true shape of each array."""
        return tuple(leaf.shape for leaf in self.leaves)

    def stored(self, arrays: Sequence[Any]) -> Any:
        """Build the tree from its stored arrays, or from a sharding or struct for each of them."""
        pairs = zip(self.leaves, arrays, strict=True)
        return rebuild(self.treedef, self.statics, [stored_leaf(leaf, x) for leaf, x in pairs])

    def whole(self, arrays: Sequence[Any]) -> Any:
        """Build the tree from ordinary arrays, one in place of each stored array."""
        return rebuild(self.treedef, unwrapped(self.statics), arrays)

    def with_statics_of(self, tree: Any) -> TreeLayout:
        """Return this layout with the `statics` of `tree`, a tree of the same structure."""
        return dataclasses.replace(self, statics=statics_of(flatten(tree)[1]))

    def flatten_like(self, tree: Any) -> list[Any]:
        """Return, for each array of the layout, the leaf or sub-tree of `tree` at its place.

        Raises:
            ValueError: the tree has another structure.
        """
        leaves = self.treedef.flatten_up_to(tree)
        return [x for x, s in zip(leaves, self.statics, strict=True) if s is None]

    def shardings(self, mesh: Mesh, axes: tuple[str, ...]) -> list[NamedSharding]:
        """Return the sharding of each stored array, split over `axes`."""
        return [leaf.sharding(mesh, axes) for leaf in self.leaves]


def stored_leaf(leaf: LeafSpec, x: Any) -> Any:
    """Return a stored array as a leaf of a tree: in a `StoredArray` if it is padded or encoded."""
    return x if leaf.is_plain else StoredArray.of(x, leaf)


def rebuild(treedef: Any, statics: Sequence[Static | None], arrays: Sequence[Any]) -> Any:
    """Build a tree from its arrays and its other leaves; `statics` is as in `TreeLayout`."""
    remaining = iter(arrays)
    leaves = [next(remaining) if s is None else s.value for s in statics]
    return jax.tree.unflatten(treedef, leaves)


def unwrapped(statics: Sequence[Static | None]) -> list[Static | None]:
    """Return `statics` with each empty `StoredArray` replaced by the value that it holds."""
    return [s and Static(data_of(s.value)) for s in statics]


def statics_of(leaves: Sequence[Any]) -> tuple[Static | None, ...]:
    """Return, for each leaf, None if it is an array, and a `Static` that holds it otherwise."""
    return tuple(None if is_array(leaf) else Static(leaf) for leaf in leaves)


def arrays_of(tree: Any) -> list[Any]:
    """Return the stored arrays of a tree, taken out of `StoredArray`s."""
    return [data_of(leaf) for leaf in array_leaves(tree)]


def lay_out(
    tree: Any, mesh: AnyMesh, config: ZeroConfig, specs: Any = None, codec: Codec | None = None
) -> TreeLayout:
    """Choose the layout of a tree of arrays or `ShapeDtypeStruct`s of true shapes.

    Args:
        tree: the leaves need `shape` and `dtype`; in an `eqx.Module` or `nnx.Module` they may be
            anything. A `StoredArray` keeps its layout.
        mesh: gives the number of shards.
        config: gives axes, stage and the persistence threshold.
        specs: a tree prefix of `PartitionSpec`s over mesh axes other than `node` and `local`.
        codec: the codec in which float leaves of at least `min_quantized_size` elements are stored;
            None: all leaves are stored unencoded.

    Raises:
        ValueError: a leaf is not an array, an `nnx.Module` shares a variable, `specs` names `node`
            or `local`, or a codec is given where parameters are not split.
    """
    if codec is not None and (not isinstance(codec, Codec) or config.stage < 3):
        raise ValueError(
            f"`codec` must be a codec such as `jz.Int8()`, at ZeRO stage 3; got {codec!r} at "
            f"stage {config.stage}."
        )
    if codec is not None:
        check_codec("codec", "shard", codec)
    paths, leaves, treedef = flatten(tree)
    _check_arrays(tree, paths, leaves)
    others = _spread_specs(specs, tree, len(leaves), mesh, config)
    if config.stages is not None:
        others = _split_over_stages(paths, leaves, others, mesh, config)
    laid_out = []
    states = overwritten_leaves(tree)
    for path, leaf, other, is_state in zip(paths, leaves, others, states, strict=True):
        if not is_array(leaf):
            continue
        name = path_name(path)
        if isinstance(leaf, StoredArray):
            laid_out.append(_as_stored(leaf, name, codec))
            continue
        other = _with_ungathered(other, name, leaf, mesh, config)
        # State that its gradient overwrites is replicated: it is small, and read in full.
        layout = None if is_state else layout_of_leaf(leaf, mesh, config, other)
        shape = tuple(leaf.shape)
        stages = split_over_stages(shape, other, mesh)
        new = LeafSpec(name, shape, _jax_dtype(leaf.dtype), layout, other, stages=stages)
        if codec is not None and layout and not other and _is_large_float(new, config):
            new = dataclasses.replace(new, codec=codec)
        elif not axes_of(other):
            over_tokens = split_over_tokens_axis(shape, layout, mesh)
            new = dataclasses.replace(new, other_axes=over_tokens)
        laid_out.append(new)
    return TreeLayout(treedef, tuple(laid_out), statics_of(leaves))


def layout_as_stored(tree: Any, mesh: AnyMesh, config: ZeroConfig) -> TreeLayout:
    """Infer the layout of a tree whose leaves are stored already, from the leaves alone.

    A plain array is stored in its own shape, so its layout is the one that `lay_out` chooses for
    this shape. If that layout needs padding, the array cannot have it, and counts as replicated.
    """
    layout = lay_out(tree, mesh, config)
    arrays = array_leaves(tree)
    pairs = zip(layout.leaves, arrays, strict=True)
    leaves = [
        leaf if leaf.is_plain or isinstance(x, StoredArray) else without_layout(leaf)
        for leaf, x in pairs
    ]
    num_shards = config.num_shards(mesh)
    placed = [as_placed(leaf, x, num_shards) for leaf, x in zip(leaves, arrays, strict=True)]
    return dataclasses.replace(layout, leaves=tuple(placed))


def as_placed(leaf: LeafSpec, x: Any, num_shards: int) -> LeafSpec:
    """Return the leaf with the kind of memory that `x`, its stored array, is in.

    `num_shards` is the number of shards of a leaf: with one shard, only a leaf in host memory gets
    a layout (`in_memory`).
    """
    return in_memory(leaf, memory_kind_of(data_of(x)), num_shards)


def offloaded(
    layout: TreeLayout, offload: Offload | None, num_shards: int, role: Role = "weights"
) -> TreeLayout:
    """Return a layout in which the leaves that `offload` names are in host memory.

    Args:
        layout: the layout, with all leaves in device memory.
        offload: what is offloaded; None: nothing.
        num_shards: the number of shards of a leaf.
        role: "weights" for the layout of parameters, "gradients" for that of gradients.
    """
    if offload is None:
        return layout
    leaves = (
        in_memory(leaf, HOST, num_shards)
        if (leaf.layout or num_shards == 1)
        and offload.takes(role, leaf.path, math.prod(leaf.shape))
        else leaf
        for leaf in layout.leaves
    )
    return dataclasses.replace(layout, leaves=tuple(leaves))


def _as_stored(x: StoredArray, path: str, codec: Codec | None) -> LeafSpec:
    if codec is not None and codec != x.form.codec:
        raise ValueError(
            f"The leaf `{path}` is stored already, with codec {x.form.codec}, and `codec` asks for "
            f"{codec}. Encode the whole array: `zero.shard(zero.unshard(tree), codec=...)`."
        )
    return x.leaf(path)


def without_layout(leaf: LeafSpec) -> LeafSpec:
    """Return the leaf without the split over `node` and `local`: in full on every device.

    A split over stages stays if the layers divide evenly. If the stages pad the leaf, that split
    is removed too.
    """
    if leaf.stages is not None and leaf.stages.is_padded:
        leaf = dataclasses.replace(leaf, stages=None, other_axes=PartitionSpec())
    return dataclasses.replace(leaf, layout=None)


def _check_arrays(tree: Any, paths: Sequence[Any], leaves: Sequence[Any]) -> None:
    for path, leaf, trained in zip(paths, leaves, trained_leaves(tree), strict=True):
        is_empty = isinstance(leaf, StoredArray) and leaf.is_empty
        if type(leaf).__module__.partition(".")[0] == "torch":
            raise TypeError(
                f"The leaf `{path_name(path)}` is of PyTorch, a {type(leaf).__name__}. Fill a "
                "model with a `state_dict` by `zero.shard(interop.load_into(shapes, "
                "state_dict))`; one tensor is `tensor.detach().numpy()`."
            )
        if not path and callable(leaf) and trained is None:
            raise TypeError(
                f"A tree of arrays is expected, such as the parameters; got {leaf!r}. Look at the "
                "order of the arguments."
            )
        if not is_array(leaf) and trained is None and not is_empty:
            raise ValueError(
                f"The leaf `{path_name(path)}` is not an array; got {type(leaf).__name__}. Make a "
                "number an array (`jnp.asarray`), and keep functions and settings out of the tree "
                "(`nnx.split`, `equinox.partition`)."
            )


def _is_large_float(leaf: LeafSpec, config: ZeroConfig) -> bool:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return is_float and math.prod(leaf.shape) >= max(config.min_quantized_size, 1)


def _jax_dtype(dtype: Any) -> Any:
    """Return the dtype to which JAX converts `dtype`; it has at most 32 bits without x64."""
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return dtype if extended else jax.dtypes.canonicalize_dtype(dtype)


def _split_over_stages(
    paths: Sequence[Any],
    leaves: Sequence[Any],
    others: Sequence[PartitionSpec],
    mesh: AnyMesh,
    config: ZeroConfig,
) -> list[PartitionSpec]:
    """Return the split of each leaf over stages.

    `others` are the splits by the user's `specs`; if one splits a leaf, `ValueError` is raised.
    """
    if any(axes_of(other) for other in others):
        raise ValueError(
            "`specs` cannot be had with `stages` of the config. Leave out one of them."
        )
    assert config.stages is not None
    num_stages, num_shards = mesh.shape[STAGE], config.num_shards(mesh)
    return [
        stage_split(path_name(path), tuple(leaf.shape), config.stages, num_stages, num_shards)
        if is_array(leaf)
        else PartitionSpec()
        for path, leaf in zip(paths, leaves, strict=True)
    ]


def _with_ungathered(
    other: PartitionSpec, path: str, leaf: Any, mesh: AnyMesh, config: ZeroConfig
) -> PartitionSpec:
    """Return a leaf's split over `local` if the config leaves it ungathered; otherwise `other`.

    `other` is the split by the user's `specs`. If both split the leaf, `ValueError` is raised.
    """
    ungathered = config.ungathered
    own = ungathered and ungathered.split(path, tuple(leaf.shape), mesh)
    if own is None:
        return other
    if axes_of(other):
        raise ValueError(
            f"The leaf `{path}` is `ungathered`, and `specs` splits it too. Leave out one of them."
        )
    return own


def _spread_specs(
    specs: Any, tree: Any, num: int, mesh: AnyMesh, config: ZeroConfig
) -> list[PartitionSpec]:
    if specs is None:
        return [PartitionSpec()] * num
    flat = spread_prefix(specs, tree, PartitionSpec)
    for spec in flat:
        if any(axis in config.axes or axis in ("node", "local") for axis in axes_of(spec)):
            raise ValueError(
                f"`specs` may name only mesh axes other than `node` and `local`; got {spec}. "
                "Those two are laid out by `Zero`."
            )
        if TOKENS in mesh.shape and {*axes_of(spec)} - {TOKENS}:
            raise ValueError(
                f"`specs` cannot be had on a mesh with the axis `{TOKENS}`, over which `Zero` "
                f"itself splits parameters; got {spec}. Leave out one of the two."
            )
    return flat
