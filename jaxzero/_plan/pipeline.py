"""The pipeline of a loop: what one tick does, and what it carries to the next.

The instructions of a body have lags: in tick `t`, one of lag `l` works on iteration `t - l`.
Everything else follows from one rule:

    A value that is written at lag `a` and read at lag `b` is carried for `b - a` ticks.

The operations of iteration `t` run in tick `t`, so ticks `0` to `length - 1` are the program's
loop. Gathers for the first iterations come before it, reductions of the last ones after it. `cuts`
divides the ticks of the loop into pieces, each of which is a loop of its own; ticks outside are
executed one by one. An instruction that has no iteration in any tick of a piece is left out there.
If it has one in some of them, it is done in all, for the first or the last iteration where it has
none: what it then makes is read only by instructions that have no iteration either.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from .._program import Loop, Value
from .block_plan import BlockPlan, LoopPlan
from .body_work import known_after
from .emit import deferred_instructions, instructions_of
from .hpz import slices_kept_in_program
from .instructions import (
    Begin,
    Collect,
    Decode,
    Encode,
    EncodeGradients,
    FetchRow,
    FetchShards,
    FetchState,
    Finish,
    Hold,
    HoldStates,
    Instruction,
    JoinCopies,
    KeepSlices,
    Output,
    PinGradients,
    Reduce,
    Send,
    TakeShards,
    TakeSlices,
    Update,
)
from .param_uses import LoopUses, ShardedParam

Key = tuple[str, Any]  # a value of an iteration that may be carried, such as a bucket
Entry = tuple[Key, int]  # the value of iteration `t - lag` that tick `t` finds


def shards(weight: ShardedParam) -> Key:
    """The shards of a weight that have been copied from host memory, or its node slice."""
    return "shards", weight


def message(group: int) -> Key:
    """The message of a group of weights, before and after each axis."""
    return "message", group


def gradient(group: int) -> Key:
    """The bucket of a group of gradients, before and after each axis."""
    return "gradient", group


def row(stack: int) -> Key:
    """A row, copied from host memory, of a stack that the program scans."""
    return "row", stack


def output(number: int) -> Key:
    """An output of the body."""
    return "output", number


def state(number: int) -> Key:
    """The layers on the device of a leaf that is updated, and of its optimizer state."""
    return "state", number


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """The schedule of one loop.

    Attributes:
        plan: of the loop.
        length: the number of its iterations.
        instructions: of one tick, in order.
        cuts: the ticks between which one loop runs; the first is 0, the last `length`.
        goes_on: whether another loop continues with the gathers that are in flight at the end.
        kept: the weights whose node slices the loop keeps and which are gathered ahead (hpZ).
    """

    plan: LoopPlan
    length: int
    instructions: tuple[Instruction, ...]
    cuts: tuple[int, ...]
    goes_on: bool
    kept: tuple[ShardedParam, ...]

    @property
    def first_gathers(self) -> tuple[Instruction, ...]:
        """What is done for the first iterations before the loop, in each tick; lags decide which.

        Rows of activations are copied when the loop begins.
        """
        return tuple(x for x in self.instructions if _is_ahead(x))

    @functools.cached_property
    def copies(self) -> dict[Key, Instruction]:
        """For each value that is copied from host memory, a copy of it."""
        kinds = (FetchShards, FetchRow, FetchState)
        return {
            _touched(x, self.plan.body)[1][0]: x for x in self.instructions if isinstance(x, kinds)
        }

    @property
    def first_tick(self) -> int:
        """The tick in which the first gather, or copy for one, begins."""
        return min((x.lag for x in self.first_gathers), default=0)

    @property
    def last_tick(self) -> int:
        """The tick after the last one."""
        return self.length + max(0, *(x.lag for x in self.instructions))

    def iterations(self, each: Instruction) -> range:
        """The iterations that an instruction is done for."""
        known = range(self.length) if each.iterations is None else each.iterations
        if self.goes_on and _is_ahead(each):
            return range(known.start, self.length - self.first_tick)
        return known

    def has_iteration(self, each: Instruction, ticks: range) -> bool:
        """Whether an instruction has an iteration in any of some ticks."""
        known = self.iterations(each)
        return max(ticks.start - each.lag, known.start) < min(ticks.stop - each.lag, known.stop)

    def in_ticks(self, ticks: range) -> Iterator[Instruction]:
        """What is done in each of some ticks.

        Barriers are kept where an instruction is left out: XLA compiles each piece of the loop
        alike, so that losses and gradients have the same bits as if the loop were one piece. Where
        a barrier reads a value, XLA does not replace the transpose of a product by a swap of its
        factors, which may sum in another order.
        """
        for each in self.instructions:
            if self.has_iteration(each, ticks):
                yield each
            elif isinstance(each, (Encode, Send, PinGradients)) and ticks.stop <= self.length:
                yield Hold(at=each.at, tie=getattr(each, "tie", None), pin=each.pin)

    def carried(self, ticks: range) -> list[Entry]:
        """What a loop over some ticks carries: whatever one of its ticks finds or leaves."""
        span = 1 + self.last_tick - self.length - self.first_tick
        near = {*ticks[: span + 1], *ticks[-span:], ticks.stop}
        found: set[Entry] = set()
        for tick in near:
            found |= self.found_by(tick)
        order = {key: i for i, key in enumerate(self._events)}
        return sorted(found, key=lambda entry: (order[entry[0]], entry[1]))

    def found_by(self, tick: int) -> set[Entry]:
        """The values of earlier ticks that a tick, or a later one, reads."""
        latest = self.length - 1 - (self.first_tick if self.goes_on else 0)
        found = set()
        for lag in range(self.first_tick + 1, self.last_tick - self.length + 1):
            if 0 <= tick - lag <= latest:
                found |= {
                    (key, lag) for key in self._events if self._outlives(key, tick - lag, lag)
                }
        return found

    def _outlives(self, key: Key, iteration: int, lag: int) -> bool:
        """Whether a value of an iteration exists before lag `lag`, and is read at that or later."""
        # Past the end it is an iteration of the loop that goes on, which does the same with it.
        known = min(iteration, self.length - 1)
        events = [x for x in self._events[key] if known in self.iterations(x[2])]
        is_made = any(at < lag for at, _, _ in events)
        later = [reads for at, reads, _ in events if at >= lag]
        return is_made and bool(later) and later[0]

    @functools.cached_property
    def _events(self) -> dict[Key, list[tuple[int, bool, Instruction]]]:
        """For each value, in the order of an iteration: lag, whether it is read, by what."""
        events: dict[Key, list[tuple[int, bool, Instruction]]] = {}
        for each in sorted(self.instructions, key=lambda x: x.lag):
            reads, writes = _touched(each, self.plan.body)
            for key in dict.fromkeys((*reads, *writes)):
                events.setdefault(key, []).append((each.lag, key in reads, each))
        return events


def _is_ahead(each: Instruction) -> bool:
    return each.lag < 0 and not isinstance(each, FetchRow)


def _touched(each: Instruction, body: BlockPlan) -> tuple[list[Key], list[Key]]:
    """The values that an instruction reads and writes, of those that may be carried."""
    match each:
        case FetchShards(weight=weight):
            return [], [shards(weight)]
        case TakeShards(weights=weights) | TakeSlices(weights=weights):
            return [], [shards(x) for x in weights]
        case KeepSlices(weights=weights):
            return [shards(x) for x in weights], []
        case Encode(group=group):
            gathers = body.gather_groups[group].gathers
            made = [shards(x.weight) for x in gathers if x.keeps]
            return [shards(x.weight) for x in gathers], [*made, message(group)]
        case Send(group=group):
            return [message(group)], [message(group)]
        case Decode(group=group):
            return [message(group)], []
        case EncodeGradients(group=group):
            return [], [gradient(group)]
        case Reduce(group=group):
            return [gradient(group)], [gradient(group)]
        case PinGradients(groups=groups):
            return [gradient(x) for x in groups], [gradient(x) for x in groups]
        case Finish(group=group):
            return [gradient(group)], []
        case FetchRow(stack=stack):
            return [], [row(stack)]
        case Begin(rows=rows):
            return [row(x) for x in rows], []
        case Output(output=number):
            return [], [output(number)]
        case Collect(output=number):
            return [output(number)], []
        case FetchState(output=number):
            return [], [state(number)]
        case Update(output=number):
            return [output(number), state(number)], []
    return [], []


def pipeline_of(
    plan: LoopPlan,
    loop: Loop,
    uses: LoopUses,
    *,
    goes_on: bool = False,
    in_host: Iterable[ShardedParam] = (),
    host_rows: tuple[int, ...] = (),
    copies_wait: bool = False,
) -> Pipeline:
    """The pipeline of a loop.

    Args:
        plan: of the loop.
        loop: the loop.
        uses: of weights in it.
        goes_on: whether another loop continues with its gathers.
        in_host: the weights that its iterations copy from host memory.
        host_rows: the stacks that the program scans in host memory, by index.
        copies_wait: whether copies to and from stacks that the loop updates wait for a product in
            the middle of the body ([Note: write, then fetch] in `_execute.updates`).
    """
    emitter = _LoopEmitter(plan, loop, uses, tuple(in_host), host_rows, copies_wait)
    first, last = plan.num_first, loop.length - plan.num_last
    cuts = tuple(dict.fromkeys((0, first, last, loop.length)))
    listed = tuple(emitter.emit())
    return Pipeline(plan, loop.length, listed, cuts, goes_on, emitter.kept_ahead)


@dataclasses.dataclass(frozen=True, eq=False)
class _LoopEmitter:
    """Emits the instructions of one tick."""

    plan: LoopPlan
    loop: Loop
    uses: LoopUses
    in_host: tuple[ShardedParam, ...]
    host_rows: tuple[int, ...]
    copies_wait: bool

    @property
    def _end(self) -> int:
        return len(self.plan.body.block.operations)

    @property
    def _age(self) -> int:
        """Ticks until deferred gradients are used.

        They go to host memory one tick after they are reduced, so that the copy overlaps with all
        of an iteration, and so does the last reduction.
        """
        body = self.plan.body
        axes = (len(body.reduce_groups[x].axes) for x in body.deferred_groups)
        return max(axes, default=0) + bool(self.plan.host_gradients or self.plan.updates)

    @property
    def kept_ahead(self) -> tuple[ShardedParam, ...]:
        """The weights whose node slices are made in an earlier iteration than the one of use."""
        groups = (x for x in self.plan.body.gather_groups if x.prefetched)
        ahead = {gather.weight for group in groups for gather in group.gathers if gather.keeps}
        return tuple(x for x in self._kept if x in ahead)

    @property
    def _kept(self) -> list[ShardedParam]:
        made = slices_kept_in_program(self.plan.body)
        return [stack.layer for stack in self.uses.stacks if stack.layer in made]

    def emit(self) -> Iterator[Instruction]:
        plan, body, end = self.plan, self.plan.body, self._end
        taken = tuple(x.layer for x in self.uses.stacks if x.layer not in self.in_host)
        taken = (*self.uses.constants, *taken)
        if taken:
            yield TakeShards(at=0, weights=taken)
        yield from (x for x in self._fetches() if not x.lag)
        if self.kept_ahead:
            yield TakeSlices(at=0, weights=self.kept_ahead)
        if taken and any(group.prefetched for group in body.gather_groups):
            yield TakeShards(at=0, lag=-body.num_hops, weights=taken)
        yield Begin(at=0, rows=self.host_rows)
        listed = instructions_of(body, in_pipeline=plan.is_pipelined)
        yield from listed
        deferred = body.deferred_values()
        late = [i for i, x in enumerate(body.block.outputs) if x in deferred]
        known = [i for i in range(len(body.block.outputs)) if i not in late]
        known = [i for i in known if i not in self.uses.view_outputs]
        yield from (Output(at=end, output=i) for i in known)
        yield from self._reduce_deferred(
            {(x.group, x.axis) for x in listed if isinstance(x, Reduce)}
        )
        stacked = [i for i in known if i >= self.loop.num_carry]
        yield from (Collect(at=end, output=i) for i in stacked if i not in plan.updates)
        for number in stacked:
            if number in plan.updates:
                yield Update(at=end, lag=1, output=number, when=None)
                yield FetchState(at=end, output=number, when=self._fetches_after)
        yield from self._use_deferred(late)
        if self.kept_ahead:
            yield KeepSlices(at=end, lag=-body.num_hops, weights=self.kept_ahead)
        if kept := tuple(x for x in self._kept if x not in self.kept_ahead):
            yield KeepSlices(at=end, weights=kept)
        yield from (x for x in self._fetches() if x.lag)
        yield from (FetchRow(at=end, lag=-1, stack=i) for i in self.host_rows)
        if self.in_host or self.host_rows or plan.updates:
            yield JoinCopies(at=end)

    def _fetches(self) -> Iterator[Instruction]:
        """Copies from host memory: `window` ticks before the shards are encoded for the first time.

        They end a tick, unless an iteration copies for itself.
        """
        for weight in self.in_host:
            lag = -(self.plan.leads(weight)[-1] + self.plan.window)
            at, when = (self._end, self._fetches_after) if lag else (0, None)
            yield FetchShards(at=at, lag=lag, weight=weight, when=when)

    def _reduce_deferred(self, done: set[tuple[int, int]]) -> Iterator[Instruction]:
        """Reduce deferred groups over one axis in each tick, except what is `done` before."""
        body = self.plan.body
        for group in body.deferred_groups:
            for axis in range(len(body.reduce_groups[group].axes)):
                if (group, axis) not in done:
                    yield Reduce(at=self._end, lag=axis + 1, group=group, axis=axis)

    def _use_deferred(self, outputs: list[int]) -> Iterator[Instruction]:
        """Collect the deferred outputs, or update with them.

        [Note: the last updates] Where the last tick runs apart, it also copies the layers of all
        updates that are left, and near its end does the update of the iteration whose gradient is
        reduced by then. After it nothing computes that could hide these copies.
        """
        age, length, end = self._age, self.loop.length, self._end
        updated = [i for i in outputs if i in self.plan.updates]
        early = max(0, length - age) if self.plan.updates_last_apart and age > 1 else length
        yield from self._used(outputs, age, range(early) if early < length else None)
        for i in updated:
            stop = early + 1 if early < length else length
            fetch = FetchState(at=end, lag=age - 1, output=i, when=self._fetches_after)
            yield dataclasses.replace(fetch, iterations=range(stop if length >= age else 0))
        if early == length:
            return
        last = range(length - 1, length)
        for lag in range(min(age - 1, length)):
            for i in updated:
                fetch = FetchState(at=end, lag=lag, output=i, when=self._fetches_after)
                yield dataclasses.replace(fetch, iterations=range(length - 1 - lag, length - lag))
        yield HoldStates(at=end, iterations=last)
        if length >= age:
            yield from self._used(outputs, age - 1, range(early, early + 1))
            early += 1
        yield from self._used(outputs, age, range(early, length))

    def _used(self, outputs: list[int], lag: int, iterations: range | None) -> list[Instruction]:
        """Take, and collect or update with, the deferred outputs of some iterations."""
        when = self._writes_after if lag < self._age else None
        uses: list[Instruction] = [*deferred_instructions(self.plan.body, lag)]
        uses += [Output(at=self._end, lag=lag, output=i) for i in outputs]
        for i in outputs:
            if i in self.plan.updates:
                uses.append(Update(at=self._end, lag=lag, output=i, when=when))
            else:
                uses.append(Collect(at=self._end, lag=lag, output=i))
        is_empty = iterations is not None and not iterations
        return [dataclasses.replace(x, iterations=iterations) for x in uses if not is_empty]

    @functools.cached_property
    def _fetches_after(self) -> Value | None:
        """What copies from a stack that the loop updates wait for."""
        return known_after(self.plan.body, 1 / 4, in_any_order=True) if self.copies_wait else None

    @functools.cached_property
    def _writes_after(self) -> Value | None:
        """What the last tick's copy to such a stack waits for.

        The copies before it then need not end earlier: 1.1 ms less to wait for than with 3/4
        (Llama-7B, ZeRO-3, 2 x 8 H200).
        """
        return known_after(self.plan.body, 5 / 6) if self.copies_wait else None
