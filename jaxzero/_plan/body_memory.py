"""Keep messages in flight away from where a loop's body holds most memory.

What a body computes is often far larger in one place than elsewhere (the scores of attention in
backward). The weights of the next layer and the gradients of the last, as large as a layer each,
need not exist there: the ones are gathered after it, the others are reduced before it.

Only from JAX 0.11 on: before, XLA's scheduler with the options of `compiler_options` hides more of
the messages where they were, though in more memory (Llama-7B in Flax Linen, `zero3`, 2 x 8 H200,
compiled and not run: 0.59 s a step in 6.1 GiB, and moved 0.80 s in 5.0 GiB; with 0.12 it is 0.72 s
in 5.7 GiB, and moved 0.56 s in 5.0 GiB).

The estimate adds up the arrays that operations make, from the first reader to the last. XLA fuses
many of them, so only the place counts and not the amount.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Set

import numpy as np

from .._program import Block, Value
from .body_work import work_done
from .held_by_loops import WORK_PER_BYTE
from .param_uses import BlockUses

_HIGH = 0.75  # of the most that is held: what holds more belongs to the peak
_LOW = 0.25  # what holds less, before the peak, has room for the gradients of a layer
# A gather after the peak overlaps with this share of the body's arithmetic, or more.
_ENOUGH = 0.15


@dataclasses.dataclass(frozen=True)
class Peak:
    """Where messages of a layer exist in a loop's body.

    Attributes:
        gather_after: the operation before which the weights of the next layer are gathered over
            the last axis; None if too little is computed after the peak to overlap with, or it
            is not known how much, since the body has no matrix products.
        reduce_before: the operation before which the gradients of the last layer are reduced over
            the first axis, and a value that nothing reads before they are. None: at any time.
    """

    gather_after: int | None
    reduce_before: tuple[int, Value] | None


NO_PEAK = Peak(None, None)


def find_peak(
    block: Block,
    uses: BlockUses,
    costly: Set[str],
    gradients: Container[Value],
    reduced_bytes: int,
) -> Peak:
    """Find the peak of a body.

    Args:
        block: the body.
        uses: of weights in it.
        costly: operations that collectives overlap with.
        gradients: values that are reduced, which nothing else may wait for.
        reduced_bytes: of the last layer's gradients.
    """
    held = _held_bytes(block, uses)
    if not held.any():
        return NO_PEAK
    work = work_done(block)
    at = int(held.argmax())
    high = itertools.takewhile(lambda i: held[i] > _HIGH * held[at], range(at, len(held)))
    last = max(high)
    made = (i for i in range(last + 1, len(held)) if block.operations[i].name in costly)
    after = next(made, None)  # its result is what the gather waits for
    if after is not None and work[-1] - work[after] <= _ENOUGH * work[-1]:
        after = None
    ties = _ties_before(block, uses, costly, gradients, at)
    low = [(index, tie) for index, tie in ties if held[:index].max() <= _LOW * held[at]]
    # Early, where little is held, if that leaves enough to overlap with; else just before the peak.
    # Where much is held from the start, XLA finds as good a place.
    early = (x for x in low if work[x[0] - 1] >= WORK_PER_BYTE * reduced_bytes)
    before = next(early, ties[0]) if low else None
    return Peak(None if after is None else after + 1, before)


def _ties_before(
    block: Block,
    uses: BlockUses,
    costly: Set[str],
    gradients: Container[Value],
    at: int,
) -> list[tuple[int, Value]]:
    """The costly operations that operation `at` depends on, the last first.

    Returns:
        For each, the index of the operation after it, and its output.
    """
    found = []
    needed = {x for x in block.operations[at].inputs if isinstance(x, Value)}
    for index in range(at - 1, -1, -1):
        operation = block.operations[index]
        made = [x for x in operation.outputs if x in needed]
        ties = [x for x in made if x.is_array and x not in uses.views and x not in gradients]
        if ties and operation.name in costly:
            found.append((index + 1, ties[0]))
        if made:
            needed.update(x for x in operation.inputs if isinstance(x, Value))
    return found


def _held_bytes(block: Block, uses: BlockUses) -> np.ndarray:
    """For each operation, the bytes of arrays made in the block that exist while it runs."""
    end = len(block.operations)
    change = np.zeros(end + 1, np.int64)
    last = {
        value: i
        for i, operation in enumerate(block.operations)
        for value in operation.inputs
        if isinstance(value, Value)
    }
    outputs = set(block.outputs)
    for i, operation in enumerate(block.operations):
        for value in operation.outputs:
            if value.is_array and value not in uses.views:
                stop = end if value in outputs else last.get(value, i) + 1
                change[i] += value.num_bytes
                change[stop] -= value.num_bytes
    return change.cumsum()[:-1]
