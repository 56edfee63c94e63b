"""Experts that are gathered where their tokens would be fewer bytes: a line of the printed plan.

`jz.exchange_tokens` leaves a scope in the program where all experts of a call are on the device,
with their number and the bytes for tokens (`GATHERED_EXPERTS`). The weights that are used in such a
scope, and whose first dim has that size there, are the experts.
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
    """Experts whose weights are gathered, and the bytes of tokens with `jz.Ungathered`.

    Attributes:
        names: the names of the leaves.
        weights: bytes that enter a device over `local` in a step for these leaves and gradients.
        tokens: what they would be for tokens and results, forward and backward.
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
    """The gathered experts of a plan, if sending tokens takes fewer bytes; else an empty list.

    Args:
        plan: of a step, or of a micro-batch.
        transfers: the collectives of the step.
        microbatches: the number of micro-batches in the step.
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
    """The names of the experts that a block uses, in loops too."""
    for use in plan.uses.uses:
        if use.index < len(plan.block.operations) and use.view.shape:
            found = _SCOPE.search(_scope(plan.block.operations[use.index]))
            if found is not None and int(found[1]) == use.view.shape[0]:
                yield _leaf(use.view.weight.name)
    for loop in plan.loops.values():
        yield from _names(loop.body)


def _bytes_of_tokens(plan: BlockPlan, is_trained: bool) -> int:
    """Bytes that would enter a device if the tokens of a block's exchanges were sent.

    Each exchange contains one sort, by which it is counted. Forward sends tokens and results, and
    backward the cotangents of both; forward that `jax.checkpoint` computes again sends tokens only.
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
