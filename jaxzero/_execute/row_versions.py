"""The versions of a program for nodes with different numbers of rows, and how they correspond.

All devices run one program, so each of its arrays has the same shape on all of them: the shape that
it has on the node with the most rows. To compute less on the other nodes, the user's function is
traced once for each number of rows; each trace is a version of the program. All collectives are
those of the first version, which has the most rows. Between two collectives, a device runs the
operations of its own version on the leading part of the arrays (`row_segments`). This module
matches the versions, and checks that they agree wherever devices must do the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from .._mesh import NODE, device_index
from .._plan import BlockPlan, BlockUses
from .._program import (
    Atom,
    Block,
    Constant,
    Correspondence,
    Loop,
    Operation,
    correspondence,
    exchanged_or_effect,
    is_same_constant,
    movable_ops,
)

_ACTS_ON_DEVICES = "is not computed by all devices alike where nodes have different `shares`"


def version_shares(shares: Sequence[int]) -> list[int]:
    """The different shares, largest first: one for each version of the program."""
    return sorted(set(shares), reverse=True)


@dataclasses.dataclass(frozen=True)
class RowVersions:
    """The versions of a program.

    Attributes:
        which: the version of this device.
        matched: the atoms and operations that correspond to each one of the first version.
        views: the operations of each view of a weight, in any version; see `BlockUses.views`.
    """

    which: Int32[Array, ""]
    matched: Correspondence
    views: Mapping[Atom, tuple[movable_ops.Op, ...]]

    def of(self, atom: Atom) -> tuple[Atom, ...]:
        """The atoms, one of each version, that correspond to an atom of the first version."""
        return self.matched.atoms[atom]

    def after_gather(self, atom: Atom, first: tuple[movable_ops.Op, ...]) -> list[tuple]:
        """For each version, the operations of a view that follow its gather.

        Args:
            atom: the view, in the first version.
            first: those of the first version.
        """
        num_before = len(self.views[atom]) - len(first)
        all_ops = [movable_ops.casts_first(self.views[x]) for x in self.of(atom)]
        before = [tuple(map(_comparable, ops[:num_before])) for ops in all_ops]
        if len(set(before)) > 1:
            raise _unequal(
                "a view of a weight", "changes with the number of rows before its gather"
            )
        return [ops[num_before:] for ops in all_ops]


def match_versions(
    blocks: Sequence[Block],
    uses: Sequence[BlockUses],
    plans: Sequence[BlockPlan],
    shares: Sequence[int],
) -> RowVersions:
    """Match the versions of a program, of which the first is planned.

    Args:
        blocks: the versions, as `version_shares` orders them.
        uses: how each uses the weights.
        plans: of the first: one for all micro-batches, or for the first one and for the others.
        shares: of each node.

    Raises:
        NotImplementedError: the versions differ in more than numbers of rows; or the program has
            collectives or effects of its own.
    """
    matched = correspondence(blocks)
    for operation in matched.operations:
        if (name := exchanged_or_effect(operation)) is not None:
            raise NotImplementedError(
                f"`{name}` at {operation.where} {_ACTS_ON_DEVICES}. Leave it out of the function, "
                "or `shares`."
            )
    views = {atom: view for each in uses for atom, view in _views(each).items()}
    _check_stacks(uses)
    for plan in plans:
        _check_plan(plan, matched)
    numbers = [version_shares(shares).index(share) for share in shares]
    which = jnp.asarray(numbers, jnp.int32)[device_index((NODE,))]
    return RowVersions(which, matched, views)


def _views(uses: BlockUses) -> dict[Atom, tuple[movable_ops.Op, ...]]:
    found = {atom: view.ops for atom, view in uses.views.items()}
    for loop in uses.loops.values():
        found |= _views(loop.body)
    return found


def _check_stacks(uses: Sequence[BlockUses]) -> None:
    """Check that stacks of weights are scanned alike in all versions."""
    for index, first in uses[0].loops.items():
        loops = [each.loops[index] for each in uses]
        views = {
            tuple(tuple(map(_comparable, stack.view.ops)) for stack in loop.stacks)
            for loop in loops
        }
        if len(views) > 1:
            names = ", ".join(stack.layer.name for stack in first.stacks)
            raise _unequal(names, "is changed before a loop scans it")
        _check_stacks([loop.body for loop in loops])


def _check_plan(plan: BlockPlan, matched: Correspondence) -> None:
    """Check that what runs on shards, for all nodes together, is the same in all versions."""
    for index in plan.gradients.on_shards:
        _check_same(matched.operations[plan.block.operations[index]])
    for operation in plan.block.operations:
        if operation.outputs and operation.outputs[0] in plan.zeros:
            _check_same(matched.operations[operation])
    for value in plan.gradients.reduces:
        shapes = {atom.shape for atom in matched.atoms[value]}  # pyright: ignore
        if len(shapes) > 1:
            raise _unequal("a gradient", f"has the shapes {shapes}")
    for index, loop in plan.loops.items():
        _check_plan(loop.body, matched)
        versions = matched.operations[plan.block.operations[index]]
        lengths = sorted({x.length for x in versions if isinstance(x, Loop)})
        if len(lengths) > 1 and not loop.is_local:
            raise _unequal(f"the loop at {versions[0].where}", f"runs {lengths} times")


def _check_same(versions: Sequence[Operation]) -> None:
    constants = [
        atoms
        for atoms in zip(*(operation.inputs for operation in versions), strict=True)
        if isinstance(atoms[0], Constant)
    ]
    same_views = len({_comparable(operation.view()) for operation in versions}) == 1
    if not same_views or not all(map(is_same_constant, constants)):
        where = f"`{versions[0].name}` at {versions[0].where}"
        raise _unequal(where, "changes with the number of rows")


def _comparable(op: movable_ops.Op | None) -> Any:
    """What an operation of a view is compared by between versions.

    An elementwise one holds an operation of its own trace; `correspondence` has compared the names.
    """
    return type(op) if isinstance(op, movable_ops.Elementwise) else op


def _unequal(what: str, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"`shares`: {what} {why}, and it works on shards, which belong to all nodes together. "
        "Let the function return the sum of the losses of its rows, and their number as weight."
    )
