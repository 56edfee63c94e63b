"""Cut a sharded tree into an active and a frozen part, by leaves and by rows of stacks.

Each part is a tree of the same structure, with None for the leaves that only the other part has. A
stack whose first rows are frozen is a leaf of both parts. Parts are ordinary sharded trees, each
leaf in the layout of its own shape. Parts are made leaf by leaf, so that a device holds at most one
leaf in full. An optimizer's state is cut like the parameters that it belongs to (`cut_of_state`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from .._codecs import Codec
from .._mesh import LOCAL, STAGE, AnyMesh, is_traced, to_device
from .._sharding import LeafSpec, Static, TreeLayout, ZeroConfig, in_memory, lay_out, rebuild
from .optimizer_state import state_layout, trained_part
from .placement import auto_mesh, pad_leaf, run_automatic, stored_struct, unpad_leaf
from .programs import Programs

Rows = int | None
"""How much of an array is frozen: its first rows (0: nothing); None: all of it."""


@dataclasses.dataclass(frozen=True)
class TreeCut:
    """The layout of a tree, and the layouts of its active and its frozen part.

    Attributes:
        whole: the layout of the whole tree.
        rows: for each array of the tree, how much of it is frozen.
        active: the layout of the part that is not frozen.
        frozen: the layout of the frozen part.
    """

    whole: TreeLayout
    rows: tuple[Rows, ...]
    active: TreeLayout
    frozen: TreeLayout

    def pairs(self, active: Sequence[Any], frozen: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return `(active, frozen)` for each array of the whole tree: the values of its two parts.

        If an array is in one part only, the value of the other part is None.

        Args:
            active: one value for each array of the active part.
            frozen: one value for each array of the frozen part.
        """
        rest, first = iter(active), iter(frozen)
        return [
            (None if rows is None else next(rest), None if rows == 0 else next(first))
            for rows in self.rows
        ]


def make_cut(
    whole: TreeLayout,
    rows: Sequence[Rows],
    mesh: AnyMesh,
    config: ZeroConfig,
    codec: Codec | None = None,
    config_of_frozen: ZeroConfig | None = None,
) -> TreeCut:
    """Lay out the active and the frozen part of a tree.

    Args:
        whole: the layout of the tree.
        rows: for each array, how much of it is frozen.
        mesh: gives the number of shards.
        config: gives axes, stage and the persistence threshold.
        codec: encodes large float leaves of the frozen part. It encodes a stack only if each layer
            is a message of its own, so that a loop can decode one layer at a time.
        config_of_frozen: the config of the frozen part; by default `config`.

    Raises:
        ValueError: `codec` is not a codec, or the parameters are not split.
    """
    rest = [
        leaf.shape if not n else (leaf.shape[0] - n, *leaf.shape[1:])
        for leaf, n in zip(whole.leaves, rows, strict=True)
    ]
    first = [
        leaf.shape if not n else (n, *leaf.shape[1:])
        for leaf, n in zip(whole.leaves, rows, strict=True)
    ]
    active = _lay_out(whole, [n is not None for n in rows], rest, True, mesh, config)
    kept, for_frozen = [n != 0 for n in rows], config_of_frozen or config
    frozen = _lay_out(whole, kept, first, False, mesh, for_frozen, codec)
    stacks = [n is not None for n in rows if n != 0]
    leaves = tuple(
        dataclasses.replace(leaf, codec=None) if is_stack and leaf.num_lead == 0 else leaf
        for leaf, is_stack in zip(frozen.leaves, stacks, strict=True)
    )
    return TreeCut(whole, tuple(rows), active, dataclasses.replace(frozen, leaves=leaves))


