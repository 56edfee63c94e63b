"""Cut a sharded tree in two, by leaves and by rows of stacks: the frozen part and the active one.

Each part is a tree of the same structure, with None for the leaves that are in the other. A stack
whose first rows are frozen is a leaf of both. Parts are ordinary sharded trees, each leaf in the
layout of its own shape; they are made leaf by leaf, so that no more than one leaf is on a device in
full, whatever moves between devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._codecs import Codec
from .._mesh import AnyMesh, is_traced, to_device
from .._sharding import (
    LeafSpec,
    Static,
    TreePlan,
    ZeroConfig,
    in_memory,
    plan_tree,
    rebuild,
)
from .placement import auto_mesh, pad_leaf, run_automatic, stored_struct, unpad_leaf
from .programs import Programs

Rows = int | None
"""How much of an array is frozen: its first rows (0: nothing); None: all of it."""


@dataclasses.dataclass(frozen=True)
class TreeCut:
    """The layout of a tree, and of its two parts.

    Attributes:
        whole: the layout of the whole tree.
        rows: for each array of it, what is frozen.
        active: the layout of the part that is not frozen.
        frozen: the layout of the frozen part.
    """

    whole: TreePlan
    rows: tuple[Rows, ...]
    active: TreePlan
    frozen: TreePlan

    def pairs(self, active: Sequence[Any], frozen: Sequence[Any]) -> list[tuple[Any, Any]]:
        """For each array of the whole tree its active and frozen parts; None where there is none.

        Args:
            active: one value for each array of the active part.
            frozen: likewise, of the frozen part.
        """
        rest, first = iter(active), iter(frozen)
        return [
            (None if rows is None else next(rest), None if rows == 0 else next(first))
            for rows in self.rows
        ]


def make_cut(
    whole: TreePlan,
    rows: Sequence[Rows],
    mesh: AnyMesh,
    config: ZeroConfig,
    codec: Codec | None = None,
) -> TreeCut:
    """Lay out the two parts of a tree.

    Args:
        whole: the layout of the tree.
        rows: for each array, what is frozen.
        mesh: gives the number of shards.
        config: gives axes, stage and the persistence threshold.
        codec: stores large float leaves of the frozen part; a stack only if each of its layers is a
            message of its own, so that a loop can decode one layer at a time.

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
    frozen = _lay_out(whole, [n != 0 for n in rows], first, False, mesh, config, codec)
    stacks = [n is not None for n in rows if n != 0]
    leaves = tuple(
        dataclasses.replace(leaf, codec=None) if is_stack and leaf.num_lead == 0 else leaf
        for leaf, is_stack in zip(frozen.leaves, stacks, strict=True)
    )
    return TreeCut(whole, tuple(rows), active, dataclasses.replace(frozen, leaves=leaves))


def _lay_out(
    whole: TreePlan,
    kept: Sequence[bool],
    shapes: Sequence[tuple[int, ...]],
    has_statics: bool,
    mesh: AnyMesh,
    config: ZeroConfig,
    codec: Codec | None = None,
) -> TreePlan:
    """The layout of the arrays that are `kept`, in these shapes, with None for the others."""
    triples = zip(whole.leaves, kept, shapes, strict=True)
    structs = [jax.ShapeDtypeStruct(s, leaf.dtype) if k else None for leaf, k, s in triples]
    statics = [s if s is None or has_statics else Static(None) for s in whole.statics]
    specs = None
    if any(leaf.other_axes for leaf in whole.leaves):
        pairs = zip(whole.leaves, kept, strict=True)
        none = [s and Static(PartitionSpec() if has_statics else None) for s in statics]
        given = [leaf.other_axes if k else None for leaf, k in pairs]
        specs = rebuild(whole.treedef, none, given)
    plan = plan_tree(rebuild(whole.treedef, statics, structs), mesh, config, specs, codec)
    old = [leaf for leaf, k in zip(whole.leaves, kept, strict=True) if k]
    num_shards = config.num_shards(mesh)
    leaves = [
        dataclasses.replace(before, codec=leaf.codec)
        if before.shape == leaf.shape
        # As in `offloaded`: a leaf that is not split, such as one row of scalars, is on the device.
        else in_memory(
            leaf, before.memory_kind if leaf.layout or num_shards == 1 else None, num_shards
        )
        for before, leaf in zip(old, plan.leaves, strict=True)
    ]
    return dataclasses.replace(plan, leaves=tuple(leaves))


def split_arrays(
    cut: TreeCut, arrays: Sequence[Any], programs: Programs, axes: tuple[str, ...]
) -> tuple[list[Any], list[Any]]:
    """Cut the stored arrays of a tree.

    Args:
        cut: the layouts.
        arrays: the stored arrays (or `ShapeDtypeStruct`s) of the whole tree.
        programs: those compiled before, on the mesh that the arrays are sharded on.
        axes: the mesh axes that split them.

    Returns:
        The stored arrays of the active and of the frozen part. An array that is in one part, and
        not encoded, is the given one.
    """
    active, frozen = [], []
    layouts = cut.pairs(cut.active.leaves, cut.frozen.leaves)
    for old, x, rows, (rest, first) in zip(
        cut.whole.leaves, arrays, cut.rows, layouts, strict=True
    ):
        if rest is None:
            frozen += _cut_leaf(old, x, [(first, slice(None))], programs, axes)
        elif first is None:
            active.append(x)
        else:
            assert rows is not None
            parts = [(rest, slice(rows, None)), (first, slice(rows))]
            made = _cut_leaf(old, x, parts, programs, axes)
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
    """The stored arrays of the whole tree; the reverse of `split_arrays`.

    Encoded arrays are decoded.
    """
    layouts = cut.pairs(cut.active.leaves, cut.frozen.leaves)
    found = zip(cut.whole.leaves, layouts, cut.pairs(active, frozen), strict=True)
    return [_join_leaf(old, parts, arrays, programs, axes) for old, parts, arrays in found]


def _cut_leaf(
    old: LeafSpec,
    x: Any,
    parts: Sequence[tuple[LeafSpec, slice]],
    programs: Programs,
    axes: tuple[str, ...],
) -> list[Any]:
    """Rows of a stored array, each in the layout of its own shape."""
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
    known = [(leaf, x) for leaf, x in zip(parts, arrays, strict=True) if leaf is not None][::-1]

    def run(arrays: list[Any]) -> Any:
        pairs = zip([leaf for leaf, _ in known], arrays, strict=True)
        return pad_leaf(old, jnp.concatenate([unpad_leaf(leaf, to_device(x)) for leaf, x in pairs]))

    sharding = old.sharding(auto_mesh(programs.mesh), axes)
    return run_automatic(run, sharding, programs, [x for _, x in known])


def check_untraced(arrays: Sequence[Any]) -> None:
    """Raise `ValueError` for traced arrays: a cut changes shapes between steps, not in one."""
    if any(is_traced(x) for x in arrays):
        raise ValueError(
            "A tree to cut or to join is traced. Call this outside of `jax.jit`, between steps: "
            "the step after it is another program."
        )
