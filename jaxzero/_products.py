"""Products of arrays, with the dims of their result in the order that is wanted of them.

JAX makes the gradient of `w` in `x @ w` as a product whose result it transposes. That is no more
than to exchange its factors. GPUs read matrices in either order, but XLA:CPU copies the gradient,
or one of the factors, number by number.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from ._program import Block, Loop, Operation, Value, is_split


def in_wanted_order(block: Block) -> Block:
    """Exchange the factors of each product that is only ever transposed, inside loops too."""
    reads = Counter(atom for operation in block.operations for atom in operation.inputs)
    reads.update(block.outputs)
    products = {
        operation.outputs[0]: operation
        for operation in block.operations
        if operation.name == "dot_general" and reads[operation.outputs[0]] == 1
    }
    operations: list[Operation] = []
    exchanged: set[Value] = set()
    for operation in block.operations:
        if isinstance(operation, Loop):
            operation = dataclasses.replace(operation, body=in_wanted_order(operation.body))
        elif operation.name == "transpose" and operation.source in products:
            product = products[operation.source]
            if (whole := _exchanged(product, operation)) is not None:
                exchanged.add(product.outputs[0])
                operation = whole
        operations.append(operation)
    kept = tuple(x for x in operations if exchanged.isdisjoint(x.outputs))
    return dataclasses.replace(block, operations=kept)


def _exchanged(product: Operation, transposed: Operation) -> Operation | None:
    """The transposed product as one operation; None: its dims are moved in another way."""
    params, left = product.equation.params, product.inputs[0]
    is_plain = params["precision"] is None or type(params["precision"]) is tuple
    if not is_plain or is_split(params["out_sharding"]) or not isinstance(left, Value):
        return None
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
    dims = tuple(range(len(product.outputs[0].shape)))
    start, end = len(left_batch), len(left.shape) - len(left_sum)  # where those of `left` lie
    order = (*dims[:start], *dims[end:], *dims[start:end])
    if tuple(transposed.equation.params["permutation"]) != order:
        return None
    changed = {
        "dimension_numbers": ((right_sum, left_sum), (right_batch, left_batch)),
        "precision": params["precision"] and params["precision"][::-1],
    }
    equation = product.equation.replace(params={**params, **changed})
    return Operation(product.name, product.inputs[::-1], transposed.outputs, equation)
