"""Mark the gathers that keep node slices for hpZ: the first gather of each weight.

With hpZ (ZeRO++, https://arxiv.org/abs/2306.10209) each device keeps its node slice of every
weight, and gathers the weight inside its node. The first gather of a weight crosses nodes in any
case, and its result over `node` is the slice. Later gathers, in forward and backward, start from
the slice. No gather of all slices has to come before the first layer.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from .block_plan import BlockPlan, GatherGroup, LoopPlan
from .param_uses import BlockUses, LoopUses, ShardedParam


def mark_kept_slices(plan: BlockPlan, weights: frozenset[ShardedParam]) -> BlockPlan:
    """Return a plan in which the first gather of each weight keeps the weight's node slice.

    That gather may be at the top level or in a loop there. All other gathers of the weight start
    from the slice, so they are sent after the first one.

    Args:
        plan: the plan of the full program.
        weights: the weights whose node slices are to be kept. Two kinds get no mark: weights for
            which it is not possible, such as a layer that two loops inside a loop scan, and weights
            that a loop gathers as constants. `slices_kept_in_program` returns those with a mark.
    """
    all_weights, weights = weights, weights - _loop_constants(plan.uses)
    first: dict[ShardedParam, int] = {}
    for group in plan.gather_groups:
        for gather in group.gathers:
            first.setdefault(gather.weight, gather.at)
    loops, made_in = dict(plan.loops), {}
    for index in sorted(loops):
        stacks = plan.uses.loops[index].stacks
        count = collections.Counter(stack.view.weight for stack in stacks)
        for stack in stacks:
            weight = stack.view.weight
            # If an operation reads the weight both in full and layer by layer, the full weight is
            # gathered first.
            if weight in made_in or first.get(weight, index + 1) <= index:
                continue
            made_in[weight] = index
            if weight in weights and not stack.view.ops and count[weight] == 1:
                loops[index] = _keeping(loops[index], stack.layer)
    at_top = {*weights} - made_in.keys()
    gather_groups = tuple(_marked(group, at_top, first) for group in plan.gather_groups)
    marked = _in_order(dataclasses.replace(plan, gather_groups=gather_groups, loops=loops))
    return _with_starts(marked) if all_weights else marked


def _with_starts(plan: BlockPlan) -> BlockPlan:
    """Mark the groups that gather from node slices: all but the groups that make slices."""
    groups = (
        dataclasses.replace(group, from_slices=not any(x.keeps for x in group.gathers))
        for group in plan.gather_groups
    )
    loops = {
        i: dataclasses.replace(loop, body=_with_starts(loop.body)) for i, loop in plan.loops.items()
    }
    return dataclasses.replace(plan, gather_groups=tuple(groups), loops=loops)


def _in_order(plan: BlockPlan) -> BlockPlan:
    """Delay the gathers that start from node slices until the slices exist."""
    ready: dict[ShardedParam, int] = {}  # the operation before which a slice exists
    for group in plan.gather_groups:
        for gather in group.gathers:
            if gather.keeps:
                ready.setdefault(gather.weight, group.issues[0])
    makers = {i: _kept_in_loop(plan.uses.loops[i], loop) for i, loop in plan.loops.items()}
    for index, weights in makers.items():
        ready.update((weight, index + 1) for weight in weights)
    groups = []
    for group in plan.gather_groups:
        # A message with several weights can be sent only when all their slices exist.
        earliest = max(ready.get(gather.weight, 0) for gather in group.gathers)
        issues = tuple(max(issue, earliest) for issue in group.issues)
        groups.append(dataclasses.replace(group, issues=issues))
    loops = dict(plan.loops)
    for index, loop in plan.loops.items():
        scanned = {stack.view.weight for stack in plan.uses.loops[index].stacks} - makers[index]
        issue = max([loop.issue, *(ready[weight] for weight in scanned & ready.keys())])
        continues = loop.continues
        if continues is not None and scanned & makers[continues]:
            # The buckets that the other loop has in flight at its end are gathered over both axes.
            # Those of this loop start from slices, which are gathered over `local` only.
            continues = None
        loops[index] = dataclasses.replace(loop, issue=issue, continues=continues)
    return dataclasses.replace(plan, gather_groups=tuple(groups), loops=loops)


def _loop_constants(uses: BlockUses) -> set[ShardedParam]:
    """Return the weights that loops gather as constants, in each iteration."""
    found: set[ShardedParam] = set()
    for loop in uses.loops.values():
        found |= {*loop.constants} | _loop_constants(loop.body)
    return found


def _keeping(loop: LoopPlan, layer: ShardedParam) -> LoopPlan:
    """Mark the gather of `layer` in a loop's body as the one that keeps the node slice.

    If a loop in the body scans `layer`, the gather in that inner loop is marked. The plan is
    returned unchanged if `layer` is read in more than one place, or if operations on the whole
    layer come before its scan.
    """
    body = loop.body
    gathers = [x for group in body.gather_groups for x in group.gathers if x.weight is layer]
    scans = [
        (index, stack)
        for index, uses in body.uses.loops.items()
        for stack in uses.stacks
        if stack.view.weight is layer
    ]
    if len(gathers) + len(scans) != 1:
        return loop
    if gathers:
        left, at = {layer}, {layer: gathers[0].at}
        gather_groups = tuple(_marked(group, left, at) for group in body.gather_groups)
        return dataclasses.replace(
            loop, body=dataclasses.replace(body, gather_groups=gather_groups)
        )
    index, stack = scans[0]
    if stack.view.ops:
        return loop
    loops = {**body.loops, index: _keeping(body.loops[index], stack.layer)}
    return dataclasses.replace(loop, body=dataclasses.replace(body, loops=loops))


def _marked(
    group: GatherGroup, weights: set[ShardedParam], first: Mapping[ShardedParam, int]
) -> GatherGroup:
    """Return a group in which each weight's first gather is marked to keep the node slice.

    `first` is the operation that first needs each weight. That operation may need several slices of
    the weight. Its first gather makes the node slice for all of them, so a weight is taken out of
    the set `weights` once its gather is marked.
    """
    gathers = []
    for x in group.gathers:
        keeps = x.weight in weights and x.at == first[x.weight]
        if keeps:
            weights.discard(x.weight)
            x = dataclasses.replace(x, keeps=True)
        gathers.append(x)
    return dataclasses.replace(group, gathers=tuple(gathers))


def slices_kept_in_program(plan: BlockPlan) -> frozenset[ShardedParam]:
    """Return the weights for which a gather in a block, or in its loops, keeps the node slice."""
    here = {x.weight for group in plan.gather_groups for x in group.gathers if x.keeps}
    for index, loop in plan.loops.items():
        here |= _kept_in_loop(plan.uses.loops[index], loop)
    return frozenset(here)


def _kept_in_loop(uses: LoopUses, loop: LoopPlan) -> set[ShardedParam]:
    inside = slices_kept_in_program(loop.body)
    return {stack.view.weight for stack in uses.stacks if stack.layer in inside}
