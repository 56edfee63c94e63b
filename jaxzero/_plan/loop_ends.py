"""Decide which iterations of a pipelined loop run before and after it, as code of their own.

The body of a pipelined loop gathers for later iterations and reduces for earlier ones. At the start
of the loop there is nothing to reduce yet, and at its end nothing left to gather; a body that is
the same for all iterations would send zeros and gather layers that nothing uses, over each mesh
axis once for every iteration by which it is ahead or behind. The iterations where this would happen
are taken out of the loop, and send only what is needed.

Each of them is one more copy of the body to compile, so this is done only on request
(`CommSchedule.separate_ends`), where a loop is long compared with its ends, and not inside of other
loops: there the copies would hold copies in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from .._mesh import LOCAL
from .._program import Branch, Loop
from .block_plan import BlockPlan, LoopPlan
from .hpz import slices_kept_in_program

# The iterations of a loop for each one that is taken out of it: with a loop of four layers, two
# copies of which are run before it and two after it, most of the program would be copies.
_ITERATIONS = 2


def separate_ends(plan: BlockPlan, axes_with_peers: Collection[str]) -> BlockPlan:
    """Take the first and last iterations out of the pipelined loops at the top level of a program.

    Args:
        plan: the plan of the full program, with the node slices that it keeps.
        axes_with_peers: the mesh axes of more than one device.
    """
    if not axes_with_peers:
        return plan
    kept = slices_kept_in_program(plan)
    loops = {}
    for index, loop in plan.loops.items():
        operation = plan.block.operations[index]
        assert isinstance(operation, Loop)
        if _may_be_cut(operation, loop):
            first = _axes_reduced(loop, axes_with_peers)
            last = 0
            if not any(other.continues == index for other in plan.loops.values()):
                layers = {x.layer for x in plan.uses.loops[index].stacks if x.view.weight in kept}
                last = _axes_gathered(loop, layers, axes_with_peers)
            if operation.length >= _ITERATIONS * (first + last):
                loop = dataclasses.replace(loop, num_first=first, num_last=last)
        loops[index] = loop
    return dataclasses.replace(plan, loops=loops)


def _may_be_cut(operation: Loop, loop: LoopPlan) -> bool:
    """Whether iterations can be taken out of a loop, at the cost of one copy of its body each."""
    if isinstance(operation, Branch) or not loop.is_pipelined or _copies(operation, loop):
        return False
    inside = [inner.body for inner in loop.body.loops.values()]
    if any(body.gather_groups or body.reduce_groups or body.loops for body in inside):
        return False
    return all(value.is_array for value in operation.outputs[operation.num_carry :])


def _copies(operation: Loop, loop: LoopPlan) -> bool:
    """Whether a loop copies from or to host memory: such loops have not been measured cut."""
    in_host = operation.uses_host_memory or loop.window > 0
    return in_host or bool(loop.host_gradients or loop.updates)


def _axes_reduced(loop: LoopPlan, axes_with_peers: Collection[str]) -> int:
    """The axes that gradients are reduced over in later iterations; at most, of any gradient."""
    specs = (
        loop.body.gradients.reduces[value]
        for group in loop.body.reduce_groups
        if group.deferred
        for value in group.values
    )
    return max((len({*spec.hops} & {*axes_with_peers}) for spec in specs), default=0)


def _axes_gathered(
    loop: LoopPlan, from_slices: Collection[object], axes_with_peers: Collection[str]
) -> int:
    """The axes that weights are gathered over in earlier iterations; at most, of any weight.

    A layer in `from_slices` is gathered from its node slice, unless the loop makes the slice.
    """
    gathers = [x for group in loop.body.gather_groups if group.prefetched for x in group.gathers]
    inside = int(LOCAL in axes_with_peers)
    return max(
        (
            inside if x.weight in from_slices and not x.keeps else loop.body.num_hops
            for x in gathers
        ),
        default=0,
    )
