"""Values made of weights alone that a program still keeps whole, from forward to backward."""

from __future__ import annotations

from collections.abc import Collection

from .dependence import Fixed
from .ir import Block, Loop, Operation, Value
from .stack_values import StackValues


def kept_values(
    block: Block, weights: Collection[Value], last_forward: int | None
) -> list[tuple[Value, Operation]]:
    """Find large values that are computed from weights alone and kept, and what computes them.

    Args:
        block: a program.
        weights: its inputs that are sharded weights.
        last_forward: the last operation of forward; None in a loop's body.

    Returns:
        Values of forward that backward reads, and stacks that a loop makes of weights alone.
    """
    values = StackValues(Fixed(block, {x: frozenset({x}) for x in weights}, weights, scalars=True))
    read_by = {x: i for i, operation in enumerate(block.operations) for x in operation.inputs}
    found = []
    for index, operation in enumerate(block.operations):
        for value in operation.outputs:
            if value not in read_by:
                continue
            if isinstance(operation, Loop):
                is_kept = values.is_of_weights(value)
            else:
                ends = last_forward is not None and index <= last_forward < read_by[value]
                is_kept = ends and values.is_large(value) and value not in values.fixed.views
            if is_kept:
                found.append((value, values.innermost_maker(value)))
    return found
