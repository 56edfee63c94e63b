"""Emit the instructions of a pipelined loop: those of its body, and those that connect iterations.

Gathers run ahead of the iteration that uses the weights, and reductions run behind the iteration
that makes the gradients, each by one tick for each mesh axis. Copies from host memory run ahead of
gathers, and copies to host memory behind reductions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

from .._program import Loop, Value
from .block_plan import LoopPlan
from .emit import deferred_instructions, instructions_of
from .hpz import slices_kept_in_program
from .instructions import (
    Begin,
    Collect,
    FetchRow,
    FetchShards,
    FetchState,
    HoldStates,
    Instruction,
    JoinCopies,
    KeepSlices,
    Output,
    Reduce,
    TakeShards,
    TakeSlices,
    Update,
)
from .layer_memory import known_after
from .param_uses import LoopUses, ShardedParam
from .pipeline import Pipeline


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
    """Return the pipeline of a loop: the instructions of one tick, with their lags.

    Args:
        plan: the plan of the loop.
        loop: the loop, an operation of the program.
        uses: how the loop uses weights.
        goes_on: whether the next loop takes over the gathers in flight at the end of this one.
        in_host: the weights whose shards each iteration copies from host memory.
        host_rows: the indices of the stacks that the program scans and that lie in host memory.
        copies_wait: whether copies to and from stacks that the loop updates wait for products in
            the middle of the body ([Note: write, then fetch] in `_execute.ticks`).
    """
    emitter = _LoopEmitter(plan, loop, uses, tuple(in_host), host_rows, copies_wait)
    first, last = plan.num_first, loop.length - plan.num_last
    cuts = (0, *dict.fromkeys(x for x in (first, last) if 0 < x < loop.length), loop.length)
    listed = tuple(emitter.emit())
    return Pipeline(plan, loop.length, listed, cuts, goes_on, emitter.kept_ahead)


@dataclasses.dataclass(frozen=True, eq=False)
class _LoopEmitter:
    """Emits the instructions of one tick of a loop."""

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
        """The number of ticks from making a deferred gradient to using it.

        Gradients that go to host memory, or update a leaf, are used one tick after their last
        reduction, so that both the copy and the reduction overlap with a whole iteration.
        """
        body = self.plan.body
        axes = (len(body.reduce_groups[x].axes) for x in body.deferred_groups)
        return max(axes, default=0) + bool(self.plan.host_gradients or self.plan.updates)

    @property
    def kept_ahead(self) -> tuple[ShardedParam, ...]:
        """The weights whose node slices are made in an iteration before the one that uses them."""
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
            # For groups that are not sent ahead. Of the others `decode` reads only codec and
            # layout, and XLA removes the slice.
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
        early = [i for i in range(len(body.block.outputs)) if i not in late]
        early = [i for i in early if i not in self.uses.view_outputs]
        yield from (Output(at=end, output=i) for i in early)
        yield from self._reduce_deferred(
            {(x.group, x.axis) for x in listed if isinstance(x, Reduce)}
        )
        stacked = [i for i in early if i >= self.loop.num_carry]
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
        """Yield the copies of shards from host memory, `window` ticks before they are encoded.

        A copy for a later iteration stands at the end of a tick; a copy for the same iteration
        stands at the start of the tick.
        """
        for weight in self.in_host:
            lag = -(self.plan.leads(weight)[-1] + self.plan.window)
            at, when = (self._end, self._fetches_after) if lag else (0, None)
            yield FetchShards(at=at, lag=lag, weight=weight, when=when)

    def _reduce_deferred(self, done: set[tuple[int, int]]) -> Iterator[Instruction]:
        """Yield the reductions of deferred groups, over one axis in each tick.

        `done` has pairs of a group and an axis that are left out, since the body reduces them.
        """
        body = self.plan.body
        for group in body.deferred_groups:
            for axis in range(len(body.reduce_groups[group].axes)):
                if (group, axis) not in done:
                    yield Reduce(at=self._end, lag=axis + 1, group=group, axis=axis)

    def _use_deferred(self, outputs: list[int]) -> Iterator[Instruction]:
        """Yield the instructions that put deferred gradients into stacks, or update leaves.

        `outputs` are the indices of the body's outputs that are such gradients.

        [Note: the last updates] If the last tick of a loop runs outside of it, that tick copies
        from host memory the layers of all updates that are still to be done. Near its end that tick
        also does the update whose gradient is reduced by then. Later ticks compute nothing that
        could hide these copies.
        """
        age, length, end = self._age, self.loop.length, self._end
        updated = [i for i in outputs if i in self.plan.updates]
        early = max(0, length - age) if self.plan.updates_last_apart and age > 1 else length
        yield from self._used(outputs, age, range(early) if early < length else None)
        stop = early + 1 if length >= age else 0
        stop = length if early == length else stop
        for i in updated:
            fetch = FetchState(at=end, lag=age - 1, output=i, when=self._fetches_after)
            yield dataclasses.replace(fetch, iterations=range(stop))
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
        """Return instructions that put some iterations' gradients into stacks or update leaves.

        Args:
            outputs: the indices of the body's outputs that are these gradients.
            lag: the lag of the instructions.
            iterations: the iterations that the instructions are done for; None: all.
        """
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
        """The value that an iteration's copies from host memory wait for; None: for nothing."""
        # A quarter, in any order: see [Note: write, then fetch] in `_execute.ticks`.
        return known_after(self.plan.body, 1 / 4, in_any_order=True) if self.copies_wait else None

    @functools.cached_property
    def _writes_after(self) -> Value | None:
        """The value that the last tick's copies to host memory wait for; None: for nothing.

        The value exists after 5/6 of the body's work. If these copies began after 3/4 of it, the
        copies before them would have to end sooner, and the step would wait 1.1 ms longer
        (Llama-7B, ZeRO-3, 2 x 8 H200, predicted).
        """
        return known_after(self.plan.body, 5 / 6) if self.copies_wait else None
