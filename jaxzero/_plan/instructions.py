"""The instructions of a block: each says what is done, with which bucket or operation, and where.

`emit` turns a `BlockPlan` into a list of instructions. `_execute.block` has a handler for each
kind, and `_execute.ticks` for the kinds that only loops have. Instructions leave nothing to decide.
The order of the list is the order in which a device's program is traced. XLA may change that order,
except where a `Tie` or a pin, which become optimization barriers, holds it (see [Note: ties] in
`ties`).

In a loop an instruction has a lag: in tick `t` it works on iteration `t - lag`. A weight that is
gathered two iterations ahead of its use has lag -2, a gradient that is reduced one iteration later
lag 1. `pipeline` derives from the lags what a loop carries.

Fields named `group` or `groups` are indices into the plan's `gather_groups` or `reduce_groups`. An
axis is an index into the mesh axes that a group is sent over, in order: for gathers `node`, then
`local`; for reductions `local`, then `node`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from .._program import Value, movable_ops
from .param_uses import ShardedParam


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One thing that a device does: a copy, a collective, or an operation of the program.

    Attributes:
        at: index of the operation of the block before which, or with which, the instruction is
            done; the number of operations for an instruction after the last one.
        lag: in a loop, how many ticks after the operations of an iteration the instruction is done
            for that iteration; negative: before them.
        iterations: in a loop, the iterations that the instruction is done for; None: all.
    """

    at: int
    lag: int = 0
    iterations: range | None = None

    @property
    def parts(self) -> Iterator[Instruction]:
        """Yield the instructions that are done, in order: `tie.before`, this one, `tie.after`."""
        tie: Tie | None = getattr(self, "tie", None)
        if not isinstance(tie, Tie):
            yield self
            return
        yield from itertools.chain.from_iterable(x.parts for x in tie.before)
        yield self
        yield from itertools.chain.from_iterable(x.parts for x in tie.after)


@dataclasses.dataclass(frozen=True)
class Tie:
    """A barrier that makes the operands of an instruction wait until other arrays exist.

    Attributes:
        value: an array of the program that the operands wait for; None before a loop.
        before: instructions done before the barrier.
        reduced: gradients, after their last reduction, that also pass through the barrier.
        copied: gradients whose copies to host memory the barrier waits for.
        buckets: groups of gradients in flight that also pass through the barrier.
        after: instructions done after the barrier.
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
    """Encode the shards of a group as messages, before any operation that reads `pin` runs."""

    group: int
    tie: Tie | None
    pin: Value | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Send(Instruction):
    """All-gather the messages of a group over one axis.

    A barrier comes first: the gather waits for `pin`, and readers of `pin` wait for the encoded
    messages. With `after_decode`, a message for a later iteration waits until this iteration's
    message is decoded.
    """

    group: int
    axis: int
    pin: Value | None
    after_decode: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode(Instruction):
    """Decode the gathered messages of a group to full weights."""

    group: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drop(Instruction):
    """Drop full weights. Each is named by a weight and the operations that its gather applied."""

    weights: tuple[tuple[ShardedParam, tuple[movable_ops.Op, ...]], ...]


# Operations of the program.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Instruction):
    """Run operation `at`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOnShards(Instruction):
    """Run an operation on reduced shards, because the plan moved a reduction in front of it."""

    operation: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zeros(Instruction):
    """Make zeros for the reduced shard of a gradient that is known to be zero; nothing is sent."""

    value: Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delay(Instruction):
    """Make the constant that a scatter (operation `at`) adds to, but only once `value` exists."""

    constant: int  # the operation that makes it
    value: Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishLoss(Instruction):
    """Compute the loss before any operation that reads `pin` runs."""

    loss: Value
    pin: Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartLoop(Instruction):
    """Send the gathers of a loop's first layers, before the loop."""

    loop: int
    tie: Tie | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunLoop(Instruction):
    """Run a loop, operation `at`, once its carry and the buckets of `tie` passed a barrier."""

    tie: Tie


# Gradients.


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeGradients(Instruction):
    """Encode the gradients of a group for its first axis, once the last of them is made.

    With `after_sent`, the gradients wait until the message of the previous iteration has been sent:
    otherwise XLA may hold both messages.
    """

    group: int
    after_sent: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduce(Instruction):
    """Reduce a group over one axis once `after` exists; encode the result for the next axis."""

    group: int
    axis: int
    after: Value | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PinGradients(Instruction):
    """Make operations that read `pin` wait for the latest reductions of groups in flight."""

    groups: tuple[int, ...]
    pin: Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finish(Instruction):
    """Take the gradients, as sums or means, out of a group reduced over all its axes."""

    group: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store(Instruction):
    """Store a reduced gradient; if the plan says so, as a mean in host memory."""

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
    """Put the node slices that an iteration has gathered into their stacks (hpZ)."""

    weights: tuple[ShardedParam, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchRow(Instruction):
    """Copy an iteration's row of a scanned stack from host memory to the device."""

    stack: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begin(Instruction):
    """Begin an iteration: take its carry, and its rows of the stacks that the program scans."""

    rows: tuple[int, ...]  # those that have been copied from host memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(Instruction):
    """Take output `output` of an iteration; if it is a final gradient, divide it to the mean."""

    output: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collect(Instruction):
    """Put output `output` of an iteration into its stack."""

    output: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchState(Instruction):
    """Copy an iteration's layer of a leaf and its optimizer state from host memory.

    The copy waits until `when` exists.
    """

    output: int  # the gradient of the leaf
    when: Value | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update(Instruction):
    """Update an iteration's layer of a leaf, and copy it to host memory once `when` exists."""

    output: int
    when: Value | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HoldStates(Instruction):
    """Make writes to the stacks of updated leaves wait for copies of layers from these stacks.

    XLA writes a stack in place only if nothing reads the old stack later.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hold(Instruction):
    """Emit the barriers of an instruction that works on no iteration in these ticks."""

    tie: Tie | None
    pin: Value | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinCopies(Instruction):
    """Make the next tick wait for this tick's copies, which overlap with this tick's operations.

    Otherwise XLA waits for some of the copies before the operations begin.
    """