def _lay_out(
    whole: TreeLayout,
    kept: Sequence[bool],
    shapes: Sequence[tuple[int, ...]],
    has_statics: bool,
    mesh: AnyMesh,
    config: ZeroConfig,
    codec: Codec | None = None,
) -> TreeLayout:
    """Return the layout of one part of a tree, with None for the leaves of the other part.

    Args:
        whole: the layout of the whole tree.
        kept: for each array, whether the part has it.
        shapes: for each array, its shape in the part.
        has_statics: whether the part has the leaves that are not arrays (strings, functions).
        mesh: gives the number of shards.
        config: gives axes, stage and the persistence threshold.
        codec: encodes large float leaves.
    """
    triples = zip(whole.leaves, kept, shapes, strict=True)
    structs = [jax.ShapeDtypeStruct(s, leaf.dtype) if k else None for leaf, k, s in triples]
    statics = [s if s is None or has_statics else Static(None) for s in whole.statics]
    specs = None
    if STAGE not in mesh.shape and any(leaf.other_axes for leaf in whole.leaves):
        pairs = zip(whole.leaves, kept, strict=True)
        none = [s and Static(PartitionSpec() if has_statics else None) for s in statics]
        given = [_specs_of(leaf) if k else None for leaf, k in pairs]
        specs = rebuild(whole.treedef, none, given)
    layout = lay_out(rebuild(whole.treedef, statics, structs), mesh, config, specs, codec)
    old = [leaf for leaf, k in zip(whole.leaves, kept, strict=True) if k]
    num_shards = config.num_shards(mesh)
    leaves = [
        dataclasses.replace(before, codec=leaf.codec)
        if before.shape == leaf.shape
        # As in `offloaded`: a leaf that is not split, such as one row of scalars, is on the device.
        else in_memory(
            leaf, before.memory_kind if leaf.layout or num_shards == 1 else None, num_shards
        )
        for before, leaf in zip(old, layout.leaves, strict=True)
    ]
    return dataclasses.replace(layout, leaves=tuple(leaves))


def _specs_of(leaf: LeafSpec) -> PartitionSpec:
    """Return the `specs` entry of a leaf: how it is split over mesh axes beside `node` and `local`.

    It is empty for a leaf of `ungathered`, whose split the config gives.
    """
    return PartitionSpec() if LOCAL in leaf.other_axes else leaf.other_axes


def split_arrays(
    cut: TreeCut, arrays: Sequence[Any], programs: Programs, axes: tuple[str, ...]
) -> tuple[list[Any], list[Any]]:
    """Cut the stored arrays of a tree into those of the active and of the frozen part.

    Args:
        cut: the layouts.
        arrays: the stored arrays (or `ShapeDtypeStruct`s) of the whole tree.
        programs: the cache of compiled programs, of the mesh that the arrays are sharded on.
        axes: the mesh axes that split the arrays.

    Returns:
        The stored arrays of the active and of the frozen part. An array that is in one part only,
        and is not encoded, is returned without a copy.
    """
    active, frozen = [], []
    layouts = cut.pairs(cut.active.leaves, cut.frozen.leaves)
    for old, array, rows, (rest, first) in zip(
        cut.whole.leaves, arrays, cut.rows, layouts, strict=True
    ):
        if rest is None:
            frozen += _cut_leaf(old, array, [(first, slice(None))], programs, axes)
        elif first is None:
            active.append(array)
        else:
            assert rows is not None
            parts = [(rest, slice(rows, None)), (first, slice(rows))]
            made = _cut_leaf(old, array, parts, programs, axes)
            active.append(made[0])
            frozen.append(made[1])
    return active, frozen


def join_arrays(
    cut: TreeCut,
    active: Sequence[Any],
    frozen: Sequence[Any],
    programs: Programs,
    axes: tuple[str, ...],
) -> list[Any]:
    """Return the stored arrays of the whole tree, from those of its active and frozen part.

    Encoded arrays are decoded.
    """
    layouts = cut.pairs(cut.active.leaves, cut.frozen.leaves)
    leaves = zip(cut.whole.leaves, layouts, cut.pairs(active, frozen), strict=True)
    return [_join_leaf(old, parts, arrays, programs, axes) for old, parts, arrays in leaves]


def _cut_leaf(
    old: LeafSpec,
    x: Any,
    parts: Sequence[tuple[LeafSpec, slice]],
    programs: Programs,
    axes: tuple[str, ...],
) -> list[Any]:
    """Cut a stored array into slices of its rows.

    Args:
        old: the layout of the array.
        x: the stored array, or its `ShapeDtypeStruct`.
        parts: for each slice the layout to store it in, and its rows.
        programs: the cache of compiled programs.
        axes: the mesh axes that split the arrays.
    """
    if len(parts) == 1 and parts[0][0].codec is None:
        return [x]
    if isinstance(x, jax.ShapeDtypeStruct):
        return [stored_struct(leaf, programs.mesh, axes) for leaf, _ in parts]

    def run(x: Any) -> list[Any]:
        full = unpad_leaf(old, to_device(x))
        return [pad_leaf(leaf, full[rows]) for leaf, rows in parts]

    shardings = [leaf.sharding(auto_mesh(programs.mesh), axes) for leaf, _ in parts]
    return run_automatic(run, shardings, programs, x)


