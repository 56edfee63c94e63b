"""The plan: which weight is gathered before what, held until when, reduced after what.

A plan is data. It is made from the two analyses (`_uses`, `_gradients`), printed by
`str(plan)`, and carried out, without further decisions, by `_emit`.

Uses of one weight in the same region share a gather. The program has two regions,
forward (up to the loss) and backward; the body of a loop is one region of its own.

[Note: ties] XLA would merge the gather of the backward region with that of the forward
region, because they read the same shard, and keep the weight alive between. So each
gather outside loops is tied: its shard passes an `optimization_barrier` together with a
value that does not exist earlier. That value is the last result of a costly operation
in the region, and not the other operand of the use itself, which may be a cheap
expression that XLA fuses into the use and that a tie would force into memory. It also
passes the gradients that were reduced before the gather before it: without that, XLA may
put off all reductions to the end, and full gradients pile up. One gather late, so that a
reduction can overlap with one unit of compute.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from . import _views as views
from ._gradients import BlockGradients, Demand, find_reduces
from ._program import Block, Loop, Value
from ._traffic import Transfer
from ._uses import BlockUses, Weight

_COSTLY = {
    "dot_general",
    "ragged_dot",
    "conv_general_dilated",
    "gather",
    "scatter",
    "scatter-add",
    "scan",
    "while",
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
    "shard_map",
    "pallas_call",
    "sort",
    "fft",
}


@dataclasses.dataclass(frozen=True)
class Gather:
    """One gather: of `weight`, after `ops` on its shard, held for the operations at..until."""

    weight: Weight
    ops: tuple[views.Op, ...]
    region: str
    at: int
    until: int
    tie: Value | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The gathered array's full shape."""
        shape = self.weight.shape
        for op in self.ops:
            shape = op.out_shape(shape)
        return shape

    @property
    def dtype(self):
        casts = [op.dtype for op in self.ops if isinstance(op, views.Cast)]
        return casts[-1] if casts else self.weight.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the gathered array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """The plan of one block, with those of its loops."""

    block: Block
    uses: BlockUses
    gradients: BlockGradients
    gathers: tuple[Gather, ...]
    loops: dict[int, BlockPlan]


@dataclasses.dataclass(frozen=True)
class Step:
    """One line of a printed plan."""

    region: str
    action: str  # "gather" or "reduce"
    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int  # of the full array, once
    at: str  # the operation that it precedes (gather) or follows (reduce)
    until: str  # the operation after which the full array is dropped
    trips: int  # how often one execution of the program does it


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that one training step gathers and reduces, in program order."""

    top: BlockPlan
    at_end: tuple[str, ...] = ()  # leaves that are stored whole: all-reduced last, together
    transfers: tuple[Transfer, ...] = ()  # every collective, in the order it was issued
    slice_bytes: int = 0  # of the nodes' slices that one device keeps for the step (hpZ)

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(_steps(self.top, "", 1))

    def __str__(self) -> str:
        rows = [
            (
                step.region,
                f"{step.action} {step.name}",
                f"{step.dtype}{list(step.shape)}",
                f"{step.num_bytes / 2**20:.2f} MiB" + (f" x{step.trips}" if step.trips > 1 else ""),
                f"before {step.at}" if step.action == "gather" else f"after {step.at}",
                f"dropped after {step.until}" if step.action == "gather" else "",
            )
            for step in self.steps
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(6)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        if self.at_end:
            lines.append(f"at the end: all-reduce {', '.join(self.at_end)}")
        return "\n".join(line.rstrip() for line in lines)


def make_plan(
    block: Block, uses: BlockUses, demands: Sequence[Demand | None], loss: Value | None
) -> BlockPlan:
    """Decide when to gather and reduce.

    Args:
        block: the whole program.
        uses: where it needs weights.
        demands: for each output, whether and how it is to be reduced.
        loss: the value that ends the forward region; None: all is forward.
    """
    boundary = len(block.operations)
    for index, operation in enumerate(block.operations):
        if loss in operation.outputs:
            boundary = index
    gradients = find_reduces(block, uses, demands)
    return _plan_block(block, uses, gradients, boundary)


def _plan_block(
    block: Block, uses: BlockUses, gradients: BlockGradients, boundary: int | None
) -> BlockPlan:
    loops = {}
    for index, operation in enumerate(block.operations):
        if isinstance(operation, Loop):
            inner = gradients.loops.get(index) or BlockGradients({}, {}, {}, {})
            loops[index] = _plan_block(operation.body, uses.loops[index].body, inner, None)
    return BlockPlan(block, uses, gradients, _gathers(block, uses, boundary), loops)


def _gathers(block: Block, uses: BlockUses, boundary: int | None) -> tuple[Gather, ...]:
    """One gather for each weight, wire type and region. `boundary` None: the body of a loop."""
    ties = (
        [None] * (len(block.operations) + 1) if boundary is None else _ties(block, uses, boundary)
    )
    planned: dict[tuple, Gather] = {}
    for use in uses.uses:
        weight = use.view.weight
        ops, _ = views.before_gather(use.view.ops, weight.layout, weight.shape)
        region = "loop" if boundary is None else "forward" if use.index <= boundary else "backward"
        old = planned.get((weight, ops, region))
        if old:
            planned[weight, ops, region] = dataclasses.replace(old, until=use.index)
        else:
            gather = Gather(weight, ops, region, use.index, use.index, ties[use.index])
            planned[weight, ops, region] = gather
    return tuple(planned.values())


def _ties(block: Block, uses: BlockUses, boundary: int) -> list[Value | None]:
    """For each operation, the value that a gather before it waits for. See [Note: ties]."""
    ties: list[Value | None] = []
    latest = None
    for index, operation in enumerate(block.operations):
        if index == boundary + 1:
            latest = None
        arrays = [x for x in operation.inputs if isinstance(x, Value) and x.is_array]
        ready = [x for x in arrays if x not in uses.views]
        ties.append(latest or (ready[0] if ready else None))
        if operation.name in _COSTLY:
            made = [x for x in operation.outputs if x.is_array and x not in uses.views]
            latest = made[0] if made else latest
    return [*ties, latest]


def _steps(plan: BlockPlan, where: str, trips: int) -> Iterator[Step]:
    operations = plan.block.operations
    names = [*(operation.name for operation in operations), "the end"]
    makers = {value: i for i, op in enumerate(operations) for value in op.outputs}
    events: list[tuple[float, Step]] = []
    for gather in plan.gathers:
        step = Step(
            where or gather.region,
            "gather",
            gather.weight.name,
            gather.shape,
            str(gather.dtype),
            gather.num_bytes,
            names[gather.at],
            names[gather.until],
            trips,
        )
        events.append((gather.at, step))
    ends = [(plan.block.outputs[i], demand) for i, demand in plan.gradients.at_end.items()]
    for value, demand in [*plan.gradients.reduces.items(), *ends]:
        if not isinstance(value, Value):
            continue  # a constant gradient, such as that of an unused scalar
        at = makers.get(value, len(operations))
        step = Step(
            where or "backward",
            "reduce",
            demand.name,
            value.shape,
            str(value.dtype),
            math.prod(value.shape) * value.dtype.itemsize,
            names[at],
            "",
            trips,
        )
        events.append((at + 0.5, step))
    inner = [(index + 0.25, index) for index in plan.loops]
    for _, event in sorted([*events, *inner], key=lambda pair: pair[0]):
        if isinstance(event, Step):
            yield event
            continue
        loop = operations[event]
        assert isinstance(loop, Loop)
        yield from _steps(plan.loops[event], f"{where}loop {event}", trips * loop.length)
