"""Mark the gathers that keep node slices for hpZ: the first gather of each weight.

With hpZ (ZeRO++, https://arxiv.org/abs/2306.10209) each device keeps its node slice of every
weight, and gathers the weight inside its node. The first gather of a weight crosses nodes in any
case, so the slice is what it delivers over `node`; later gathers, in forward and backward, start
from the slice. No gather of all slices has to come before the first layer.
"""

from __future__ import annotations

import dataclasses

from .block_plan import BlockPlan, GatherGroup, LoopPlan
from .lifetimes import Gather
from .param_uses import BlockUses, LoopUses, ShardedParam


def mark_kept_slices(plan: BlockPlan, weights: frozenset[ShardedParam]) -> BlockPlan:
    """Mark the first gather of each weight, at the top level or in a loop there.

    Args:
        plan: the plan of the full program.
        weights: the weights whose node slices are to be kept. A weight for which that is not
            possible (a layer that two loops inside a loop scan, for example) gets no mark, and none
            that a loop gathers as a constant; `slices_kept_in_program` returns the marked ones.
    """
    weights -= _loop_constants(plan.uses)
    marked: set[Gather] = set()
    loops = dict(plan.loops)
    first: dict[ShardedParam, int] = {}
    for group in plan.gather_groups:
        for gather in group.gathers:
            is_first = first.setdefault(gather.weight, gather.at) == gather.at
            if is_first and gather.weight in weights:
                marked.add(gather)
    for index in sorted(loops):
        for stack in plan.uses.loops[index].stacks:
            weight = stack.view.weight
            if first.setdefault(weight, index) < index:
                continue
            # The loop reads the weight before the marked gather does: it makes the slice instead.
            marked = {gather for gather in marked if gather.weight != weight}
            first[weight] = index
            if weight in weights and not stack.view.ops:
                loops[index] = _keeping(loops[index], stack.layer)
    gather_groups = tuple(_marked(group, marked) for group in plan.gather_groups)
    kept = {index: _kept_in_loop(plan.uses.loops[index], loop) for index, loop in loops.items()}
    for index, loop in loops.items():
        scanned = {stack.view.weight for stack in plan.uses.loops[index].stacks}
        makers = [i for i, kept_weights in kept.items() if i < index and kept_weights & scanned]
        if makers:
            loops[index] = _start_after(loop, max(makers))
    return dataclasses.replace(plan, gather_groups=gather_groups, loops=loops)


def _loop_constants(uses: BlockUses) -> set[ShardedParam]:
    """The weights that loops gather as constants, in each iteration."""
    found: set[ShardedParam] = set()
    for loop in uses.loops.values():
        found |= {*loop.constants} | _loop_constants(loop.body)
    return found


def _start_after(loop: LoopPlan, maker: int) -> LoopPlan:
    """Delay the first gathers of a loop that reads node slices made by the loop `maker`.

    They start once the slices exist. The loop cannot continue with the buckets that `maker` has in
    flight at its end: these are gathered over both axes, but slices over `local` only.
    """
    continues = None if loop.continues == maker else loop.continues
    return dataclasses.replace(loop, issue=max(loop.issue, maker + 1), continues=continues)


def _keeping(loop: LoopPlan, layer: ShardedParam) -> LoopPlan:
    """Mark the gather of `layer` in a loop's body as the one that keeps the node slice.

    If a loop in the body scans `layer`, the gather is in that loop's body. The loop is returned
    unchanged if `layer` is read in more than one place, or after operations on the whole layer.
    """
    body = loop.body
    found = [x for group in body.gather_groups for x in group.gathers if x.weight is layer]
    scans = [
        (index, stack)
        for index, uses in body.uses.loops.items()
        for stack in uses.stacks
        if stack.view.weight is layer
    ]
    if len(found) + len(scans) != 1:
        return loop
    if found:
        gather_groups = tuple(_marked(group, set(found)) for group in body.gather_groups)
        return dataclasses.replace(
            loop, body=dataclasses.replace(body, gather_groups=gather_groups)
        )
    index, stack = scans[0]
    if stack.view.ops:
        return loop
    loops = {**body.loops, index: _keeping(body.loops[index], stack.layer)}
    return dataclasses.replace(loop, body=dataclasses.replace(body, loops=loops))


def _marked(group: GatherGroup, marked: set[Gather]) -> GatherGroup:
    gathers = (dataclasses.replace(x, keeps=x in marked or x.keeps) for x in group.gathers)
    return dataclasses.replace(group, gathers=tuple(gathers))


def slices_kept_in_program(plan: BlockPlan) -> frozenset[ShardedParam]:
    """The weights of a block whose node slices it makes in their first gather."""
    here = {x.weight for group in plan.gather_groups for x in group.gathers if x.keeps}
    for index, loop in plan.loops.items():
        here |= _kept_in_loop(plan.uses.loops[index], loop)
    return frozenset(here)


def _kept_in_loop(uses: LoopUses, loop: LoopPlan) -> set[ShardedParam]:
    inside = slices_kept_in_program(loop.body)
    return {stack.view.weight for stack in uses.stacks if stack.layer in inside}
