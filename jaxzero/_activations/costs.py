"""How many bytes a value takes, and how long it takes to repeat an operation, by the cost model.

The rates are those of `Rates`, as for compiled programs. What XLA will fuse is not known before it
compiles: each result that is not a view of an operand is taken to be written to memory once.
"""

from __future__ import annotations

import math

from .._hlo import Rates
from .._program import Loop, Operation, Value, is_broadcast, is_elementwise

RATES = Rates()
# Seconds for each byte that a loop stacks up. Forward copies it into the stack and backward copies
# it out, each of which reads and writes it. XLA fuses neither copy with a matrix product.
STACKED = 4 / RATES.memory
_TURN = 5e-6  # seconds that each iteration of a loop takes beside its operations
_KEY_BYTES = 16  # of a random key
_PLACED = {"concatenate", "pad"}  # each element of the result is one of an operand
_VIEWS = {"broadcast_in_dim", "expand_dims", "iota", "reshape", "squeeze", "split", "slice"}


def bytes_of(value: Value) -> int:
    """The bytes of an array or of random keys; 0 for tokens and references."""
    if value.is_array:
        return value.num_bytes
    return 0 if value.dtype is None else _KEY_BYTES * math.prod(value.shape)


def is_host_copy(operation: Operation) -> bool:
    """Whether an operation copies between device and host, as policies of `jax.checkpoint` do."""
    return operation.name == "device_put" and operation.uses_host_memory


def copies_in_host(operation: Operation) -> list[Value]:
    """What an operation copies from the device into host memory."""
    return operation.outputs_in_host if is_host_copy(operation) else []


def is_view(operation: Operation) -> bool:
    """Whether the result is a view of an operand: it takes no time, and no bytes of its own."""
    return operation.name in _VIEWS or is_broadcast(operation)


def is_pointwise(operation: Operation) -> bool:
    """Whether XLA can compute an element of the result where it is read, from few elements."""
    return is_elementwise(operation) or operation.name in _PLACED


def is_fused(operation: Operation) -> bool:
    """Whether XLA fuses an operation with those that make its operands.

    True of pointwise operations, and of reductions such as those of a softmax or a norm.
    """
    return is_pointwise(operation) or operation.name.startswith("reduce_")


def flops_of(operation: Operation) -> int:
    """Floating-point operations of products and convolutions: two for each multiplication."""
    estimate = operation.equation.params.get("cost_estimate")
    return estimate.flops if estimate is not None else 2 * operation.products


def seconds_of(operation: Operation) -> float:
    """Predicted seconds of an operation: the longer of its arithmetic and its memory traffic."""
    if is_view(operation):
        return 0.0
    written = sum(map(bytes_of, operation.outputs))
    if isinstance(operation, Loop):
        body = sum(seconds_of(x) for x in operation.body.operations)
        return operation.length * (body + _TURN)
    read = 0 if is_fused(operation) else sum(map(bytes_of, operation.values))
    return max(flops_of(operation) / RATES.flops, (written + read) / RATES.memory)
