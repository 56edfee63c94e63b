"""Turn a `BlockPlan` into a list of instructions, which fixes the order of everything in a block.

The operations run in the order of the program. A gather is sent before the operation that its
group's `issues` name.

A tie is a barrier that makes a gather wait for a value (see [Note: ties] in `ties`). A bucket of
gradients is encoded once its last gradient is made. It is reduced over its first axis at the next
tie to another value, and over its second axis one tie later; its gradients pass through the tie
after that. Several buckets may be completed between two ties, because weights were sent early; then
the completion of each bucket sends the earlier buckets over their next axis. A deferred group of a
loop's body is encoded, and reduced in later ticks (`_reduce_early`, `emit_loop`).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable

from .._program import Barrier, Constant, Loop, Operation, Value, movable_ops
from .block_plan import BlockPlan, GatherGroup, LoopPlan
from .instructions import (
    Decode,
    Delay,
    Drop,
    Encode,
    EncodeGradients,
    Fetch,
    Finish,
    FinishLoss,
    Instruction,
    PinGradients,
    Reduce,
    Run,
    RunLoop,
    RunOnShards,
    Send,
    StartLoop,
    Store,
    Tie,
    Zeros,
)
from .lifetimes import Gather
from .param_uses import ShardedParam

_emitted: weakref.WeakKeyDictionary[BlockPlan, dict[bool, tuple[Instruction, ...]]] = (
    weakref.WeakKeyDictionary()
)


def instructions_of(plan: BlockPlan, *, in_pipeline: bool = False) -> tuple[Instruction, ...]:
    """Return the instructions of a block, in order.

    Args:
        plan: the plan of the block.
        in_pipeline: whether the block is the body of a pipelined loop. The instructions that a loop
            adds for each iteration, such as copies of its layers, are not in the list (see
            `pipeline`).
    """
    known = _emitted.setdefault(plan, {})
    if in_pipeline not in known:
        known[in_pipeline] = _Emitter(plan, in_pipeline).emit()
    return known[in_pipeline]


def deferred_instructions(plan: BlockPlan, lag: int) -> tuple[Instruction, ...]:
    """Return instructions that take the gradients out of a body's deferred, reduced groups.

    Each instruction has the lag `lag`.
    """
    emitter = _Emitter(plan, True)
    emitter.at = len(plan.block.operations)
    for group in plan.deferred_groups:
        emitter.finish(group)
    emitter.store_all(emitter.take_reduced())
    return tuple(dataclasses.replace(x, lag=lag) for x in emitter.done)


class _Emitter:
    """The state of a block while its instructions are emitted one operation after the other."""

    def __init__(self, plan: BlockPlan, in_pipeline: bool):
        self.plan = plan
        self.operations = plan.block.operations
        self.done: list[Instruction] = []
        self.at = 0
        self._in_pipeline = in_pipeline
        self._known: set[Value] = set()  # values that have an array: no views, no unreduced ones
        self._in_flight: list[tuple[int, int]] = []  # groups of gradients, and axes done
        self._finished: list[Value] = []  # reduced gradients that wait for a tie
        self._copied: list[Value] = []  # gradients on their way to host memory
        self._tied_to: Value | None = None  # the value of the last tie
        self._made_since = False  # whether a group of gradients was made since the last tie
        self._full: dict[tuple[ShardedParam, tuple[movable_ops.Op, ...]], Gather] = {}
        # For each operation, the groups of weights for which something is done before it.
        self._gathers_at: dict[int | None, list[int]] = {}
        for i, group in enumerate(plan.gather_groups):
            # Once for an operation before which a group is both sent and decoded.
            for at in {group.fetch, *group.issues, group.at}:
                self._gathers_at.setdefault(at, []).append(i)
        groups = plan.reduce_groups
        self._group_of = {x: i for i, group in enumerate(groups) for x in group.values}
        self._unmade = {i: len(group.values) for i, group in enumerate(groups)}
        # For each value, the operations on shards that read it; for each of these, how many of the
        # values that it reads are not reduced yet.
        self._readers: dict[Value, list[int]] = {}
        self._missing: dict[int, int] = {}
        for index in plan.gradients.on_shards:
            inputs = {x for x in self.operations[index].inputs if isinstance(x, Value)}
            self._missing[index] = len(inputs)
            for value in inputs:
                self._readers.setdefault(value, []).append(index)
        self._constants = {
            op.outputs[0]: i
            for i, op in enumerate(self.operations)
            if op.name == "broadcast_in_dim" and isinstance(op.inputs[0], Constant)
        }

    def emit(self) -> tuple[Instruction, ...]:
        plan = self.plan
        for value in plan.block.inputs:
            self._make(value)
        for at in range(len(self.operations) + 1):
            self.at = at
            if self.at in plan.reduce_early:
                self._reduce_early(plan.reduce_early[self.at])
            if plan.loops or at in self._gathers_at:
                self._gather()
            self._finish_loss()
            if self.at < len(self.operations):
                self._run(self.operations[self.at])
                self._drop()
        # No tie is left that the last gradients could wait for.
        while any(done < self._num_axes(group) for group, done in self._in_flight):
            self._reduce_in_flight()
        self.store_all(self.take_reduced())
        return tuple(self.done)

    def _finish_loss(self) -> None:
        """Emit the barrier that makes backward wait for the loss, if this operation reads it."""
        loss, before = self.plan.block.outputs[0], self.plan.loss_before
        if before is None or self.at != before[0]:
            return
        if isinstance(loss, Value) and {loss, before[1]} <= self._known:
            self.done.append(FinishLoss(at=self.at, loss=loss, pin=before[1]))

    # Weights.

    def _gather(self) -> None:
        groups = [(i, self.plan.gather_groups[i]) for i in self._gathers_at.get(self.at, ())]
        for i, group in groups:
            if group.fetch == self.at:
                tie = self._tie(group.fetch_tie) if self.plan.fetched(i) else None
                self.done.append(Fetch(at=self.at, group=i, tie=tie))
        # Where a group is sent ahead over its last axis, this iteration's is decoded before.
        first = {i for i, x in groups if x.prefetched and x.at == x.issues[-1] == self.at}
        for i in sorted(first):
            self._decode(i)
        loops = {i: x for i, x in self.plan.loops.items() if self._starts(x)}
        # Messages that are needed first are sent first.
        for i, group in groups:
            if not loops or group.at <= min(loops):
                self._send(i, group)
        for index, loop in loops.items():
            gathers = any(group.prefetched for group in loop.body.gather_groups)
            fetches = any(stack.in_host for stack in self.plan.uses.loops[index].stacks)
            tie = self._tie(loop.tie) if gathers or fetches else None
            self.done.append(StartLoop(at=self.at, loop=index, tie=tie))
        for i, group in groups:
            if loops and group.at > min(loops):
                self._send(i, group)
        for i, group in groups:
            if group.at == self.at and i not in first:
                self._decode(i)

    def _starts(self, loop: LoopPlan) -> bool:
        """Return whether a loop's first gathers are sent before the current operation."""
        return loop.issue == self.at and loop.is_pipelined and loop.continues is None

    def _send(self, number: int, group: GatherGroup) -> None:
        """Emit the encoding and the sends of a group that are due before the current operation."""
        for axis, issue in enumerate(group.issues):
            if issue != self.at:
                continue
            pin = self._if_known(group.ties[axis])
            lag = axis - self.plan.num_hops if group.prefetched else 0
            if not axis:
                tie = self._tie(group.ties[axis])
                self.done.append(Encode(at=self.at, lag=lag, group=number, tie=tie, pin=pin))
                pin = None
            if axis in self.plan.hops(group):
                waits = lag < 0 and axis == self.plan.num_hops - 1
                self.done.append(
                    Send(at=self.at, lag=lag, group=number, axis=axis, pin=pin, after_decode=waits)
                )

    def _decode(self, group: int) -> None:
        self.done.append(Decode(at=self.at, group=group))
        gathers = self.plan.gather_groups[group].gathers
        self._full.update(((x.weight, x.ops), x) for x in gathers)

    def _drop(self) -> None:
        dead = tuple(key for key, gather in self._full.items() if gather.until == self.at)
        if dead:
            self.done.append(Drop(at=self.at, weights=dead))
        for key in dead:
            del self._full[key]

    # Operations.

    def _run(self, operation: Operation) -> None:
        first = operation.outputs[0] if operation.outputs else None
        views = self.plan.uses.views
        is_passed = isinstance(operation, Barrier)
        if self.at in self.plan.gradients.on_shards:
            return  # it runs once its inputs are reduced
        if isinstance(operation, Loop):
            self.done.append(RunLoop(at=self.at, tie=self._tie_loop()))
        elif first in views and not is_passed:
            return
        elif first in self.plan.zeros and not is_passed:
            assert first is not None
            self.done.append(Zeros(at=self.at, value=first))
            self._store(first)
            return
        else:
            if operation.name.startswith("scatter"):
                self._make_target(operation)
            self.done.append(Run(at=self.at))
        for value in operation.outputs:
            if value not in views:
                self._make(value)

    def _make_target(self, operation: Operation) -> None:
        target, *_, scattered = operation.inputs
        if target in self._constants and scattered in self._known:
            assert isinstance(target, Value) and isinstance(scattered, Value)
            self.done.append(Delay(at=self.at, constant=self._constants[target], value=scattered))

    def _make(self, value: Value) -> None:
        """Record that a value has been made; encode its group of gradients if this completes it."""
        group = self._group_of.get(value)
        if group is None:
            self._store(value)
            return
        self._unmade[group] -= 1
        if self._unmade[group]:
            return
        is_deferred = self.plan.reduce_groups[group].deferred
        in_turn = self._in_pipeline and is_deferred and self._num_axes(group)
        if in_turn and not self._is_reduced(group):
            # The message of the iteration before is sent: this one is written in its place.
            self.done.append(Reduce(at=self.at, lag=1, group=group, axis=0))
        waits = self._in_pipeline and is_deferred and not self.plan.reduce_early
        self.done.append(EncodeGradients(at=self.at, group=group, after_sent=waits))
        if is_deferred:
            return
        if self.plan.overlaps:
            tie = self._if_known(self.plan.reduce_groups[group].tie)
            if self._made_since and tie is not None:
                self._reduce_in_flight(tie)
            self._in_flight.append((group, 0))
            self._made_since = True
        else:
            for axis in range(self._num_axes(group)):
                self.done.append(Reduce(at=self.at, group=group, axis=axis))
            self.finish(group)

    def _store(self, value: Value) -> None:
        """Record that a value exists, and emit the operations on shards that waited for it."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            self._known.add(value)
            for index in self._readers.get(value, ()):
                self._missing[index] -= 1
                if not self._missing[index]:
                    self.done.append(RunOnShards(at=self.at, operation=index))
                    waiting.append(self.operations[index].outputs[0])

    def _if_known(self, value: Value | None) -> Value | None:
        return value if value in self._known else None

    # Gradients.

    def _is_reduced(self, group: int) -> bool:
        """Return whether a `Reduce` of a group is emitted already.

        In a pipelined loop such a `Reduce` works on the gradients of the previous iteration.
        """
        return any(isinstance(x, Reduce) and x.group == group for x in self.done)

    def _num_axes(self, group: int) -> int:
        return len(self.plan.reduce_groups[group].axes)

    def _reduce_in_flight(self, tie: Value | None = None) -> None:
        """Reduce every group in flight over its next axis.

        A group is sent over its first axis once it is encoded and the value that its plan names
        (`after`) exists, and over each further axis once `tie` exists.
        """
        for i, (group, done) in enumerate(self._in_flight):
            wanted = None if done else self.plan.reduce_groups[group].after
            after = self._if_known(wanted)
            is_early = wanted is not None and after is None
            if done < self._num_axes(group) and not is_early:
                waits = tie if done else after
                self.done.append(Reduce(at=self.at, group=group, axis=done, after=waits))
                self._in_flight[i] = group, done + 1

    def _reduce_early(self, pin: Value) -> None:
        """Reduce the groups in flight over their first axis, before any operation that reads `pin`.

        In a pipelined loop these are the deferred groups of the previous iteration.
        """
        if self._in_pipeline:
            groups = tuple(x for x in self.plan.deferred_groups if not self._is_reduced(x))
            self.done += [
                Reduce(at=self.at, lag=1, group=x, axis=0) for x in groups if self._num_axes(x)
            ]
            if groups and pin in self._known:
                self.done.append(PinGradients(at=self.at, lag=1, groups=groups, pin=pin))
            return
        for i, (group, done) in enumerate(self._in_flight):
            if not done:
                self.done.append(Reduce(at=self.at, group=group, axis=0))
                self._in_flight[i] = group, 1
        first = tuple(group for group, done in self._in_flight if done == 1)
        if first and pin in self._known:
            self.done.append(PinGradients(at=self.at, groups=first, pin=pin))

    def finish(self, group: int) -> None:
        self.done.append(Finish(at=self.at, group=group))
        self._finished.extend(self.plan.reduce_groups[group].values)

    def take_reduced(self) -> tuple[Value, ...]:
        """Return the gradients whose reduction has ended since the last call."""
        ended = [group for group, done in self._in_flight if done == self._num_axes(group)]
        self._in_flight = [x for x in self._in_flight if x[0] not in ended]
        for group in ended:
            self.finish(group)
        finished, self._finished = self._finished, []
        return tuple(finished)

    def store_all(self, reduced: Iterable[Value]) -> None:
        for value in reduced:
            self.done.append(Store(at=self.at, value=value))
            if value in self.plan.host_gradients:
                self._copied.append(value)
            self._store(value)

    # Ties.

    def _tie(self, value: Value | None) -> Tie | None:
        """Return a tie to `value`; None if the value does not exist yet.

        If this is the first tie to `value`, the groups in flight are sent over their next axis
        before the tie.
        """
        if value is None or value not in self._known:
            return None
        start, reduced = len(self.done), ()
        if self._tied_to != value:
            self._tied_to, self._made_since = value, False
            reduced = self.take_reduced()
            self._reduce_in_flight(value)
        return self._tied(value, start, reduced)

    def _tie_loop(self) -> Tie:
        """Return the tie before a loop, and first reduce groups in flight over their next axis.

        Groups are reduced over their last axis after the loop. A group is much smaller after its
        first axis, and without the barrier XLA may hold the groups at their larger size until the
        loop, which may take long, has ended.
        """
        start = len(self.done)
        self._reduce_in_flight()
        reduced = self.take_reduced()
        buckets = tuple(group for group, _ in self._in_flight)
        return self._tied(None, start, reduced, buckets)

    def _tied(
        self,
        value: Value | None,
        start: int,
        reduced: tuple[Value, ...],
        buckets: tuple[int, ...] = (),
    ) -> Tie:
        copied, self._copied = self._copied, []
        before = self._taken(start)
        self.store_all(reduced)
        if value is None:
            self._reduce_in_flight()
        return Tie(value, before, reduced, tuple(copied), buckets, self._taken(start))

    def _taken(self, start: int) -> tuple[Instruction, ...]:
        """Remove and return the instructions that were emitted after the first `start` of them."""
        taken = tuple(self.done[start:])
        del self.done[start:]
        return taken
