"""Decide whether a loop holds its constants in full, or gathers and reduces in each iteration.

A weight that enters a loop as a constant can be gathered before the loop and held to its end, or
gathered in every iteration just before its use. Likewise, reverse-mode differentiation sums the
gradient of a constant in the loop's carry. That sum can be held in full and reduced after the loop,
or each iteration can reduce its term and add it as a shard. Holding takes the memory of all
constants, and sends their bytes once. Gathering or reducing in each iteration takes the memory of
one layer, and sends the bytes in each iteration. So the weights of a recurrent cell are held, and
the weights of a model in a loop over micro-batches are not.
"""

from __future__ import annotations

import dataclasses

from .._program import Loop, Value
from .._sharding import CommSchedule

# What a loop holds by default: less than 1% of the memory of an H200. A guess, not measured.
HELD_BYTES = 2**30
# A collective overlaps with so many multiplications for each byte, or more: a quarter of those that
# an H200 does while it receives a byte inside its node.
WORK_PER_BYTE = 220


def is_better_inside(loop: Loop, held_bytes: int, at_once: int, limit: int | None) -> bool:
    """Return whether a loop's body should gather weights, or reduce gradients, in each iteration.

    Args:
        loop: the loop, or a branch.
        held_bytes: bytes of all weights, or of all sums, that the loop would hold in full
            otherwise; for a branch, of the weights of all branches.
        at_once: the most of these bytes that one operation of the body needs. If they are half of
            `held_bytes` or more, the answer is no: with one array in use and the next one in
            flight, nothing would be saved.
        limit: the most bytes to hold. None: `HELD_BYTES`, and more where the body computes too
            little for collectives in each iteration to overlap with.
    """
    if held_bytes <= 2 * at_once:
        return False
    if limit is not None:
        return held_bytes > limit
    work = sum(operation.products for operation in loop.body.operations)
    return held_bytes > HELD_BYTES and work >= WORK_PER_BYTE * held_bytes


def unchanged_inputs(loop: Loop) -> frozenset[Value]:
    """Return the inputs of a loop's body that are the same in each iteration.

    A gather must not be tied to one of them: XLA would move it in front of the loop.
    """
    constants = loop.body.inputs[: loop.num_constants]
    carry = loop.body.inputs[loop.num_constants :][: loop.num_carry]
    passed = (x for i, x in enumerate(carry) if loop.body.outputs[i] is x)
    return frozenset({*constants, *passed})


def most_held(schedule: CommSchedule) -> int:
    """Return the most bytes of weights that a loop or a branch holds from its start to its end.

    Without a limit in the schedule, a loop may hold more than this: see `is_better_inside`.
    """
    limit = schedule.loop_constant_bytes
    return HELD_BYTES if limit is None else limit


def limit_held(schedule: CommSchedule) -> CommSchedule:
    """Return the schedule for a body that gathers constants: `live_bytes` at most `most_held`."""
    limit = most_held(schedule)
    live_bytes = limit if schedule.live_bytes is None else min(limit, schedule.live_bytes)
    return dataclasses.replace(schedule, live_bytes=live_bytes)
