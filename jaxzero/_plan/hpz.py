"""Where a program makes the slices that hpZ keeps: with the first gather of each weight.

The first gather crosses nodes anyway. What arrives over `node` is kept, and from then on the
weight is gathered inside the node: later in forward, and in backward. So the slices of all
layers need not be there before the first layer runs.
"""

from __future__ import annotations

import dataclasses
import itertools

from .block_plan import BlockPlan, GatherGroup, LoopPlan
from .lifetimes import Gather
from .param_uses import ShardedParam


def keep_slices(plan: BlockPlan, wanted: frozenset[ShardedParam]) -> BlockPlan:
    """Mark the gathers that keep slices: the first of a weight, at the top or in a loop there.

    Args:
        plan: of the whole program.
        wanted: the weights whose slices are to be kept. Those of which that cannot be done (of a
            stack in a loop in a loop, say) are left as they are: see `kept_inside`.
    """
    marked: set[Gather] = set()
    loops = dict(plan.loops)
    first: dict[ShardedParam, int] = {}
    for group in plan.gather_groups:
        for one in group.gathers:
            if first.setdefault(one.weight, one.at) == one.at and one.weight in wanted:
                marked.add(one)
    for index in sorted(loops):
        for stack in plan.uses.loops[index].stacks:
            weight = stack.view.weight
            if first.setdefault(weight, index) < index:
                continue
            marked = {one for one in marked if one.weight != weight}
            first[weight] = index
            if weight in wanted and not stack.view.ops:
                loops[index] = _keeping(loops[index], stack.layer)
    gather_groups = tuple(_marked(group, marked) for group in plan.gather_groups)
    kept = {index: _kept_in_loop(plan, index, loop) for index, loop in loops.items()}
    for index, loop in loops.items():
        taken = {stack.view.weight for stack in plan.uses.loops[index].stacks}
        makers = [i for i, weights in kept.items() if i < index and weights & taken]
        if makers:
            loops[index] = _after(loop, max(makers))
    return dataclasses.replace(plan, gather_groups=gather_groups, loops=loops)


def _after(loop: LoopPlan, maker: int) -> LoopPlan:
    """A loop that takes the slices that the loop `maker` keeps.

    It begins to send when they are there; and what `maker` has sent last of its own, over both
    hops, is not what is sent of slices.
    """
    continues = None if loop.continues == maker else loop.continues
    return dataclasses.replace(loop, issue=max(loop.issue, maker + 1), continues=continues)


def _keeping(loop: LoopPlan, layer: ShardedParam) -> LoopPlan:
    """Mark the only gather of a layer, if it is gathered once, and in no loop inside."""
    found = [
        one for group in loop.body.gather_groups for one in group.gathers if one.weight is layer
    ]
    inside = itertools.chain(*(x.stacks for x in loop.body.uses.loops.values()))
    if len(found) != 1 or any(stack.view.weight is layer for stack in inside):
        return loop
    gather_groups = tuple(_marked(group, set(found)) for group in loop.body.gather_groups)
    return dataclasses.replace(
        loop, body=dataclasses.replace(loop.body, gather_groups=gather_groups)
    )


def _marked(group: GatherGroup, marked: set[Gather]) -> GatherGroup:
    gathers = (dataclasses.replace(x, keeps=x in marked or x.keeps) for x in group.gathers)
    return dataclasses.replace(group, gathers=tuple(gathers))


def kept_inside(plan: BlockPlan) -> frozenset[ShardedParam]:
    """The weights whose slices the program makes, where it first gathers them."""
    here = {x.weight for group in plan.gather_groups for x in group.gathers if x.keeps}
    for index, loop in plan.loops.items():
        here |= _kept_in_loop(plan, index, loop)
    return frozenset(here)


def _kept_in_loop(plan: BlockPlan, index: int, loop: LoopPlan) -> set[ShardedParam]:
    inner = {x.weight for group in loop.body.gather_groups for x in group.gathers if x.keeps}
    stacks = plan.uses.loops[index].stacks
    return {stack.view.weight for stack in stacks if stack.layer in inner}
