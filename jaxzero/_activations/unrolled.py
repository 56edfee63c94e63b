"""Recompute values outside of loops, such as those of a network whose layers are unrolled.

If backward began by repeating all of forward, all residuals would exist at once, as if they had
been kept. So forward is cut into segments, at places where few bytes are alive. Values that cross a
cut are kept. Backward repeats a segment when it first reads a value of the segment, as in
https://arxiv.org/abs/1604.06174. With few cuts few values are kept, but segments are long, and
their values take much memory while backward repeats them. `_cuts` weighs one against the other.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from .._program import (
    ADDITIONS,
    Atom,
    Barrier,
    Block,
    Copies,
    Loop,
    Operation,
    Value,
    fixed_of,
    like,
)
from .costs import bytes_of, copies_in_host
from .loops import Pair, find_pairs, stacks_in_host
from .min_cut import Choice, Cost, Part

_LEAST_GAIN = 4  # the last cut pays if its segment's residuals are so many times what it keeps
# A cut costs in addition the bytes that are alive there, divided by this. So of two cuts that keep
# as much, the one between layers is taken.
_RATHER = 16
_PLACES = 1000  # most places where segments may end: time and memory grow with their square
# Bounds that are tried: a segment has at most the bytes of all residuals, divided by one of these.
_PARTS = tuple(1.25**i for i in range(20))


class Forward:
    """The forward part of a program, in segments.

    Attributes:
        block: the program.
        end: how many of its operations are forward.
        wanted: the values that forward makes and backward reads, and that are kept or recomputed
            by a choice for this part. They do not include weights, values in host memory, stacks
            of values for which a loop has a choice of its own, and values that are made at the end
            of forward and read at the start of backward.
    """

    def __init__(
        self, block: Block, weights: Collection[Value], end: int, counted: Collection[Value]
    ):
        """Cut forward into segments.

        Args:
            block: the program.
            weights: inputs of the program that are gathered where they are used.
            end: how many of its operations are forward.
            counted: values in bodies of loops; their stacks are not in `wanted`. These are values
                that a loop keeps by its own choice, and views of weights, whose stacks are computed
                where loops scan them. Other stacks that backward reads are in `wanted`, such as an
                encoder's states that only a decoder and its backward loop read.
        """
        self.block = block
        self.end = end
        self._fixed = fixed_of(block, weights)
        self._at = {x: i for i, op in enumerate(block.operations[:end]) for x in op.outputs}
        pairs = find_pairs(block, end, block.outputs)
        self._loops = [pair.forward for pair in pairs]
        returned = {*block.outputs}
        stacks = {
            stack
            for pair in pairs
            for i in (*pair.saved, *pair.held)
            if pair.forward.body.outputs[i] in counted
            if (stack := pair.forward.outputs[i]) in returned or i in pair.saved
        }
        inside = (x for x in block.operations[:end] if isinstance(x, Loop))
        stacks |= {x for loop in inside for x in stacks_in_host(loop)}
        stacks |= {x for operation in block.operations[:end] for x in copies_in_host(operation)}
        later = (x for operation in block.operations[end:] for x in operation.values)
        kept = dict.fromkeys(x for x in later if x in self._at and not self.is_weight(x))
        self.wanted = [x for x in kept if x not in stacks]
        self._last: dict[Value, int] = {}
        for i, operation in enumerate(block.operations[:end]):
            self._last |= dict.fromkeys(operation.values, i)
        self._derived = self._made_of_inputs()
        self._joined = self._joins()
        self._cuts = self._segments()
        turn = self._around_turn(pairs)
        self.wanted = [x for x in self.wanted if x not in turn]

    def part(self, outside: Mapping[Value, Cost], never: Collection[Operation]) -> Part:
        """Return forward outside of loops as a part for which a minimum cut is chosen.

        Values that cross from a segment into another are kept: operations that make such values are
        never repeated.

        Args:
            outside: for inputs of the program, the cost of reading one in backward as well.
            never: further operations that are not repeated. Loops that stack up values for backward
                need not be among them.
        """
        operations = [
            x for x in self.block.operations[: self.end] if not any(map(self.is_weight, x.outputs))
        ]
        crossing = (x for x in operations if any(map(self._crosses, x.outputs)))
        stored = (x for x in self.block.outputs if isinstance(x, Value))
        read = {x for operation in self.block.operations[self.end :] for x in operation.values}
        inputs = {x: cost for x, cost in outside.items() if x not in read and x not in self._at}
        never = {*never, *crossing, *self._loops}
        segments = len(self._cuts) + 1
        return Part(operations, self.wanted, (), inputs, {*stored}, never, segments=segments)

    def is_weight(self, value: Value) -> bool:
        """Return whether a value is a weight or made of weights only.

        Backward gathers weights anyway.
        """
        return bool(self._fixed.of(value))

    def segment(self, operation: Operation) -> int:
        """Return the number of the segment that an operation is in.

        A concatenation that is not kept (`_joins`) is in the segment of its result's last reader.
        """
        made = operation.outputs[0]
        at = self._last[made] if made in self._joined else self._at[made]
        return bisect.bisect_left(self._cuts, at)

    def last_segment(self, value: Value) -> int:
        """Return the number of the last segment that reads a value.

        If no operation of forward reads the value, return the number of the segment that makes it.
        """
        return bisect.bisect_left(self._cuts, self._last.get(value, self._at[value]))

    def _crosses(self, value: Value) -> bool:
        first, last = self._at[value], self._last.get(value, -1)
        i = bisect.bisect_left(self._cuts, first)
        return not self._is_free(value) and i < len(self._cuts) and self._cuts[i] < last

    def _is_free(self, value: Value) -> bool:
        return value in self._derived or value in self._joined or self.is_weight(value)

    def _joins(self) -> set[Value]:
        """Find concatenated arrays that forward reads, such as those of skip connections.

        They do not cross cuts. Their operands are kept instead, as if the last reader of the
        concatenated array read them.
        """
        joined = set()
        for operation in reversed(self.block.operations[: self.end]):
            if operation.name != "concatenate" or operation.outputs[0] not in self._last:
                continue
            (made,) = operation.outputs
            joined.add(made)
            for x in operation.values:
                self._last[x] = max(self._last[x], self._last[made])
        return joined

    def _around_turn(self, pairs: Sequence[Pair]) -> set[Value]:
        """Find the values that forward makes last and backward reads only when it begins.

        Recomputing them would not save memory. They are made behind the last loop over layers, or
        without such a loop in the last segment. Neither the first backward loop over layers nor any
        operation behind it reads them.
        """
        operations = self.block.operations
        last = max((self._at[x] for x in self.wanted), default=0)
        behind = [operations.index(loop) for loop in self._loops]
        behind = behind or [cut for cut in self._cuts if cut < last]
        if not behind:
            return set()
        readers = {reader for pair in pairs for reader in pair.readers}
        until = next((i for i, x in enumerate(operations) if x in readers), len(operations))
        late = {x for operation in operations[until:] for x in operation.values}
        made = (
            x for operation in operations[max(behind) + 1 : self.end] for x in operation.outputs
        )
        return {x for x in made if x not in late}

    def _made_of_inputs(self) -> set[Value]:
        """Find values computed without weights and matrix products, such as masks and positions."""
        derived = {x for x in self.block.inputs if not self.is_weight(x)}
        for operation in self.block.operations[: self.end]:
            if not operation.products and all(x in derived for x in operation.values):
                derived.update(operation.outputs)
        return derived

    def _segments(self) -> list[int]:
        """Choose the segments; return the index of the last operation of each but the last one.

        A segment may end where fewer bytes are alive than before, and no more than behind. If no
        loop runs over layers, the last cut is the latest one behind which forward makes at least
        `_LEAST_GAIN` times as many bytes of residuals as the cut keeps.
        """
        made = np.zeros(self.end, np.int64)
        for value in self.wanted:
            made[self._at[value]] += bytes_of(value)
        made = made.cumsum()
        crossing = [x for x in self._at if self._last.get(x, -1) > self._at[x]]
        spans = [
            (self._at[x], self._last[x], bytes_of(x)) for x in crossing if not self._is_free(x)
        ]
        changes = np.zeros(self.end + 1, np.int64)
        for first, last, num_bytes in spans:
            changes[[first, last]] += num_bytes, -num_bytes
        alive = changes.cumsum()
        inner = range(1, self.end - 1)
        ends = [i for i in inner if alive[i - 1] > alive[i] <= alive[i + 1] and alive[i]]
        if len(ends) > _PLACES:
            groups = np.array_split(ends, _PLACES)
            ends = [int(group[alive[group].argmin()]) for group in groups]
        short = [i for i in ends if made[-1] - made[i] >= _LEAST_GAIN * alive[i]]
        if short and not self._loops:
            return _cuts(ends[: ends.index(short[-1]) + 1], spans, made)
        return _cuts([*ends, self.end - 1], spans, made)[:-1] if ends else []


def _cuts(ends: list[int], spans: list[tuple[int, int, int]], made: np.ndarray) -> list[int]:
    """Choose where to cut forward into segments, with the last cut at the last of `ends`.

    For several bounds on the bytes of residuals that a segment makes, a shortest path finds the
    cuts that keep the fewest bytes. Of the results for all bounds, the one with the least sum of
    kept and peak bytes is taken. The peak is the largest sum, over segments, of the bytes that the
    segment makes and the bytes that cuts before it keep.

    Args:
        ends: the indices of operations behind which forward may be cut.
        spans: for each value that a cut may keep, the index of the operation that makes it, the
            index of the last operation of forward that reads it, and its bytes; sorted by the
            first index.
        made: for each operation, the bytes of the residuals that it and operations before it make.

    Returns:
        The chosen elements of `ends`, in order. The last element is always chosen.
    """
    num, at = len(ends), np.array(ends)
    starts = np.array([-1, *ends[:-1]])
    up_to = np.array([0, *made[at]])  # bytes of residuals up to where a segment starts
    first, last, size = np.array(spans).T
    # `kept[i, j]`: of what the segment from behind `starts[i]` to `ends[j]` makes, the bytes that
    # the cut at its end keeps. Older values that cross this cut are counted by the cut before.
    kept = np.zeros((num, num), np.int64)
    for j, end in enumerate(ends):
        crossing = (first <= end) & (last > end)
        sums = np.array([0, *size[crossing].cumsum()])
        kept[:, j] = sums[-1] - sums[first[crossing].searchsorted(starts, "right")]
        kept[:, j] += sums[-1] // _RATHER
    options = []
    for part in _PARTS:
        least, came_from = np.zeros(num + 1, np.int64), np.zeros(num, int)
        lowest = up_to[:-1].searchsorted(made[at] - made[-1] / part)
        for j in range(num):
            low = min(lowest[j], j)
            held = least[low : j + 1] + kept[low : j + 1, j]
            came_from[j] = low + held.argmin()
            least[j + 1] = held.min()
        path = [num]
        while path[0]:
            path.insert(0, came_from[path[0] - 1])
        peak = max(least[path] + np.diff(up_to[path], append=made[-1]))
        options.append((least[num] + peak, [ends[i - 1] for i in path[1:]]))
    return min(options)[1]


def repeating(forward: Forward, choice: Choice) -> Block:
    """Return the program in which backward repeats the operations of `choice`."""
    block, end = forward.block, forward.end
    if not choice.repeated:
        return block
    again = _Again(forward, choice)
    for operation in block.operations[end:]:
        again.add(operation)
    at = block.positions  # results are those that forward makes, not what backward repeats
    outputs = tuple(
        again.of(x) if isinstance(x, Value) and at.get(x, 0) >= end else x for x in block.outputs
    )
    operations = (*block.operations[:end], *again.operations)
    return dataclasses.replace(block, outputs=outputs, operations=operations)


class _Again(Copies):
    """Builds the operations of backward, with copies of the segments of forward that it repeats.

    The kept values that a repeated segment reads pass a barrier (`optimization_barrier`) together
    with the newest gradient. Without the barrier, XLA could repeat the segment earlier, or merge it
    with its first computation in forward. The kept values that operations of backward read pass it
    too. Otherwise XLA keeps a transposed copy, made for a product of forward, beside each value.
    """

    def __init__(self, forward: Forward, choice: Choice):
        super().__init__(choice.repeated)
        self._forward = forward
        self._read_by: dict[int, dict[Value, None]] = {}
        returned = {*forward.block.outputs}
        self._kept = {
            x: forward.last_segment(x)
            for x in forward.wanted
            if x not in self._makers and x not in returned and x.is_array
        }
        self._early = self._read_early()
        for x, segment in self._kept.items():
            if x not in self._early:
                self._read_by.setdefault(segment, {})[x] = None
        for operation in choice.repeated:
            kept = (x for x in operation.values if x not in self._makers and x.is_array)
            of_segment = self._read_by.setdefault(forward.segment(operation), {})
            of_segment |= dict.fromkeys(x for x in kept if not forward.is_weight(x))
        self._tied: dict[int, dict[Value, Value]] = {}
        self._unread: dict[Value, int] = {}  # by gradient, how many operations have yet to read it
        backward = forward.block.operations[forward.end :]
        for operation in backward:
            for x in {*operation.values}:
                self._unread[x] = self._unread.get(x, 0) + 1
        self._gradients: list[Value] = []  # those made since the last segment's barrier
        self._sums = _sums(backward)

    def add(self, operation: Operation) -> None:
        for x in operation.values:
            if x in self._early and x not in self._made:
                self._made |= self._barrier(operation, [x])
            elif x in self._kept and x not in self._made:
                self._made[x] = self._tie(x, self._kept[x], operation)
        super().add(operation)
        for x in {*operation.values}:
            self._unread[x] -= 1
        self._gradients += (x for x in operation.outputs if x.is_array and x.shape)

    def read(self, value: Value, copied: Operation) -> Atom:
        return self._tie(value, self._forward.segment(copied), copied)

    def _read_early(self) -> set[Value]:
        """Find kept values that backward reads before it comes to their segments.

        Such a value may be a residual of a `jax.custom_vjp` that no operation of forward reads. It
        has a barrier of its own, so that the barrier of its segment does not come too early.
        """
        block, segment_of = self._forward.block, self._forward.last_segment
        first: dict[Value, int] = {}
        for i, operation in enumerate(block.operations[self._forward.end :]):
            for x in operation.values:
                first.setdefault(x, i)
        by_segment: dict[int, list[Value]] = {}
        for x in self._forward.wanted:
            by_segment.setdefault(segment_of(x), []).append(x)
        early, reached = set(), -1
        for segment in sorted(by_segment, reverse=True):
            values = by_segment[segment]
            early |= {x for x in values if x in self._kept and first[x] < reached}
            reached = max(reached, *(first[x] for x in values))
        return early

    def _tie(self, value: Value, segment: int, reader: Operation) -> Value:
        if segment not in self._tied:
            # Gradients that are still read pass the barrier, but for those of weights, and so
            # become arrays. XLA for CPUs would fuse a sum of gradients along residual connections
            # into each of its readers, and hold the terms of all layers.
            passing = [x for x in self._gradients if self._unread.get(x) and x not in self._sums]
            self._gradients = []
            self._tied[segment] = self._barrier(reader, [*self._read_by[segment]], passing)
        return self._tied[segment].get(value, value)

    def _barrier(
        self, copied: Operation, kept: Sequence[Value], passing: Sequence[Value] = ()
    ) -> dict[Value, Value]:
        if not kept:
            return {}
        made = (x for operation in reversed(self.operations) for x in operation.outputs)
        arrays = (x for x in made if x.is_array and x.shape and x not in self._sums)
        reached = next(arrays, None)
        after = dict.fromkeys((*passing, *((reached,) if reached else ())))
        inputs = (*kept, *map(self.of, after))
        outputs = tuple(map(like, inputs))
        self.operations.append(Barrier("optimization_barrier", inputs, outputs, copied.equation))
        self._made |= dict(zip(after, outputs[len(kept) :], strict=True))
        return dict(zip(kept, outputs, strict=False))


def _sums(backward: Sequence[Operation]) -> set[Value]:
    """Find values of backward that only enter sums and moves of elements: gradients of weights.

    These values must not pass a barrier. The reduction of a gradient over devices is moved up
    across such sums and moves, but not across a barrier: below a barrier, the gradients of all
    layers would be put together in full before they are reduced.
    """
    onward: set[Value] = set()
    for operation in reversed(backward):
        moves = operation.name in ADDITIONS or operation.view() is not None
        if not moves or not onward.isdisjoint(operation.outputs):
            onward.update(operation.values)
    return {x for operation in backward for x in operation.outputs} - onward
