"""Choose what each gather waits for, so that it is sent when the plan says.

[Note: ties] XLA would merge the gather of the backward region with that of the forward region,
because both read the same shard, and keep the full weight alive between them. So each gather is
tied: its shards pass through an `optimization_barrier` together with a value that does not exist
any earlier. That value is the last result of a costly operation. It is not an operand of the use
itself, which may be a cheap expression that XLA fuses into the use and that a tie would force into
memory; nor is it a gradient that is about to be sent.

The barrier also takes the gradients that were reduced before the previous gather: without them,
XLA may delay all reductions to the end of the program, and full gradients pile up. They are those
of the previous gather, not of this one, so that a reduction can overlap with one group's compute.
XLA removes an operand from a barrier if nothing else reads it before or after the barrier, so
gradients are read from the barrier's outputs, and a tie is two barriers (`weight_buckets.tied`).
"""

from __future__ import annotations

import math
from collections.abc import Set

from .._program import Block, Value
from .gradient_reductions import BlockGradients
from .param_uses import BlockUses

# Operations that take long enough for a collective to overlap with them. XLA writes their results
# to memory anyway, so a tie to them costs nothing.
COSTLY = {
    "dot_general",
    "ragged_dot",
    "conv_general_dilated",
    "gather",
    "scatter",
    "scatter-add",
    "scan",
    "while",
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
    "shard_map",
    "pallas_call",
    "sort",
    "fft",
}


def find_ties(
    block: Block,
    uses: BlockUses,
    gradients: BlockGradients,
    boundary: int | None,
    first: Value | None,
) -> list[Value | None]:
    """For each operation, the value that a gather before it waits for. See [Note: ties].

    Until a costly operation, that is `first` or, without one, the first array that is read.

    The value is never a gradient that is about to be sent: nothing else reads that one afterwards,
    so XLA drops it from the barrier. Also, XLA replaces the transpose of a product by a swap of
    its factors, unless something else reads the product, as a tie to a gradient would.
    """
    sent = set(gradients.reduces)
    for operation in reversed(block.operations):
        source = operation.source if operation.view() is not None else None
        if source is not None and not sent.isdisjoint(operation.outputs):
            sent.add(source)
    ties: list[Value | None] = []
    latest = first
    for index, operation in enumerate(block.operations):
        if boundary is not None and index == boundary + 1:
            latest = None  # tied to a value of forward, a gather for backward would run too early
        arrays = [x for x in operation.inputs if isinstance(x, Value) and x.is_array]
        ready = [x for x in arrays if x not in uses.views]
        ties.append(latest or (ready[0] if ready else None))
        if operation.name in COSTLY:
            arrays = [x for x in operation.outputs if x.is_array]
            made = [x for x in arrays if x not in uses.views and x not in sent]
            latest = made[0] if made else latest
    return [*ties, latest]


def largest_input(block: Block, uses: BlockUses, others: Set[Value]) -> Value | None:
    """The largest array that a loop's body reads, except weights and the values in `others`.

    That is usually the activations. Gathers are tied to it: they start when it is there.
    """
    arrays = [x for x in block.inputs if x.is_array and x not in uses.views and x not in others]
    return max(arrays, key=lambda x: math.prod(x.shape), default=None)
