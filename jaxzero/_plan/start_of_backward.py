"""Compute the loss before backward, whose first cotangents need nothing of it.

Backward starts from what the loss was computed from, such as the logarithms of probabilities, and
never reads its value. XLA's scheduler may then compute the loss last: the logarithms, 4 bytes for
each token and entry of the vocabulary, are held through all of backward (TinyLlama, 2048 tokens a
device, compiled for a v5e:2x4: 250 MiB of float32). So the loss passes through a barrier with the
cotangent that the first costly operation of backward reads. Gathers and scatters do not count as
that one: the gradient of a loss that picks its labels starts with a scatter of few numbers, which
XLA computes in one kernel with the cotangent, and which therefore must not wait for the loss.
"""

from __future__ import annotations

from collections.abc import Set

from .._program import Block, Value
from .gradient_reductions import BlockGradients
from .param_uses import BlockUses

_INDEXING = {"gather", "scatter", "scatter-add"}


def start_of_backward(
    block: Block,
    uses: BlockUses,
    costly: Set[str],
    gradients: BlockGradients,
    boundary: int | None,
) -> tuple[int, Value] | None:
    """Find the first costly operation of backward that reads a cotangent, and the largest of them.

    Args:
        block: the program.
        uses: the views of weights in it, which have no array of their own.
        costly: names of operations that take long, and whose operands XLA writes to memory.
        gradients: those that are reduced are no cotangents: nothing reads them in full.
        boundary: index of the operation that makes the loss; None in a loop's body.

    Returns:
        The index of the operation and the cotangent; None if there is no such operation.
    """
    if boundary is None:
        return None
    cotangents: set[Value] = set()
    for index, operation in enumerate(block.operations[boundary + 1 :], boundary + 1):
        read = [x for x in operation.inputs if isinstance(x, Value) and x in cotangents]
        if read and operation.name in costly - _INDEXING:
            return index, max(read, key=lambda x: x.num_bytes)
        arrays = {x for x in operation.outputs if x.is_array}
        cotangents |= arrays - uses.views.keys() - gradients.reduces.keys()
    return None
