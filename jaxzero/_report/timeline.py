"""Show a plan as a timeline: when each bucket and host copy begins, and how long it is held.

Time is counted in operations of the program; a loop counts as one iteration of its body.

A plan has no link rates, so it predicts no seconds. But it shows which collectives are exposed,
that is, waited for in every step however fast the links are. An all-gather is exposed if no costly
operation (a matrix product, a convolution, a loop) runs between its launch and the first use of its
weights. A reduction is exposed if no costly operation runs after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from .._activations import is_host_copy, is_view
from .._plan import BlockPlan, GatherGroup, Plan, PlanStep, region_name
from .._program import Loop, Operation, Value, fixed_of, is_costly

COPIES = ("fetch", "offload")  # the actions that copy from or to host memory


@dataclasses.dataclass(frozen=True)
class Span:
    """The time during which one bucket of a collective or of a host copy takes device memory.

    Attributes:
        action: "gather" (all-gather), "reduce" (reduce-scatter), "fetch" (copy from host memory) or
            "offload" (copy to host memory).
        region: "forward", "backward", or the loop that the bucket is in; for copies of full leaves
            also "before forward" and "the end".
        names: names of the bucket's leaves.
        num_bytes: bytes of the full arrays; for a copy, the bytes that one device copies.
        sent: when the bucket is sent or copied, in words: before or after which operation.
        start: for a gather, when its last hop begins; for a reduction, when its first gradient is
            computed; for a copy, when it begins.
        needed: when the first of its weights is used, or the last of its gradients is computed; for
            a fetch, when its weights are sent.
        stop: when its weights are dropped, or its gradients sent; for a fetch as `needed`.
        trips: how often the action happens in a step.
        held: for a fetch in a loop, how many layers are on the device at once.
        windowed: whether a copy is of one layer; otherwise of full leaves.
        hops: the mesh axes that the bucket is sent over, in order, each with when it is sent.
    """

    action: str
    region: str
    names: tuple[str, ...]
    num_bytes: int
    sent: str
    start: int
    needed: int
    stop: int
    trips: int
    held: int = 1
    windowed: bool = True
    hops: tuple[tuple[str, int], ...] = ()

    @property
    def alive(self) -> int:
        """The number of operations during which the bucket takes memory."""
        return self.stop - self.start + 1


def spans(plan: Plan) -> tuple[Span, ...]:
    """Return the spans of all buckets and host copies of a plan, in the order in which they begin.

    A bucket that is in flight from one iteration of a loop to the next spans the full body.
    """
    buckets: dict[tuple, list[PlanStep]] = {}
    for step in plan.steps:
        apart = (step.start, step.windowed, step.region) if step.action in COPIES else ()
        buckets.setdefault((*step.bucket, *apart), []).append(step)
    made = (_span(plan.top, steps) for steps in buckets.values())
    return tuple(sorted(made, key=lambda span: (span.start, span.stop)))


def live_bytes(plan: Plan) -> np.ndarray:
    """Return the bytes of full weights, and of gradients not yet sent, during each operation.

    The array is `[2, operations]`: weights, then gradients.
    """
    buckets = [span for span in spans(plan) if span.action not in COPIES]
    live = np.zeros((2, 2 + max((span.stop for span in buckets), default=0)), np.int64)
    for span in buckets:
        live[int(span.action == "reduce"), span.start : span.stop + 1] += span.num_bytes
    return live


def activation_bytes(plan: Plan) -> np.ndarray:
    """Return the bytes of activations that forward keeps for backward, during each operation.

    The array is `[operations]`, for one micro-batch; zeros for a program in stages.
    """
    live = np.zeros(_length(plan.top), np.int64)
    for start, stop, num_bytes in _activations(plan.top):
        live[start : stop + 1] += num_bytes
    return live


def _activations(plan: BlockPlan) -> Iterator[tuple[int, int, int]]:
    """Yield `(first, last, bytes)` for each value that forward keeps for backward.

    `first` and `last` are the first and the last operation on the timeline during which the value
    is held. Values that depend on weights alone, views of other values, and values in host memory
    are left out.
    """
    if plan.last_forward is None:
        return
    block, end = plan.block, plan.last_forward + 1
    fixed = fixed_of(block, [x for x in block.inputs if x in plan.uses.views])
    last = {x: i for i, operation in enumerate(block.operations) for x in operation.values}
    for i, operation in enumerate(block.operations[:end]):
        for x in operation.outputs if not is_view(operation) else ():
            if last.get(x, 0) < end or not x.is_array or fixed.of(x) or _is_in_host(operation, x):
                continue
            yield _after_loops(plan, i), _after_loops(plan, last[x] + 1) - 1, x.num_bytes


def _is_in_host(operation: Operation, made: Value) -> bool:
    """Return True if `made`, a stacked output of a loop, is copied to host memory by layer."""
    if not isinstance(operation, Loop):
        return False
    maker = operation.body.makers.get(operation.body.outputs[operation.outputs.index(made)])
    return maker is not None and is_host_copy(maker)


def _span(top: BlockPlan, steps: list[PlanStep]) -> Span:
    first = steps[0]
    start, stop = min(step.start for step in steps), max(step.stop for step in steps)
    needed = [step.needed for step in steps]
    needed = min(needed) if first.action in ("gather", "fetch") else max(needed)
    block, offset = _block(top, first.path)
    places = [offset + _after_loops(block, index) for index in (start, needed, stop)]
    if first.action in COPIES:
        crosses = first.ahead > 0
        sent = _copied(first, places[0])
    elif first.action == "gather":
        crosses = first.sent == "the iteration before"
        sent = f"in {first.sent}" if crosses else f"before {first.sent}, {places[0]}"
    else:
        crosses = bool(first.until)
        sent = f"in {first.until}" if crosses else f"after {steps[-1].at}, {places[2]}"
    if crosses:
        places[0], places[2] = offset, offset + _length(block) - 1
    return Span(
        first.action,
        first.region,
        tuple(step.name for step in steps),
        sum(step.num_bytes for step in steps),
        sent,
        places[0],
        places[1],
        places[2],
        first.trips,
        max(step.held for step in steps),
        first.windowed,
        tuple((x.axis, offset + _after_loops(block, x.at)) for x in first.hops),
    )


def _copied(step: PlanStep, place: int) -> str:
    """Say in words when a copy from or to host memory begins."""
    if not step.windowed:
        return "in full"
    if step.action == "offload":
        return "once reduced"
    return f"{step.ahead} ahead" if step.ahead else f"before {step.sent}, {place}"


def _block(plan: BlockPlan, path: tuple[int, ...]) -> tuple[BlockPlan, int]:
    """Return the body of the innermost of nested loops, and where it begins on the timeline.

    Args:
        plan: the plan of the outermost block.
        path: for each of the loops, outermost first, its index in the block around it.
    """
    offset = 0
    for index in path:
        assert isinstance(plan.block.operations[index], Loop)
        offset += _after_loops(plan, index)
        plan = plan.loops[index].body
    return plan, offset


def _after_loops(plan: BlockPlan, index: int) -> int:
    """Return the place of operation `index` on its block's timeline.

    A loop before the operation adds the operations of one of its iterations.
    """
    return index + sum(_length(loop.body) for i, loop in plan.loops.items() if i < index)


def _length(plan: BlockPlan) -> int:
    return len(plan.block.operations) + sum(_length(loop.body) for loop in plan.loops.values())


@dataclasses.dataclass(frozen=True)
class Wait:
    """A bucket whose collective is exposed: no costly operation overlaps with it.

    Attributes:
        action: "all-gather", "reduce-scatter" or "all-reduce".
        region: "forward", "backward", or the loop that the collective is in.
        names: names of the bucket's leaves.
        num_bytes: bytes of the full arrays, before encoding; 0 if not known.
        trips: how often the collective runs in one run of the program.
    """

    action: str
    region: str
    names: tuple[str, ...]
    num_bytes: int
    trips: int


def waits(plan: Plan) -> tuple[Wait, ...]:
    """Return the exposed buckets of a plan, the largest first."""
    purposes = {transfer.purpose for transfer in plan.transfers}
    exposed = list(_of_block(plan.top, (), 1))
    if plan.slice_bytes and not _keeps_slices(plan.top):
        slices = ("slices of all weights (hpZ)",)
        exposed.append(Wait("all-gather", "before forward", slices, plan.slice_bytes, 1))
    if plan.combined:
        names = tuple(path for path, _ in plan.combined)
        exposed.append(Wait("all-reduce", "the end", names, 0, 1))
    if plan.at_end:
        exposed.append(Wait("all-reduce", "the end", plan.at_end, 0, 1))
    needed = {"all-gather": "weights", "reduce-scatter": "gradients", "all-reduce": "gradients"}
    sent = [wait for wait in exposed if needed[wait.action] in purposes]
    return tuple(sorted(sent, key=lambda wait: -wait.num_bytes))


def _of_block(plan: BlockPlan, path: tuple[int, ...], trips: int) -> Iterator[Wait]:
    region = region_name(path)
    costly = [is_costly(operation) for operation in plan.block.operations]
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
