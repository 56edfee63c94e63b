"""The lines of a printed plan: what happens to each array, and when.

The plan of a block says when a weight is copied from host memory. The record of the traced program
(`HostTransfer`) says which weights are copied, and how many bytes: a weight that is copied in full
before the program, or gathered from a node slice, is not copied again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._collectives import HostTransfer, ReduceSpec
from .._program import Loop, Value
from .block_plan import BlockPlan, LoopPlan, ReduceGroup
from .emit import instructions_of
from .emit_loop import pipeline_of
from .instructions import Instruction, Reduce, Send
from .param_uses import ShardedParam

ACTIONS = {
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "fetch": "copy to device",
    "offload": "copy to host",
}


@dataclasses.dataclass(frozen=True)
class Hop:
    """One collective of a bucket: its all-gather or reduction over one mesh axis.

    Attributes:
        axis: the mesh axis.
        at: the operation of the block, by index, before which the bucket is sent over it; the
            number of operations at the end.
        before: the name of that operation; "" at the end.
        lag: in a loop, how many iterations after the iteration of its layer the bucket is sent;
            negative: before that iteration.
    """

    axis: str
    at: int
    before: str
    lag: int = 0


@dataclasses.dataclass(frozen=True)
class PlanStep:
    """The collective, or the copy from or to host memory, of one array, alone or with others.

    Attributes:
        region: "forward", "backward", or the loop it is in; of a copy of a full leaf also
            "before forward" or "the end".
        action: "gather" (all-gather), "reduce" (reduce-scatter, or all-reduce), "fetch" (copy of a
            shard from host memory to the device) or "offload" (copy of a gradient to host memory).
        group: number of the bucket in its region; arrays with the same number share a message.
        name: name of the leaf.
        shape, dtype: of the full array; for a copy, of what one device copies: its shard, or its
            message if the leaf is stored encoded.
        num_bytes: bytes of that array, for one of its `trips`.
        sent: the operation before which a weight is sent or copied, or "the iteration before".
        at: the operation that first needs a weight, or that makes a gradient; for a fetch, the
            operation before which the weight is sent; "" for an offload; "the update" for copies
            of an update in a loop.
        until: the operation after which a full weight is dropped; for a gradient "", or
            "the iteration after" if it is sent then.
        tied: the operation whose result the gather or copy of a weight waits for; "" if there is
            none.
        trips: how often this happens in one execution of the program. What is sent or copied before
            the first iteration of a loop, for its first layers, is not counted.
        start, needed, stop: indices of operations. For a weight, those of `sent`, `at` and `until`.
            For a gradient, `start` and `needed` are that of `at`, and `stop` is that of the
            operation that completes its bucket.
        path: indices of the loops that this step is in, the outermost first.
        ahead: for a fetch in a loop, how many layers ahead of its send a layer is copied.
        held: for a fetch in a loop, how many layers of the leaf are on the device at once.
        windowed: whether a copy is of one layer; otherwise of the full leaf, all layers at once.
        hops: the hops of a gathered or reduced bucket, in the order in which it is sent.
    """

    region: str
    action: str
    group: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    trips: int
    path: tuple[int, ...]
    sent: str = ""
    at: str = ""
    until: str = ""
    tied: str = ""
    start: int = 0
    needed: int = 0
    stop: int = 0
    ahead: int = 0
    held: int = 1
    windowed: bool = True
    hops: tuple[Hop, ...] = ()

    @property
    def bucket(self) -> tuple[tuple[int, ...], str, int]:
        """A key that is equal for arrays that are sent together."""
        return self.path, self.action, self.group


def region_name(path: tuple[int, ...]) -> str:
    """Name the loops of `path`, innermost first ("loop 3 in loop 1"); "" at the top level."""
    return " in ".join(f"loop {index}" for index in reversed(path))


class _Copies:
    """The copies from and to host memory that a traced program has recorded."""

    def __init__(self, transfers: Sequence[HostTransfer]):
        self.whole = [x for x in transfers if not x.windowed]
        layers = [x for x in transfers if x.windowed]
        self.layers = {(x.path, x.name, x.to): x for x in layers if x.purpose != "update"}
        # The last record of a copy is that of the update after the loop; the others are equal.
        self.updates = {(x.path, x.name, x.to): x for x in layers if x.purpose == "update"}


def steps_of(plan: BlockPlan, transfers: Sequence[HostTransfer]) -> Iterator[PlanStep]:
    """Yield the steps of a program, in order.

    Args:
        plan: the plan of the program.
        transfers: its copies from and to host memory.
    """
    copies = _Copies(transfers)

    def whole(to: str, at: int) -> Iterator[PlanStep]:
        for x in copies.whole:
            if x.to == to:
                yield _copy(x, x.region, (), x.trips, start=at, needed=at, stop=at, windowed=False)

    yield from whole("device", 0)
    yield from _BlockSteps(plan, instructions_of(plan), copies).in_order()
    yield from whole("host", len(plan.block.operations))


def _copy(
    x: HostTransfer, region: str, path: tuple[int, ...], trips: int, *, group: int = 0, **when: Any
) -> PlanStep:
    """Return the `PlanStep` of a copy from or to host memory, of which `x` is the record.

    The other arguments are the fields of `PlanStep` of these names; `when` has those that say when
    the copy begins and is needed (`sent`, `start`, `needed`, ...).
    """
    action = "fetch" if x.to == "device" else "offload"
    array = x.name, x.shape, x.dtype, x.num_bytes
    return PlanStep(region, action, group, *array, trips, path, **when)


@dataclasses.dataclass(frozen=True)
class _BlockSteps:
    """Makes the steps of a block, and of the loops in it.

    Attributes:
        plan: the plan of the block.
        listed: the block's instructions.
        copies: the copies from and to host memory.
        path: the indices of the loops that the block is in, the outermost first.
        trips: how often the block runs in one execution of the program.
    """

    plan: BlockPlan
    listed: Sequence[Instruction]
    copies: _Copies
    path: tuple[int, ...] = ()
    trips: int = 1

    def in_order(self) -> Iterator[PlanStep]:
        groups = self.plan.gather_groups
        # Fractions put in order what happens at one operation: copies, gathers, the loop,
        # reductions.
        events: list[tuple[float, int, Callable[[int], Iterator[PlanStep]]]] = [
            (x.fetch - 0.25, i, self._fetches) for i, x in enumerate(groups) if x.fetch is not None
        ]
        events += [(group.at, i, self._gathers) for i, group in enumerate(groups)]
        events += [(index + 0.25, index, self._of_loop) for index in self.plan.loops]
        events += [(group.at + 0.5, i, self._reductions) for i, group in enumerate(self._reduces)]
        for _, number, make in sorted(events, key=lambda event: event[:2]):
            yield from make(number)

    @functools.cached_property
    def _names(self) -> list[str]:
        """The name of each operation, by index, and of the end of the block."""
        return [*(operation.name for operation in self.plan.block.operations), "the end"]

    @functools.cached_property
    def _makers(self) -> dict[Value, int]:
        """For each value, the index of the operation that makes it."""
        operations = enumerate(self.plan.block.operations)
        return {value: i for i, operation in operations for value in operation.outputs}

    @functools.cached_property
    def _reduces(self) -> list[ReduceGroup]:
        """The groups of gradients, then a group for each output that is reduced at the end."""
        last = len(self.plan.block.operations)
        return [*self.plan.reduce_groups, *(ReduceGroup((x,), last) for x, _ in self._at_end)]

    @functools.cached_property
    def _at_end(self) -> list[tuple[Value, ReduceSpec]]:
        """The outputs that are reduced at the block's end, each with its reduction.

        A value that is the gradient of two leaves occurs twice.
        """
        outputs, specs = self.plan.block.outputs, self.plan.gradients.at_end
        pairs = ((outputs[i], spec) for i, spec in specs.items())
        return [(x, spec) for x, spec in pairs if isinstance(x, Value)]

    @functools.cached_property
    def _hops(self) -> dict[tuple[type[Instruction], int], tuple[Hop, ...]]:
        """The hops of each group, by kind of instruction (`Send` or `Reduce`) and number."""
        names = [*self._names[:-1], ""]
        hops: dict[tuple[type[Instruction], int], tuple[Hop, ...]] = {}
        for instruction in itertools.chain.from_iterable(x.parts for x in self.listed):
            if isinstance(instruction, (Send, Reduce)):
                plan, key = self.plan, (type(instruction), instruction.group)
                is_send = isinstance(instruction, Send)
                axes = plan.gather_axes if is_send else plan.reduce_groups[instruction.group].axes
                hop = Hop(
                    axes[instruction.axis], instruction.at, names[instruction.at], instruction.lag
                )
                hops[key] = (*hops.get(key, ()), hop)
        return hops

    def _tied_to(self, tie: Value | None) -> str:
        """Return the name of the operation that makes `tie`, which a send waits for, or ""."""
        if tie is None:
            return ""
        return self._names[self._makers[tie]] if tie in self._makers else "an argument"

    def _gathers(self, number: int) -> Iterator[PlanStep]:
        names, group = self._names, self.plan.gather_groups[number]
        hops = self._hops.get((Send, number), ())
        for one in group.gathers:
            yield PlanStep(
                region=region_name(self.path) or one.region,
                action="gather",
                group=number,
                name=one.weight.name,
                shape=one.shape,
                dtype=str(one.dtype),
                num_bytes=one.num_bytes,
                trips=self.trips,
                path=self.path,
                sent="the iteration before" if group.prefetched else names[group.issues[-1]],
                at=names[one.at],
                until=names[one.until],
                tied=self._tied_to(group.ties[-1]),
                start=group.issues[-1],
                needed=one.at,
                stop=one.until,
                hops=hops,
            )

    def _fetches(self, number: int) -> Iterator[PlanStep]:
        """Yield the copies from host memory of one group's weights, outside of loops."""
        group, names = self.plan.gather_groups[number], self._names
        assert group.fetch is not None
        needed = group.issues[0]
        for weight in self.plan.fetched(number):
            if x := self.copies.layers.get((self.path, weight.name, "device")):
                yield _copy(
                    x,
                    group.gathers[0].region,
                    self.path,
                    self.trips,
                    group=number,
                    sent=names[group.fetch],
                    at=names[needed],
                    tied=self._tied_to(group.fetch_tie),
                    start=group.fetch,
                    needed=needed,
                    stop=needed,
                )

    def _reductions(self, number: int) -> Iterator[PlanStep]:
        """Yield the reductions of one group's gradients, then their copies to host memory."""
        group, path, trips = self._reduces[number], self.path, self.trips
        for value in group.values:
            at = self._makers.get(value, len(self._names) - 1)
            yield PlanStep(
                region=region_name(path) or "backward",
                action="reduce",
                group=number,
                name=self._spec_of(number, value).name,
                shape=value.shape,
                dtype=str(value.dtype),
                num_bytes=math.prod(value.shape) * value.dtype.itemsize,
                trips=trips,
                path=path,
                at=self._names[at],
                until="the iteration after" if group.deferred else "",
                start=at,
                needed=at,
                stop=group.at,
                hops=self._hops.get((Reduce, number), ()),
            )
        for value in group.values:
            leaf = self.plan.host_gradients.get(value)
            if leaf and (x := self.copies.layers.get((path, leaf.path, "host"))):
                at = group.at
                yield _copy(x, x.region, path, trips, start=at, needed=at, stop=at)

    def _spec_of(self, number: int, value: Value) -> ReduceSpec:
        """Return the reduction of a value of group `number`."""
        last = number - len(self.plan.reduce_groups)
        return self.plan.gradients.reduces[value] if last < 0 else self._at_end[last][1]

    def _of_loop(self, index: int) -> Iterator[PlanStep]:
        loop, plan = self.plan.block.operations[index], self.plan.loops[index]
        assert isinstance(loop, Loop)
        listed = pipeline_of(plan, loop, self.plan.uses.loops[index]).instructions
        path, trips = (*self.path, index), self.trips * loop.length
        inside = _BlockSteps(plan.body, listed, self.copies, path, trips)
        for stack in self.plan.uses.loops[index].stacks:
            if x := self.copies.layers.get((path, stack.layer.name, "device")):
                yield inside._fetch_of_layer(x, plan, stack.layer)
        yield from inside.in_order()
        yield from inside._copies_at_end(plan)

    def _fetch_of_layer(self, x: HostTransfer, loop: LoopPlan, layer: ShardedParam) -> PlanStep:
        """Return the step that copies one layer from host memory in each iteration of this body."""
        issues = (
            group.issues[0]
            for group in self.plan.gather_groups
            if any(gather.weight is layer for gather in group.gathers)
        )
        needed, num = min(issues, default=0), loop.window
        before = "the iteration before" if num == 1 else f"{num} iterations before"
        return _copy(
            x,
            region_name(self.path),
            self.path,
            self.trips,
            sent=before if num else self._names[0],
            at=self._names[needed],
            needed=needed,
            stop=needed,
            ahead=num,
            held=num + len(loop.leads(layer)),
        )

    def _copies_at_end(self, loop: LoopPlan) -> Iterator[PlanStep]:
        """Yield the copies at the end of an iteration: a layer of each gradient in host memory.

        After these come the copies of updates, one layer of every array that is updated.
        """
        end, place = (
            len(self.plan.block.operations),
            (region_name(self.path), self.path, self.trips),
        )
        for leaf in loop.host_gradients.values():
            if x := self.copies.layers.get((self.path, f"{leaf.path}[i]", "host")):
                yield _copy(x, *place, start=end, needed=end, stop=end)
        for (where, _, to), x in self.copies.updates.items():
            if where == self.path:
                ahead, held = (1, 2) if to == "device" else (0, 1)
                yield _copy(x, *place, at="the update", ahead=ahead, held=held)
