"""The instructions of a block: each names what is done, with which bucket or operation, and where.

`emit` turns a `BlockPlan` into a list of these; `_execute.block` has a handler for each kind, and
`_execute.ticks` for those that only loops have. They decide nothing. The order of a list is the
order in which a device's program is traced. XLA may change that order, except where a `Tie` or a
pin, which become optimization barriers, holds it (see [Note: ties] in `ties`).

In a loop an instruction has a lag: in tick `t` it works on iteration `t - lag`. A weight that is
gathered two iterations ahead of its use has lag -2, a gradient that is reduced one iteration later
lag 1. `pipeline` derives from the lags what a loop carries.

A group is an index into the plan's `gather_groups` or `reduce_groups`. An axis is an index into the
mesh axes that a group is sent over, in order: for gathers `node`, then `local`; for reductions
`local`, then `node`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from .._program import Value, movable_ops
from .param_uses import ShardedParam


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One thing that a device does: a copy, a collective, an operation of the program.

    Attributes:
        at: the operation of the block before which, or with which, it is done; the number of
            operations for what is done after the last.
        lag: in a loop, how many ticks after the operations of an iteration it is done for that
            iteration; negative: before.
        iterations: in a loop, those that it is done for; None: all of them.
    """

    at: int
    lag: int = 0
    iterations: range | None = None

    @property
    def parts(self) -> Iterator[Instruction]:
        """This instruction, with those of its tie before and after it."""
        tie: Tie | None = getattr(self, "tie", None)
        if not isinstance(tie, Tie):
            yield self
            return
        yield from itertools.chain.from_iterable(x.parts for x in tie.before)
        yield self
        yield from itertools.chain.from_iterable(x.parts for x in tie.after)


@dataclasses.dataclass(frozen=True)
class Tie:
    """A barrier: the operands of the instruction that has it exist only once other arrays do.

    Attributes:
        value: an array of the program that they wait for; None at a loop.
        before: done before the barrier.
        reduced: gradients that pass through it too, after their last reduction.
        copied: gradients that it waits for, until their copies are in host memory.
        buckets: groups of gradients in flight that pass through it.
        after: done after the barrier.
    """

    value: Value | None
    before: tuple[Instruction, ...] = ()
    reduced: tuple[Value, ...] = ()
    copied: tuple[Value, ...] = ()
    buckets: tuple[int, ...] = ()
    after: tuple[Instruction, ...] = ()


# Weights.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetch(Instruction):
    """Copy the shards of a group from host memory to the device."""

    group: int
    tie: Tie | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encode(Instruction):
    """Encode the shards of a group as messages, which are ready before a reader of `pin` runs."""

    group: int
    tie: Tie | None
    pin: Value | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Send(Instruction):
    """All-gather the messages of a group over one axis; before it, they pass the barrier `pin`.

    With `after_decode`, a message for a later iteration waits until this one's is decoded.
    """

    group: int
    axis: int
    pin: Value | None
    after_decode: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode(Instruction):
    """Decode a gathered group into full weights."""

    group: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drop(Instruction):
    """Drop full weights; each is named by its weight and the operations that its gather applied."""

    weights: tuple[tuple[ShardedParam, tuple[movable_ops.Op, ...]], ...]


# Operations of the program.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Instruction):
    """Run operation `at`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOnShards(Instruction):
    """Run an operation, which the plan moved after a reduction, on reduced shards."""

    operation: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zeros(Instruction):
    """Make the reduced shard of a gradient that is known to be zero; nothing is sent."""

    value: Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delay(Instruction):
    """Make the constant that operation `at`, a scatter, adds to; not before `value` exists."""

    constant: int  # the operation that makes it
    value: Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishLoss(Instruction):
    """Compute the loss before a reader of `pin` runs."""

    loss: Value
    pin: Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartLoop(Instruction):
    """Start the gathers of a loop's first layers."""

    loop: int
    tie: Tie | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunLoop(Instruction):
    """Run the loop at operation `at`; its carry and the buckets of `tie` pass a barrier first."""

    tie: Tie


# Gradients.


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeGradients(Instruction):
    """Encode the gradients of a group, all of which have been made, for its first axis.

    With `after_sent`, they wait until the message of the iteration before has been sent: otherwise
    XLA may hold both.
    """

    group: int
    after_sent: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduce(Instruction):
    """Reduce a group over one axis, and encode it for the next; not before `after` exists."""

    group: int
    axis: int
    after: Value | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PinGradients(Instruction):
    """Let groups in flight pass a barrier before a reader of `pin` runs."""

    groups: tuple[int, ...]
    pin: Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finish(Instruction):
    """Take the gradients, sums or means, out of a fully reduced group."""

    group: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store(Instruction):
    """Put a reduced gradient in its place: as a mean in host memory, if the plan says so."""

    value: Value


# Loops: an iteration's part of what lies outside of the loop.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakeShards(Instruction):
    """Take an iteration's shards of weights out of their stacks in device memory."""

    weights: tuple[ShardedParam, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchShards(Instruction):
    """Copy an iteration's shards of a weight from host memory, not before `when` exists."""

    weight: ShardedParam
    when: Value | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakeSlices(Instruction):
    """Take an iteration's node slices of weights out of their stacks (hpZ)."""

    weights: tuple[ShardedParam, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepSlices(Instruction):
    """Put the node slices that an iteration has made into their stacks (hpZ)."""

    weights: tuple[ShardedParam, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchRow(Instruction):
    """Copy an iteration's row of a stack that the program scans from host memory."""

    stack: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begin(Instruction):
    """Begin an iteration: its carry, and its rows of the stacks that the program scans."""

    rows: tuple[int, ...]  # those that have been copied from host memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(Instruction):
    """Take output `output` of an iteration; a final gradient is divided to its mean."""

    output: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collect(Instruction):
    """Put output `output` of an iteration into its stack."""

    output: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchState(Instruction):
    """Copy an iteration's layer of a leaf and its optimizer state, once `when` exists."""

    output: int  # the gradient of the leaf
    when: Value | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update(Instruction):
    """Update an iteration's layer of a leaf, and copy it back; not before `when` exists."""

    output: int
    when: Value | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HoldStates(Instruction):
    """Let the stacks of the leaves that are updated wait for the layers copied from them.

    XLA writes a stack in place only if nothing reads the old one later.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hold(Instruction):
    """The barriers of an instruction that is left out since it has no iteration in these ticks."""

    tie: Tie | None
    pin: Value | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinCopies(Instruction):
    """Let the next tick wait for the copies of this one, so that they overlap with its operations.

    Otherwise XLA waits for some of them before the operations begin.
    """
