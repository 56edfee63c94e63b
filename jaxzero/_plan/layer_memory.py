"""Keep messages in flight away from the place where a layer holds most memory.

The arrays that a layer computes are often far larger in one place than elsewhere (the scores of
attention in backward). The weights of the next layer and the gradients of the previous layer, each
as large as a layer, need not be in memory at that place: the weights are gathered after it, and the
gradients reduced before it. A layer is the body of a loop or, in an unrolled program, the
operations between the first uses of two groups of weights.

The estimate adds up the arrays that operations make, each from its maker to its last reader. XLA
fuses many of them, so only the place of the maximum is used, not its size.

Work is counted in the multiplications of matrix products. Copies from and to host memory that
should not begin with an iteration wait for a value that exists once enough of the work is done.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Container, Sequence

import jax.numpy as jnp
import numpy as np

from .._program import Block, Loop, Operation, Value, is_costly
from .block_plan import BlockPlan, ReduceGroup
from .held_by_loops import WORK_PER_BYTE
from .param_uses import BlockUses

_HIGH = 0.75  # share of the most bytes held; operations that hold more are the peak
_LOW = 0.25  # operations before the peak that hold less have room for a layer's gradients
# A gather after the peak overlaps with this share of the layer's arithmetic, or more.
_ENOUGH = 0.15
# In a loop, a reduction over the first axis overlaps with so many multiplications for each byte, or
# more: those that an H200 does while it receives a byte inside its node. Between unrolled layers a
# quarter is enough, since gathers wait for it (`schedule`).
_LOOP_WORK_PER_BYTE = 4 * WORK_PER_BYTE


@dataclasses.dataclass(frozen=True)
class Peak:
    """The places in a layer where messages are sent, so that they do not add to its memory peak.

    Attributes:
        gather_after: the index of an operation after the peak. The weights of the next layer are
            gathered over the last axis just before it. None if the layer computes too few matrix
            products after the peak for the gather to overlap with.
        reduce_before: an operation's index and a value. The previous layer's gradients are reduced
            over the first axis just before the operation, and operations that read the value wait
            for that reduction. None if the reduction may run at any time.
    """

    gather_after: int | None
    reduce_before: tuple[int, Value] | None


NO_PEAK = Peak(None, None)


class LayerMemory:
    """The bytes that the layers of a block hold while they run, by estimate.

    Args:
        block: the body of a loop, or a program.
        uses: the uses of weights in it.
        gradients: the values that are reduced; none of them may be the value of `reduce_before`.
    """

    def __init__(self, block: Block, uses: BlockUses, gradients: Container[Value]):
        self._block = block
        self._uses = uses
        self._gradients = gradients
        self._work = work_done(block)
        end = len(block.operations)
        reads = {
            value: i
            for i, operation in enumerate(block.operations)
            for value in operation.inputs
            if isinstance(value, Value)
        } | dict.fromkeys((x for x in block.outputs if isinstance(x, Value)), end)
        made = [(i, x) for i, operation in enumerate(block.operations) for x in operation.outputs]
        made = [(i, x) for i, x in made if x.is_array and x not in uses.views]
        # The arrays of the block in the order in which they are made: the operations that make
        # them, the last ones that read them, and their bytes.
        self._values = [x for _, x in made]
        self._made_at = np.array([i for i, _ in made], np.int64)
        self._read_at = np.array([reads.get(x, i) for i, x in made], np.int64)
        self._sizes = np.array([x.num_bytes for x in self._values], np.int64)

    def find_peaks(
        self, reduces: Sequence[ReduceGroup], starts: Sequence[int] | None
    ) -> dict[int, Peak]:
        """Find the peak of each layer; keys are the first operations of the layers.

        A layer of a program with a loop in it has no peak: the loop takes longer than the
        operations around it.

        Args:
            reduces: the groups of gradients that the block reduces.
            starts: the first operation of each layer of a program; None: the block is the body of
                a loop, and so one layer.
        """
        operations = self._block.operations
        if starts is None:
            deferred = [group for group in reduces if group.deferred]
            needed = _LOOP_WORK_PER_BYTE * _num_bytes(deferred)
            return {0: self.find_peak(range(len(operations)), needed)}
        peaks, last = {}, range(0)
        for start, stop in itertools.pairwise((*starts, len(operations))):
            layer = range(start, stop)
            if not any(isinstance(operations[i], Loop) for i in layer):
                reduced = [group for group in reduces if group.at in last]
                peak = self.find_peak(layer, WORK_PER_BYTE * _num_bytes(reduced))
                peaks[start] = peak if reduced else dataclasses.replace(peak, reduce_before=None)
            last = layer
        return peaks

    def find_peak(self, layer: range, needed: int) -> Peak:
        """Find the peak of a layer.

        Args:
            layer: the range of its operations.
            needed: how many multiplications should overlap with the reduction of the previous
                layer's gradients.
        """
        held = self.held_bytes(layer)
        if not held.any():
            return NO_PEAK
        work = self._work[layer.start : layer.stop]
        work = work - (self._work[layer.start - 1] if layer.start else 0)
        at = int(held.argmax())
        high = itertools.takewhile(lambda i: held[i] > _HIGH * held[at], range(at, len(held)))
        after = self._costly_after(layer, max(high))
        if after is not None and work[-1] - work[after - layer.start] <= _ENOUGH * work[-1]:
            after = None
        ties = self._ties_before(layer, layer.start + at)
        most = np.maximum.accumulate(held)
        low = [
            (index, tie) for index, tie in ties if most[index - layer.start - 1] <= _LOW * held[at]
        ]
        # Early, where little is held, if enough is computed until then to overlap with; else just
        # before the peak. Where much is held from the start, XLA finds as good a place.
        early = (x for x in low if work[x[0] - layer.start - 1] >= needed)
        before = next(early, ties[0]) if low else None
        return Peak(None if after is None else after + 1, before)

    def _costly_after(self, layer: range, last: int) -> int | None:
        """Return the index of the first costly operation of a layer after a given one; else None.

        The given operation is number `last` of the layer, counted from 0.
        """
        operations = self._block.operations
        after = range(layer.start + last + 1, layer.stop)
        return next((i for i in after if is_costly(operations[i])), None)

    def _ties_before(self, layer: range, at: int) -> list[tuple[int, Value]]:
        """Find the costly operations of a layer that operation `at` depends on, the last one first.

        Returns:
            For each costly operation, the index of the operation after it, and one of its outputs.
        """
        candidates = []
        operations = self._block.operations
        needed = {x for x in operations[at].inputs if isinstance(x, Value)}
        for index in range(at - 1, layer.start - 1, -1):
            operation = operations[index]
            outputs = [x for x in operation.outputs if x in needed]
            ties = [x for x in outputs if x.is_array and x not in self._uses.views]
            ties = [x for x in ties if x not in self._gradients]
            if ties and is_costly(operation):
                candidates.append((index + 1, ties[0]))
            if outputs:
                needed.update(x for x in operation.inputs if isinstance(x, Value))
        return candidates

    def held_bytes(self, layer: range, others: Container[Value] = ()) -> np.ndarray:
        """Return, for each operation of a layer, the bytes of the layer's arrays that then exist.

        Weights and the values in `others` do not count.
        """
        first, last = np.searchsorted(self._made_at, [layer.start, layer.stop])
        made, read, sizes = (x[first:last] for x in (self._made_at, self._read_at, self._sizes))
        if others:
            sizes = sizes * np.array([x not in others for x in self._values[first:last]], bool)
        change = np.zeros(len(layer) + 1, np.int64)
        np.add.at(change, made - layer.start, sizes)
        np.subtract.at(change, np.minimum(read + 1, layer.stop) - layer.start, sizes)
        return change.cumsum()[:-1]


def _num_bytes(groups: Sequence[ReduceGroup]) -> int:
    return sum(value.num_bytes for group in groups for value in group.values)


def work_done(block: Block) -> np.ndarray:
    """Return, for each operation, the multiplications from the block's start up to its end."""
    return np.cumsum([operation.products for operation in block.operations])


