"""Decide which iterations of a pipelined loop run before and after it, as short loops.

The body of a pipelined loop gathers for later iterations and reduces for earlier ones. In its first
iterations there is nothing to reduce yet, and in its last ones nothing left to gather. A body that
is the same for all iterations would then send zeros, or gather layers that nothing uses: over each
mesh axis, once for every iteration by which it is ahead or behind. The iterations in which a
message between nodes would be useless are cut off, and do not send it. Inside a node they send as
all other iterations do, so that each end is one loop with one body.

The last iteration of a loop that updates leaves in host memory is cut off wherever that is
possible: only there can the copies of the last updates overlap with computation.

Each end is one more copy of the body to compile. By default only the ends of loops inside other
loops are cut off, such as a scan over experts in a scan over layers. Their useless messages would
be sent again in each iteration of the outer loop, and their bodies are only a part of a layer. Two
kinds of loops stay whole: short loops, and loops that contain a loop which gathers weights, because
each end would copy that inner loop with its own ends.
"""

from __future__ import annotations

import dataclasses

from .._collectives import CommSpec, reduce_axes
from .._mesh import NODE
from .._program import Branch, Loop
from .block_plan import BlockPlan, LoopPlan

# The iterations of a loop for each one that is cut off: with a loop of four layers, two of which
# run before it and two after it, most of the program would be ends.
_ITERATIONS = 2


def separate_ends(plan: BlockPlan, comm: CommSpec) -> BlockPlan:
    """Cut the ends off the pipelined loops that `CommSchedule.separate_ends` asks for.

    Args:
        plan: the plan of the full program, with the node slices that it keeps marked.
        comm: the schedule, and the axes that weights are gathered over and gradients reduced over.
    """
    requested = comm.schedule.separate_ends
    if requested is False or not comm.axes_with_peers((NODE,)):
        return plan
    return _separate_ends(plan, comm, are_cut=requested is True)


def _separate_ends(plan: BlockPlan, comm: CommSpec, are_cut: bool) -> BlockPlan:
    """Cut the ends off loops inside a block's loops; if `are_cut`, off the block's loops too."""
    loops = {}
    for index, loop in plan.loops.items():
        operation = plan.block.operations[index]
        assert isinstance(operation, Loop)
        repeats = not isinstance(operation, Branch)
        body = _separate_ends(loop.body, comm, are_cut or repeats)
        loop = dataclasses.replace(loop, body=body)
        if are_cut and _may_be_cut(operation, loop):
            first, last = _num_first(loop, comm), 0
            if not any(other.continues == index for other in plan.loops.values()):
                last = _num_last(loop, comm)
            if operation.length >= _ITERATIONS * (first + last):
                loop = dataclasses.replace(loop, num_first=first, num_last=last)
        loops[index] = loop
    return dataclasses.replace(plan, loops=loops)


def cut_last_updates(plan: BlockPlan) -> BlockPlan:
    """Cut off the last iteration of each loop that updates leaves.

    Args:
        plan: the plan of the full program, with the leaves marked that its loops update.
    """
    loops = {}
    for index, loop in plan.loops.items():
        operation = plan.block.operations[index]
        assert isinstance(operation, Loop)
        may = _may_run_apart(operation, loop) and not operation.uses_host_memory
        may = may and not any(other.continues == index for other in plan.loops.values())
        if loop.updates and may and operation.length >= _ITERATIONS:
            loop = dataclasses.replace(loop, num_last=1)
        loops[index] = loop
    return dataclasses.replace(plan, loops=loops)


def _may_be_cut(operation: Loop, loop: LoopPlan) -> bool:
    """Return whether the ends of a loop may be cut off: it may run apart, and copies nothing."""
    return _may_run_apart(operation, loop) and not _copies(operation, loop)


def _may_run_apart(operation: Loop, loop: LoopPlan) -> bool:
    """Return whether iterations of a loop may run outside of it, as loops of their own."""
    if isinstance(operation, Branch) or not loop.is_pipelined:
        return False
    inside = [inner.body for inner in loop.body.loops.values()]
    if any(body.gather_groups or body.reduce_groups or body.loops for body in inside):
        return False
    return all(value.is_array for value in operation.outputs[operation.num_carry :])


def _copies(operation: Loop, loop: LoopPlan) -> bool:
    """Return whether a loop copies from or to host memory.

    If a loop does, its ends are not cut off, since the gain is not measured.
    """
    in_host = operation.uses_host_memory or loop.window > 0
    return in_host or bool(loop.host_gradients or loop.updates)


def _num_first(loop: LoopPlan, comm: CommSpec) -> int:
    """Return the number of first iterations, in which no gradients are reduced over `node` yet."""
    groups = (group for group in loop.body.reduce_groups if group.deferred)
    reduces = loop.body.gradients.reduces
    axes = [reduce_axes([reduces[value] for value in group.values], comm) for group in groups]
    return min((each.index(NODE) + 1 for each in axes if NODE in each), default=0)


def _num_last(loop: LoopPlan, comm: CommSpec) -> int:
    """Return the number of last iterations, in which no layer is left to gather over `node`.

    With hpZ only gathers that make node slices cross nodes.
    """
    gathers = (x for group in loop.body.gather_groups if group.prefetched for x in group.gathers)
    crosses = any(x.keeps if comm.hpz else NODE in comm.gather_axes for x in gathers)
    return loop.body.num_hops if crosses else 0
