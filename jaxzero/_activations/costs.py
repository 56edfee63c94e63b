"""Estimate the bytes of a value, and the time to repeat an operation, by a cost model.

The rates are the defaults of `Rates`. Which operations XLA will fuse is not known before it
compiles. So the model assumes that each result is written to memory once, unless it is a view of
an operand.
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
_KEY_BYTES = 16  # of a key of "rbg", the longest; one of Threefry has 8
_PLACED = {"concatenate", "pad"}  # each element of the result is one of an operand
_VIEWS = {"broadcast_in_dim", "expand_dims", "iota", "reshape", "squeeze", "split", "slice"}


def bytes_of(value: Value) -> int:
    """Return the bytes of an array or of random keys; 0 for JAX's tokens and references."""
    if value.is_array:
        return value.num_bytes
    return 0 if value.dtype is None else _KEY_BYTES * math.prod(value.shape)


def is_host_copy(operation: Operation) -> bool:
    """Return whether an operation copies between device and host memory.

    Policies of `jax.checkpoint` that offload values make such operations.
    """
    return operation.name == "device_put" and operation.uses_host_memory


def copies_in_host(operation: Operation) -> list[Value]:
    """Return the outputs of an operation that are copies in host memory of values on the device."""
    return operation.outputs_in_host if is_host_copy(operation) else []


def is_view(operation: Operation) -> bool:
    """Return whether the result is a view of an operand, or an `iota`.

    Such a result takes no time, and no bytes of its own.
    """
    return operation.name in _VIEWS or is_broadcast(operation)


def is_pointwise(operation: Operation) -> bool:
    """Return whether each element of the result is computed from few elements of the operands.

    XLA can compute such an element where it is read.
    """
    return is_elementwise(operation) or operation.name in _PLACED


def is_fused(operation: Operation) -> bool:
    """Return whether XLA fuses an operation with the operations that make its operands.

    True of pointwise operations, and of reductions such as those of a softmax or a norm.
    """
    return is_pointwise(operation) or operation.name.startswith("reduce_")


def flops_of(operation: Operation) -> int:
    """Return the FLOPs of an operation.

    A kernel has those of its `cost_estimate`. A product or convolution has two for each
    multiplication, and any other operation none.
    """
    estimate = operation.equation.params.get("cost_estimate")
    return estimate.flops if estimate is not None else 2 * operation.products


def seconds_of(operation: Operation) -> float:
    """Predict the seconds of an operation: the longer of its arithmetic and its memory traffic.

    A loop takes the sum over its iterations.
    """
    if is_view(operation):
        return 0.0
    written = sum(map(bytes_of, operation.outputs))
    if isinstance(operation, Loop):
        body = sum(seconds_of(x) for x in operation.body.operations)
        return operation.length * (body + _TURN)
    read = 0 if is_fused(operation) else sum(map(bytes_of, operation.values))
    return max(flops_of(operation) / RATES.flops, (written + read) / RATES.memory)