def known_after(plan: BlockPlan, share: float, *, in_any_order: bool = False) -> Value | None:
    """Return the first matrix product's output that exists once `share` of a body's work is done.

    Return None if there is no such output. The output must hold floats. Values that are no arrays
    of the running program are skipped: gradients that are reduced, results computed on shards, and
    views of weights.

    Args:
        plan: the plan of the body.
        share: the share of its work.
        in_any_order: whether the share must be done for certain, in any order in which XLA may run
            the body. Then only the work of the product and of operations that it depends on
            counts. Otherwise all work up to the product counts, in the program's order.
    """
    operations = plan.block.operations
    order = work_done(plan.block)
    work = work_needed(operations) if in_any_order else order
    reductions = plan.gradients
    for index, (operation, done) in enumerate(zip(operations, work, strict=True)):
        if not operation.products or done < share * order[-1] or isinstance(operation, Loop):
            continue
        value = operation.outputs[0]
        is_kept = value not in reductions.reduces and index not in reductions.on_shards
        is_floats = value.is_array and jnp.issubdtype(value.dtype, jnp.floating)
        if is_kept and is_floats and math.prod(value.shape) and value not in plan.uses.views:
            return value
    return None


def work_needed(operations: Sequence[Operation]) -> list[int]:
    """Return, for each operation, the multiplications of it and of all operations it depends on."""
    needed: dict[Value, int] = {}  # bit i: the value depends on the i-th operation with products
    products: list[int] = []
    work = []
    for operation in operations:
        behind = 0
        for x in operation.inputs:
            behind |= needed.get(x, 0) if isinstance(x, Value) else 0
        if operation.products:
            behind |= 1 << len(products)
            products.append(operation.products)
        needed |= dict.fromkeys(operation.outputs, behind)
        work.append(sum(x for bit, x in enumerate(products) if behind >> bit & 1))
    return work
