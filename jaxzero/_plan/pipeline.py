"""The pipeline of a loop: what one tick does, and what it carries to the next.

The instructions of a body have lags: in tick `t`, one of lag `l` works on iteration `t - l`. What
the loop carries follows from one rule:

    A value that is written at lag `a` and read at lag `b` is carried for `b - a` ticks.

A `Key` names such a value, and an `Entry` is a key with the lag at which a tick finds the value.

The operations of iteration `t` run in tick `t`, so ticks `0` to `length - 1` are the program's
loop. Gathers for the first iterations come before it, reductions of the last ones after it. `cuts`
divides the ticks of the loop into pieces, each of which is a loop of its own; ticks outside are
executed one by one.

An instruction that has no iteration in any tick of a piece is left out of that piece. If it has an
iteration in some of the ticks, it is done in all of them; in the other ticks it works on its first
or last iteration. Such extra work is harmless. Its result is read only by instructions that have no
iteration either, or it is overwritten (`Collect`) or masked (`Update`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from .block_plan import BlockPlan, LoopPlan
from .instructions import (
    Begin,
    Collect,
    Decode,
    Drop,
    Encode,
    EncodeGradients,
    FetchRow,
    FetchShards,
    FetchState,
    Finish,
    Hold,
    Instruction,
    KeepSlices,
    Output,
    PinGradients,
    Reduce,
    Run,
    RunLoop,
    Send,
    StartLoop,
    TakeShards,
    TakeSlices,
    Update,
)
from .param_uses import ShardedParam

Key = tuple[str, Any]  # a value of an iteration that may be carried, such as a bucket
Entry = tuple[Key, int]  # the value of iteration `t - lag` that tick `t` finds


def shards(weight: ShardedParam) -> Key:
    """Return the key of the shards of a weight; with hpZ, of the node slice that is kept."""
    return "shards", weight


def message(group: int) -> Key:
    """Return the key of the encoded weights of a gather group, from `Encode` over each `Send`.

    The message keeps this key whichever axes it has been sent over.
    """
    return "message", group


def gradient(group: int) -> Key:
    """Return the key of the bucket of a reduce group, whichever axes it has been reduced over."""
    return "gradient", group


def row(stack: int) -> Key:
    """Return the key of one layer of the stack numbered `stack`, copied from host memory."""
    return "row", stack


def output(number: int) -> Key:
    """Return the key of output `number` of the body."""
    return "output", number


def state(number: int) -> Key:
    """Return the key of what an update reads: a layer of a leaf and of its optimizer state.

    `number` is the index of the output that is the leaf's gradient.
    """
    return "state", number


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """The schedule of one loop.

    Attributes:
        plan: the plan of the loop.
        length: the number of its iterations.
        instructions: the instructions of one tick, in order.
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

    @functools.cached_property
    def first_gathers(self) -> tuple[Instruction, ...]:
        """The instructions of the ticks before the loop, which work on its first iterations.

        An instruction's lag decides in which of these ticks it has an iteration. Copies of rows of
        activations are left out: they are made when the loop begins.
        """
        return tuple(x for x in self.instructions if _is_ahead(x))

    @functools.cached_property
    def copies(self) -> dict[Key, Instruction]:
        """For each value that is copied from host memory, one instruction that copies it."""
        kinds = (FetchShards, FetchRow, FetchState)
        return {
            _touched(x, self.plan.body)[1][0]: x for x in self.instructions if isinstance(x, kinds)
        }

    @functools.cached_property
    def first_tick(self) -> int:
        """The tick in which the first gather, or the first copy for a gather, begins."""
        return min((x.lag for x in self.first_gathers), default=0)

    @functools.cached_property
    def first_lag(self) -> int:
        """The smallest lag of all instructions, or 0; it is that of a gather or of a copy."""
        return min(0, *(x.lag for x in self.instructions))

    @functools.cached_property
    def last_tick(self) -> int:
        """The tick at which the loop has ended: one more than the last tick that does anything."""
        return self.length + max(0, *(x.lag for x in self.instructions))

    def iterations(self, each: Instruction) -> range:
        """Return the iterations that an instruction is done for."""
        known = range(self.length) if each.iterations is None else each.iterations
        if self.goes_on and _is_ahead(each):
            return range(known.start, self.length - self.first_tick)
        return known

    def has_iteration(self, each: Instruction, ticks: range) -> bool:
        """Return whether an instruction has an iteration in any of the ticks `ticks`."""
        known = self.iterations(each)
        if not self.length:  # the body is traced nevertheless
            return True
        return max(ticks.start - each.lag, known.start) < min(ticks.stop - each.lag, known.stop)

    def in_ticks(self, ticks: range) -> Iterator[Instruction]:
        """Yield the instructions of a piece of the loop, the ticks `ticks`.

        An instruction that is left out leaves its barriers: XLA then compiles each piece of the
        loop alike, so that losses and gradients have the same bits as if the loop were one piece.
        Where a barrier reads a value, XLA does not replace the transpose of a product by a swap of
        its factors, which may sum in another order.
        """
        for step in self.instructions:
            if self.has_iteration(step, ticks):
                yield step
            elif isinstance(step, (Encode, Send, PinGradients)) and ticks.stop <= self.length:
                yield Hold(at=step.at, tie=getattr(step, "tie", None), pin=step.pin)

    def carried(self, ticks: range) -> list[Entry]:
        """Return the entries of the values that a loop over `ticks` carries from tick to tick."""
        span = 1 + self.last_tick - self.length - self.first_lag
        # Far from both ends all ticks find the same.
        near = {*ticks[: span + 1], *ticks[-span:], ticks.stop}
        entries: set[Entry] = set()
        for tick in near:
            entries |= self.found_by(tick)
        order = {key: i for i, key in enumerate(self._events)}
        return sorted(entries, key=lambda entry: (order[entry[0]], entry[1]))

    def found_by(self, tick: int) -> set[Entry]:
        """Return the entries of values made before tick `tick` that it or a later tick reads."""
        latest = self.length - 1 - (self.first_tick if self.goes_on else 0)
        entries = set()
        for lag in range(self.first_lag + 1, self.last_tick - self.length + 1):
            if 0 <= tick - lag <= latest:
                entries |= {
                    (key, lag) for key in self._events if self._outlives(key, tick - lag, lag)
                }
        return entries

    def _outlives(self, key: Key, iteration: int, lag: int) -> bool:
        """Return whether a loop has to carry the value of `key` and `iteration` at lag `lag`.

        It has to if the value is made at a smaller lag, and is read at `lag` or a larger lag before
        it is made again.
        """
        # Past the end it is an iteration of the loop that goes on, which does the same with it.
        known = min(iteration, self.length - 1)
        events = [x for x in self._events[key] if known in self.iterations(x[2])]
        is_made = any(at < lag for at, _, _ in events)
        later = [reads for at, reads, _ in events if at >= lag]
        return is_made and bool(later) and later[0]

    def __str__(self) -> str:
        """Return a table of instructions: lag, name, and for how many ticks a result is carried."""
        rows = [("lag", "instruction", "carried")]
        for step in self.instructions:
            text = described(step, self.plan.body)
            if text and isinstance(step, Run) and rows[-1][1].startswith("run "):
                rows[-1] = ("0", f"{rows[-1][1]}, {text.removeprefix('run ')}", "")
            elif text:
                rows.append((f"{step.lag:+d}" if step.lag else "0", text, self._carried_for(step)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    def _carried_for(self, each: Instruction) -> str:
        """Return, as text, for how many ticks an instruction's result is carried; "" for none."""
        _, made = _touched(each, self.plan.body)
        later = [
            at - each.lag
            for key in made[-1:]
            for at, reads, other in self._events[key]
            if reads
            and at >= each.lag
            and other is not each
            and not isinstance(other, PinGradients)
        ]
        ticks = min(later, default=0)
        return f"{ticks} tick{'s' * (ticks > 1)}" if ticks else ""

    @functools.cached_property
    def _events(self) -> dict[Key, list[tuple[int, bool, Instruction]]]:
        """For each value, the instructions that read or write it, by ascending lag.

        The triples are an instruction's lag, whether it reads the value, and the instruction.
        """
        events: dict[Key, list[tuple[int, bool, Instruction]]] = {}
        for each in sorted(self.instructions, key=lambda x: x.lag):
            reads, writes = _touched(each, self.plan.body)
            for key in dict.fromkeys((*reads, *writes)):
                events.setdefault(key, []).append((each.lag, key in reads, each))
        return events


def described(each: Instruction, body: BlockPlan) -> str:
    """Return an instruction in words; "" if the printed pipeline leaves it out."""
    match each:
        case TakeShards(weights=weights):
            return f"take the shards {', '.join(x.name for x in weights)}"
        case TakeSlices(weights=weights):
            return f"take the node slices {', '.join(x.name for x in weights)}"
        case KeepSlices(weights=weights):
            return f"keep the node slices {', '.join(x.name for x in weights)}"
        case FetchShards(weight=weight):
            return f"copy the shard {weight.name} from host memory"
        case FetchRow(stack=stack):
            return f"copy a row of stack {stack} from host memory"
        case FetchState(output=number):
            return f"copy what the update with output {number} reads from host memory"
        case Encode(group=group):
            return f"encode weights {group}"
        case Send(group=group, axis=axis):
            return f"all-gather weights {group} over {body.gather_axes[axis]}"
        case Decode(group=group):
            return f"decode weights {group}"
        case Drop(weights=dropped):
            return f"drop {', '.join(weight.name for weight, _ in dropped)}"
        case RunLoop(at=at):
            return f"run loop {at}"
        case Run(at=at):
            return f"run {body.block.operations[at].name}"
        case EncodeGradients(group=group):
            return f"encode gradients {group}"
        case Reduce(group=group, axis=axis):
            return f"reduce gradients {group} over {body.reduce_groups[group].axes[axis]}"
        case Collect(output=number):
            return f"put output {number} into its stack"
        case Update(output=number):
            return f"update the leaf whose gradient is output {number}"
    return ""


def _is_ahead(each: Instruction) -> bool:
    return each.lag < 0 and not isinstance(each, FetchRow)


def _touched(each: Instruction, body: BlockPlan) -> tuple[list[Key], list[Key]]:
    """Return the keys of the values that an instruction reads, and of those that it writes."""
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
        case StartLoop(loop=index) | RunLoop(at=index):
            uses = body.uses.loops[index]
            return [shards(x) for x in (*uses.constants, *(x.view.weight for x in uses.stacks))], []
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
