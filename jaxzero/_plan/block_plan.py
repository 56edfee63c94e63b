"""The schedule of one block of a program, as data."""

from __future__ import annotations

import dataclasses

from .._program import Block, Value
from .gradient_reductions import BlockGradients
from .lifetimes import Gather
from .param_uses import BlockUses


@dataclasses.dataclass(frozen=True)
class GatherGroup:
    """Weights that are gathered together."""

    gathers: tuple[Gather, ...]
    issues: tuple[int, ...]  # for each hop, the operation before which it is sent
    ties: tuple[Value | None, ...]  # for each hop, what must exist first
    prefetched: bool = False  # in a loop: sent in the iterations before

    @property
    def at(self) -> int:
        """The operation that first needs one of them."""
        return self.gathers[0].at


@dataclasses.dataclass(frozen=True)
class ReduceGroup:
    """Gradients that are reduced together, once the last of them is made."""

    values: tuple[Value, ...]
    at: int  # the operation that makes the last
    deferred: bool = False  # in a loop: sent in the iteration after


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """A loop's body, and when the first layer's weights are sent."""

    body: BlockPlan
    issue: int
    tie: Value | None = None
    continues: int | None = None  # the loop that has sent them already

    @property
    def is_pipelined(self) -> bool:
        """Whether anything crosses from one iteration to the next."""
        deferred = any(group.deferred for group in self.body.reduce_groups)
        return deferred or any(group.prefetched for group in self.body.gather_groups)


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """The plan of one block, with those of its loops."""

    block: Block
    uses: BlockUses
    gradients: BlockGradients
    gather_groups: tuple[GatherGroup, ...]
    reduce_groups: tuple[ReduceGroup, ...]
    num_hops: int  # that a shard takes to become whole
    overlaps: bool  # gradients travel while the next unit computes
    zeros: frozenset[Value]  # gradients of nothing but zeros, which need no reduction
    loops: dict[int, LoopPlan]

    def deferred_values(self) -> frozenset[Value]:
        """What is known only in the iteration after: late gradients, and what is made of them."""
        deferred = {
            value for group in self.reduce_groups if group.deferred for value in group.values
        }
        for index in sorted(self.gradients.on_shards):
            operation = self.block.operations[index]
            if not deferred.isdisjoint(operation.inputs):
                deferred.update(operation.outputs)
        return frozenset(deferred)
