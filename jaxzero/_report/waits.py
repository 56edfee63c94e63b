"""Collectives that have nothing to overlap with: what the devices wait for in every step.

A plan has no link rates, so it predicts no seconds. It does show which all-gather has no costly
operation (a matrix product, a convolution, a loop) between its launch and the first use of its
weights, and which reduction has none after it. Those are exposed whatever the links are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .._plan import COSTLY, BlockPlan, GatherGroup, Plan, region_name
from .._program import Loop, Value


@dataclasses.dataclass(frozen=True)
class Wait:
    """A bucket that is exposed: nothing overlaps with its collective.

    Attributes:
        action: "all-gather", "reduce-scatter" or "all-reduce".
        region: "forward", "backward", or the loop it is in.
        names: names of its leaves.
        num_bytes: bytes of its full arrays, before encoding; 0 if not known.
        trips: how often this happens in one run of the program.
    """

    action: str
    region: str
    names: tuple[str, ...]
    num_bytes: int
    trips: int


def waits(plan: Plan) -> tuple[Wait, ...]:
    """The exposed buckets of a plan, the largest first."""
    purposes = {transfer.purpose for transfer in plan.transfers}
    found = list(_of_block(plan.top, (), 1))
    if plan.slice_bytes and not _keeps_slices(plan.top):
        slices = ("slices of all weights (hpZ)",)
        found.append(Wait("all-gather", "before forward", slices, plan.slice_bytes, 1))
    if plan.combined:
        names = tuple(path for path, _ in plan.combined)
        found.append(Wait("all-reduce", "the end", names, 0, 1))
    if plan.at_end:
        found.append(Wait("all-reduce", "the end", plan.at_end, 0, 1))
    needed = {"all-gather": "weights", "reduce-scatter": "gradients", "all-reduce": "gradients"}
    sent = [wait for wait in found if needed[wait.action] in purposes]
    return tuple(sorted(sent, key=lambda wait: -wait.num_bytes))


def _of_block(plan: BlockPlan, path: tuple[int, ...], trips: int) -> Iterator[Wait]:
    region = region_name(path)
    costly = [operation.name in COSTLY for operation in plan.block.operations]
    for group in plan.gather_groups:
        if not group.prefetched and not any(costly[group.issues[-1] : group.at]):
            yield _gather(group, region or group.gathers[0].region, trips)
    for group in plan.reduce_groups:
        if not group.deferred and not (plan.overlaps and any(costly[group.at + 1 :])):
            yield _reduction(plan, group.values, region or "backward", trips)
    for i in plan.gradients.at_end:
        value = plan.block.outputs[i]
        if isinstance(value, Value):
            name = plan.gradients.at_end[i].name
            yield Wait("reduce-scatter", region or "the end", (name,), value.num_bytes, trips)
    for index, loop in plan.loops.items():
        operation = plan.block.operations[index]
        assert isinstance(operation, Loop)
        name = region_name((*path, index))
        if loop.continues is None and not any(costly[loop.issue : index]):
            for group in loop.body.gather_groups:  # those of the first iteration
                if group.prefetched:
                    yield _gather(group, f"before {name}", trips)
        if not any(costly[index + 1 :]):
            for group in loop.body.reduce_groups:  # those of the last iteration
                if group.deferred:
                    yield _reduction(loop.body, group.values, f"after {name}", trips)
        yield from _of_block(loop.body, (*path, index), trips * operation.length)


def _gather(group: GatherGroup, region: str, trips: int) -> Wait:
    names = tuple(one.weight.name for one in group.gathers)
    return Wait("all-gather", region, names, sum(x.num_bytes for x in group.gathers), trips)


def _reduction(plan: BlockPlan, values: tuple[Value, ...], region: str, trips: int) -> Wait:
    names = tuple(plan.gradients.reduces[value].name for value in values)
    return Wait("reduce-scatter", region, names, sum(value.num_bytes for value in values), trips)


def _keeps_slices(plan: BlockPlan) -> bool:
    here = any(one.keeps for group in plan.gather_groups for one in group.gathers)
    return here or any(_keeps_slices(loop.body) for loop in plan.loops.values())