def _join_leaf(
    old: LeafSpec,
    parts: tuple[LeafSpec | None, LeafSpec | None],
    arrays: tuple[Any, Any],
    programs: Programs,
    axes: tuple[str, ...],
) -> Any:
    rest, first = arrays
    if first is None:
        return rest
    if rest is None and parts[1] is not None and parts[1].codec is None:
        return first
    if isinstance(first, jax.ShapeDtypeStruct):
        return stored_struct(old, programs.mesh, axes)
    # The first layers come before the rest.
    pieces = [(leaf, x) for leaf, x in zip(parts, arrays, strict=True) if leaf is not None][::-1]

    def run(arrays: list[Any]) -> Any:
        pairs = zip([leaf for leaf, _ in pieces], arrays, strict=True)
        return pad_leaf(old, jnp.concatenate([unpad_leaf(leaf, to_device(x)) for leaf, x in pairs]))

    sharding = old.sharding(auto_mesh(programs.mesh), axes)
    return run_automatic(run, sharding, programs, [x for _, x in pieces])


def check_untraced(arrays: Sequence[Any]) -> None:
    """Raise `ValueError` for traced arrays: a tree can be cut or joined only between steps."""
    if any(is_traced(x) for x in arrays):
        raise ValueError(
            "A tree to cut or to join is traced. Call this outside of `jax.jit`, between steps: "
            "the step after it is another program."
        )


def cut_of_state(
    tx: optax.GradientTransformation,
    params: TreeCut,
    num_layers: int,
    mesh: AnyMesh,
    config: ZeroConfig,
) -> TreeCut:
    """Lay out both parts of the state of `tx`; the active part is a state of the active parameters.

    Args:
        tx: the optimizer.
        params: the cut of the parameters.
        num_layers: the number of layers, which are the rows of a stack.
        mesh: gives the number of shards.
        config: gives axes, stage and the persistence threshold.

    Raises:
        NotImplementedError: an array of the state belongs to a stack that is cut, and cannot be cut
            by layers; or `tx` keeps an array for the active parameters only.
    """
    whole = _state_layout(tx, params.whole, mesh, config)
    active = _state_layout(tx, params.active, mesh, config)
    shapes = {leaf.path: leaf.shape for leaf in active.leaves}
    frozen_rows = {x.path: n for x, n in zip(params.whole.leaves, params.rows, strict=True)}
    rows: list[Rows] = []
    for leaf in whole.leaves:
        shape = shapes.pop(leaf.path, None)
        parameter = _parameter_of(leaf.path, frozen_rows)
        is_of_stack = parameter is not None and bool(frozen_rows[parameter])
        num_frozen = num_layers - shape[0] if shape and leaf.shape[:1] == (num_layers,) else 0
        if shape is None:
            rows.append(None)
        # Adafactor keeps an array of one element in place of statistics that it does not need.
        elif shape == leaf.shape and (not is_of_stack or math.prod(shape) <= 1):
            rows.append(0)
        elif num_frozen > 0 and shape[1:] == leaf.shape[1:]:
            rows.append(num_frozen)
        else:
            raise NotImplementedError(
                f"`tx` keeps `{leaf.path}` of shape {leaf.shape} for a stack of {num_layers} "
                f"layers that is frozen in part, and {shape} for its active layers: it cannot be "
                "cut by layers. Start the optimizer anew: `zero.init_optimizer(tx, active)`."
            )
    if shapes:
        raise NotImplementedError(
            f"`tx` keeps `{next(iter(shapes))}` for the active parameters, and nothing like it for "
            "the whole. Start the optimizer anew: `zero.init_optimizer(tx, active)`."
        )
    cut = make_cut(whole, rows, mesh, config)
    return TreeCut(whole, cut.rows, active, cut.frozen)


def _parameter_of(path: str, parameters: Iterable[str]) -> str | None:
    """Find the parameter that an array of the optimizer state belongs to, by its path.

    Returns the longest path in `parameters` that ends `path`: `a.w` for `0.mu.a.w`, not `w`.
    """
    found = (name for name in parameters if f".{path}".endswith(f".{name}"))
    return max(found, key=len, default=None)


def _state_layout(
    tx: optax.GradientTransformation, params: TreeLayout, mesh: AnyMesh, config: ZeroConfig
) -> TreeLayout:
    _, trained = trained_part(params.stored([leaf.stored for leaf in params.leaves]), params)
    return state_layout(tx, trained, mesh, config)
