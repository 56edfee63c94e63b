"""Choose the values that gathers, and backward, wait for, so that XLA keeps the order of the plan.

[Note: ties] XLA would merge the gather of the backward region with that of the forward region,
because both read the same shard, and keep the full weight alive between them. So each gather is
tied: its shards pass through an `optimization_barrier` together with a value that does not exist
any earlier. That value is the last result of a costly operation. It is not an operand of the use
itself, because that may be a cheap expression which XLA fuses into the use, and a tie would force
it into memory. Nor is it a gradient that is about to be sent.

The barrier also takes the gradients that were reduced before the previous gather: without them, XLA
may delay all reductions to the end of the program, and full gradients pile up. Those of the
previous gather are taken, not of this one, so that a reduction can overlap with one group's
compute. XLA removes an operand from a barrier if nothing else reads it before or after the barrier,
so gradients are read from the barrier's outputs, and a tie is two barriers (`buckets.tied`).

[Note: the loss first] Backward starts from the arrays that the loss was computed from, such as the
logarithms of probabilities, and never reads the value of the loss. XLA's scheduler may then compute
the loss last: the logarithms, 4 bytes for each token and entry of the vocabulary, are held through
all of backward (TinyLlama, 2048 tokens a device, compiled for a v5e:2x4: 250 MiB of float32). So
the loss passes through a barrier with the cotangent that the first costly operation of backward
reads. Gathers and scatters do not count as that operation: the gradient of a loss that picks its
labels starts with a scatter of few numbers, which XLA computes in one kernel with the cotangent,
and which therefore must not wait for the loss.
"""

from __future__ import annotations

import math
from collections.abc import Set

from .._program import Block, Value, is_costly
from .gradient_reductions import BlockGradients
from .param_uses import BlockUses


def find_ties(
    block: Block,
    uses: BlockUses,
    gradients: BlockGradients,
    boundary: int | None,
    first: Value | None,
) -> list[Value | None]:
    """Return, for each operation, the value that a gather before it waits for. See [Note: ties].

    The value is a result of the last costly operation before. Up to the first costly operation it
    is `first` or, if that is None, the first array that the gather's operation reads. After
    `boundary`, where backward begins, it is again such an array up to the next costly operation.

    The value is never a gradient that is about to be sent: nothing else reads such a gradient
    afterwards, so XLA drops it from the barrier. Also, such a tie would be a second reader of a
    product, and XLA then no longer replaces the product's transpose by a swap of its factors.
    """
    sent = set(gradients.reduces)
    for operation in reversed(block.operations):
        if sent.isdisjoint(operation.outputs) or operation.view() is None:
            continue
        if (source := operation.source) is not None:
            sent.add(source)
    ties: list[Value | None] = []
    latest = first
    for index, operation in enumerate(block.operations):
        if boundary is not None and index == boundary + 1:
            latest = None  # tied to a value of forward, a gather for backward would run too early
        arrays = (x for x in operation.values if x.is_array)
        ties.append(latest or next((x for x in arrays if x not in uses.views), None))
        if is_costly(operation):
            arrays = [x for x in operation.outputs if x.is_array]
            made = [x for x in arrays if x not in uses.views and x not in sent]
            latest = made[0] if made else latest
    return [*ties, latest]


def largest_input(block: Block, uses: BlockUses, others: Set[Value]) -> Value | None:
    """Return the largest array that a loop's body reads, except weights and the values in `others`.

    That is usually the activations. Gathers are tied to it, so that they start when it exists.
    """
    arrays = [x for x in block.inputs if x.is_array and x not in uses.views and x not in others]
    return max(arrays, key=lambda x: math.prod(x.shape), default=None)


_INDEXING = {"gather", "scatter", "scatter-add"}


def start_of_backward(
    block: Block,
    uses: BlockUses,
    gradients: BlockGradients,
    boundary: int | None,
) -> tuple[int, Value] | None:
    """Find the first costly operation of backward that reads a cotangent, and that cotangent.

    Args:
        block: the program.
        uses: the views of weights in it, which have no array of their own.
        gradients: the gradients of the block. Those that are reduced do not count as cotangents,
            since nothing reads them in full.
        boundary: index of the operation that makes the loss; None in a loop's body.

    Returns:
        The index of the operation, and the largest cotangent that it reads; None if there is no
        such operation.
    """
    if boundary is None:
        return None
    cotangents: set[Value] = set()
    for index, operation in enumerate(block.operations[boundary + 1 :], boundary + 1):
        read = [x for x in operation.inputs if isinstance(x, Value) and x in cotangents]
        if read and is_costly(operation) and operation.name not in _INDEXING:
            return index, max(read, key=lambda x: x.num_bytes)
        arrays = {x for x in operation.outputs if x.is_array}
        cotangents |= arrays - uses.views.keys() - gradients.reduces.keys()
    return None
