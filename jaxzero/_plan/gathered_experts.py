"""Find experts whose weights are gathered although sending tokens to them would take fewer bytes.

The printed plan has a line for them. Where all experts of a `jz.exchange_tokens` call are on the
device, the call leaves a scope in the program with the number of experts and the bytes that tokens
would take (`GATHERED_EXPERTS`). The experts are those weights that are used in such a scope and
whose first dim is as large as the number of experts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from .._collectives import Transfer, readable_bytes
from .._mesh import GATHERED_EXPERTS, LOCAL, ROWS_APART
from .._program import Operation
from .block_plan import BlockPlan

_SCOPE = re.compile(rf"{GATHERED_EXPERTS}_(\d+)_(\d+)")
_AGAIN = "rematted_computation"  # the scope of `jax.checkpoint`


@dataclasses.dataclass(frozen=True)
class GatheredExperts:
    """Experts that are gathered, and the bytes of gathering them and of sending tokens instead.

    Attributes:
        names: the names of the leaves.
        weights: bytes that enter a device over `local` in a step for the gathers of these leaves
            and the reductions of their gradients.
        tokens: bytes that would enter a device over `local` in a step with `jz.Ungathered`: those
            of tokens and results, forward and backward.
    """

    names: tuple[str, ...]
    weights: int
    tokens: int

    def __str__(self) -> str:
        return (
            f"experts gathered: {', '.join(self.names)}: {readable_bytes(self.weights)} over local "
            f"(tokens, with `jz.Ungathered`: {readable_bytes(self.tokens)})"
        )


def find_gathered_experts(
    plan: BlockPlan, transfers: Sequence[Transfer], microbatches: int
) -> list[GatheredExperts]:
    """Find the gathered experts of a plan; none if sending tokens would take as many bytes or more.

    Args:
        plan: the plan of a step, or of a micro-batch.
        transfers: the collectives of the step.
        microbatches: the number of micro-batches in the step.

    Returns:
        A list of one entry for all experts, or an empty list.
    """
    names = dict.fromkeys(_names(plan))
    sent = [x for each in transfers for x in each.by_leaf() if _leaf(x.name) in names]
    weights = sum(x.trips * x.entering_bytes for x in sent if x.axis == LOCAL)
    is_trained = any(x.purpose == "gradients" for x in sent)
    tokens = microbatches * _bytes_of_tokens(plan, is_trained)
    return [GatheredExperts((*names,), weights, tokens)] if 0 < tokens < weights else []


def _leaf(name: str) -> str:
    return name.removesuffix("[i]")


def _names(plan: BlockPlan) -> Iterator[str]:
    """Yield the names of the gathered experts that a block and its loops use."""
    for use in plan.uses.uses:
        if use.index < len(plan.block.operations) and use.view.shape:
            found = _SCOPE.search(_scope(plan.block.operations[use.index]))
            if found is not None and int(found[1]) == use.view.shape[0]:
                yield _leaf(use.view.weight.name)
    for loop in plan.loops.values():
        yield from _names(loop.body)


def _bytes_of_tokens(plan: BlockPlan, is_trained: bool) -> int:
    """Return the bytes that would enter a device if a block sent tokens to the experts instead.

    Exchanges are counted by the one sort that each contains. Forward sends tokens and results, and
    backward, if the experts are trained (`is_trained`), sends the cotangents of both. A forward
    pass that `jax.checkpoint` repeats sends tokens only.
    """
    total = 0
    for operation in plan.block.operations:
        found = _SCOPE.search(scope := _scope(operation))
        if operation.name == "sort" and found is not None and ROWS_APART in scope:
            times = 1 if _AGAIN in scope else 4 if is_trained else 2
            total += times * int(found[2])
    for index, loop in plan.loops.items():
        length = plan.block.operations[index].length  # pyright: ignore[reportAttributeAccessIssue]
        total += length * _bytes_of_tokens(loop.body, is_trained)
    return total


def _scope(operation: Operation) -> str:
    return str(operation.equation.source_info.name_stack)
