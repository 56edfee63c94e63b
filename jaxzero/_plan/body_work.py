"""Sum up what a loop's body has computed by each of its operations, and find values on the way.

Work is counted in the multiplications of matrix products. Copies from and to host memory that
should not begin with an iteration wait for a value that is known once enough of it is done.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from .._program import Block, Loop, Value
from .block_plan import BlockPlan


def work_done(block: Block) -> np.ndarray:
    """For each operation, the multiplications of the block up to its end."""
    return np.cumsum([operation.products for operation in block.operations])


def known_after(plan: BlockPlan, share: float, *, in_any_order: bool = False) -> Value | None:
    """The first float output of a matrix product at which `share` of the body's work is done.

    None if there is none. Values that the runner does not keep as they are made are passed over:
    gradients that are reduced, and what is computed on shards or from weights alone.

    Args:
        plan: of the body.
        share: of its work.
        in_any_order: whether that much is done in whatever order XLA schedules the body: only the
            work counts that the product depends on, and its own. Otherwise it is done in the
            program's order.
    """
    operations = plan.block.operations
    order = work_done(plan.block)
    work = _work_needed(plan.block) if in_any_order else order
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


def _work_needed(block: Block) -> list[int]:
    """For each operation, its multiplications and those of all operations that it depends on."""
    needed: dict[Value, int] = {}  # the operations with products behind a value, as a set of bits
    products: list[int] = []
    work = []
    for operation in block.operations:
        behind = 0
        for x in operation.inputs:
            behind |= needed.get(x, 0) if isinstance(x, Value) else 0
        if operation.products:
            behind |= 1 << len(products)
            products.append(operation.products)
        needed |= dict.fromkeys(operation.outputs, behind)
        work.append(sum(x for bit, x in enumerate(products) if behind >> bit & 1))
    return work
