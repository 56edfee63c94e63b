"""The plan of one block of a program, as data: when each bucket is sent and what it waits for.

An operation is given by its index in the block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .._mesh import NODE
from .._program import Block, Value
from .._sharding import LeafSpec
from .gradient_reductions import BlockGradients
from .lifetimes import Gather
from .param_uses import BlockUses, ShardedParam


@dataclasses.dataclass(frozen=True)
class GatherGroup:
    """Weights that are gathered together, in one message for each dtype where possible."""

    gathers: tuple[Gather, ...]
    issues: tuple[int, ...]  # for each mesh axis, the operation before which it is sent
    ties: tuple[
        Value | None, ...
    ]  # for each axis, the value that it waits for; see [Note: ties] in `ties`
    prefetched: bool = False  # in a loop: sent in earlier iterations
    from_slices: bool = False  # its weights are gathered from node slices (hpZ)
    # Outside of loops, for shards in host memory: the operation before which they are copied to the
    # device, and the value that the copy waits for. None: they are copied when they are sent.
    fetch: int | None = None
    fetch_tie: Value | None = None

    @property
    def at(self) -> int:
        """The operation that first needs one of the weights."""
        return self.gathers[0].at


@dataclasses.dataclass(frozen=True)
class ReduceGroup:
    """Gradients that are reduced together, once the last of them has been computed."""

    values: tuple[Value, ...]
    at: int  # the operation that makes the last of these gradients
    deferred: bool = False  # in a loop: sent in later iterations
    axes: tuple[str, ...] = ()  # the mesh axes that they are reduced over, in order
    # In a loop, what the first of these hops waits for; None: the gradients only.
    after: Value | None = None
    # Outside of loops, a value of backward that exists no later than the last gradient: once it
    # exists, groups that were made earlier are sent over their next axis.
    tie: Value | None = None


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """The plan of a loop: the plan of its body, and where its prologue is sent.

    The prologue is the gathers of the loop's first layers, which are sent before the loop.
    """

    body: BlockPlan
    issue: int  # the operation before which the prologue is sent
    tie: Value | None = None  # the value that the prologue waits for
    # The earlier loop whose last messages in flight are this loop's first; it has no prologue then.
    continues: int | None = None
    window: int = 0  # how many layers ahead shards in host memory are copied to the device
    # Outputs that are stacks of gradients in host memory: their indices, and the leaves.
    host_gradients: Mapping[int, LeafSpec] = dataclasses.field(default_factory=dict)
    # Outputs on the device that the loop divides layer by layer, so that it stacks mean gradients.
    means: Mapping[int, LeafSpec] = dataclasses.field(default_factory=dict)
    # Outputs that are gradients of leaves which the loop updates: their indices, and the leaves'.
    updates: Mapping[int, int] = dataclasses.field(default_factory=dict)
    # Stacked gradients that the outer block adds to a sum: the loop adds each layer to that sum in
    # place ([Note: sums in place] in `final_gradients`). Output index, and the sum before the loop.
    sums: Mapping[int, Value] = dataclasses.field(default_factory=dict)
    # The iterations that run before and after the loop, as loops of their own (`loop_ends`).
    num_first: int = 0
    num_last: int = 0

    @property
    def is_pipelined(self) -> bool:
        """Whether weights or gradients are in flight from one iteration to the next."""
        deferred = any(group.deferred for group in self.body.reduce_groups)
        prefetched = any(group.prefetched for group in self.body.gather_groups)
        return deferred or prefetched or self.window > 0

    @property
    def updates_last_apart(self) -> bool:
        """Whether a loop's last optimizer updates are done after the loop, in separate ticks.

        See [Note: the last updates] in `emit_loop`.
        """
        return bool(self.updates and self.num_last)

    def leads(self, layer: ShardedParam) -> range:
        """Return how many iterations before its use a layer is encoded for its gathers.

        A prefetched group is encoded `num_hops` iterations ahead, any other group in the
        iteration that uses it. Several groups may gather the layer, so the result is a range
        from the smallest to the largest number.
        """
        distances = {
            self.body.num_hops if group.prefetched else 0
            for group in self.body.gather_groups
            for gather in group.gathers
            if gather.weight is layer
        } or {0}
        return range(min(distances), max(distances) + 1)


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity
class BlockPlan:
    """The groups of weights that a block gathers and of gradients that it reduces, and when.

    A block is a program or the body of a loop. `loops` has the plan of each loop in the block, by
    the index of the loop among the block's operations.
    """

    block: Block
    uses: BlockUses
    gradients: BlockGradients
    gather_groups: tuple[GatherGroup, ...]
    reduce_groups: tuple[ReduceGroup, ...]
    gather_axes: tuple[str, ...]  # that a weight is gathered over, in order
    overlaps: bool  # whether gradients are reduced while the next group computes
    zeros: frozenset[Value]  # gradients that are known to be zero, and need no reduction
    loops: dict[int, LoopPlan]
    # At the top level, gradients that are copied to host memory once reduced, and their leaves.
    host_gradients: Mapping[Value, LeafSpec] = dataclasses.field(default_factory=dict)
    # At the top level, gradients that are divided once reduced, and their leaves.
    means: Mapping[Value, LeafSpec] = dataclasses.field(default_factory=dict)
    # Additions that loops do (`LoopPlan.sums`).
    added: frozenset[int] = frozenset()
    # At the top level, indices of outputs that are means already, by `means` or `LoopPlan.means`.
    mean_outputs: frozenset[int] = frozenset()
    last_forward: int | None = None  # the last operation of forward; None in a loop's body
    # The first costly operation of backward, and a value that it reads: the loss is known before.
    loss_before: tuple[int, Value] | None = None
    # Operations before which the previous layer's gradients are reduced over their first axis,
    # and for each a value that nothing reads before they are. In a loop's body these are the
    # deferred gradients of the iteration before. If it is empty, XLA decides when they are reduced.
    reduce_early: Mapping[int, Value] = dataclasses.field(default_factory=dict)

    @property
    def num_hops(self) -> int:
        """The number of mesh axes that a weight is gathered over."""
        return len(self.gather_axes)

    def hops(self, group: GatherGroup) -> list[int]:
        """Return the indices of the axes that a group is sent over.

        A group that is gathered from node slices (hpZ) is not sent over `node`.
        """
        axes = enumerate(self.gather_axes)
        return [i for i, axis in axes if not (group.from_slices and axis == NODE)]

    def fetched(self, number: int) -> list[ShardedParam]:
        """Return the weights of group `number` whose shards are copied from host memory.

        The list is empty in a loop's body. It leaves out weights whose node slice an earlier
        group keeps on the device (hpZ): such a weight is gathered from that slice.
        """
        group = self.gather_groups[number]
        if group.fetch is None:
            return []
        earlier = self.gather_groups[:number]
        kept = {gather.weight for x in earlier for gather in x.gathers if gather.keeps}
        weights = dict.fromkeys(gather.weight for gather in group.gathers)
        return [weight for weight in weights if weight.in_host and weight not in kept]

    @property
    def deferred_groups(self) -> list[int]:
        """In a loop's body, the indices of the reduce groups that a later iteration reduces."""
        return [i for i, group in enumerate(self.reduce_groups) if group.deferred]

    def deferred_values(self) -> frozenset[Value]:
        """Return the values that exist only in a later iteration.

        These are the reduced deferred gradients, and results computed from them on shards.
        """
        deferred = {
            value for group in self.reduce_groups if group.deferred for value in group.values
        }
        for index in sorted(self.gradients.on_shards):
            operation = self.block.operations[index]
            if not deferred.isdisjoint(operation.inputs):
                deferred.update(operation.outputs)
        return frozenset(deferred)
