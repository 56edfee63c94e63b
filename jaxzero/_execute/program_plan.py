"""Plan the program of one step on one device: layouts of weights, and targets of gradients.

In: the traced program of one micro-batch and the leaves of the sharded arguments. Out: its
`BlockPlan`, with the layouts of weights and the targets of gradients. Nothing runs here. Arguments
named `shapes` are the shapes of the program's outputs: loss, weight, gradients and others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from .._collectives import CommSpec, ReduceSpec, reduce_axes
from .._mesh import HOST, LOCAL, NODE, REDUCTION_HOPS
from .._plan import (
    BlockPlan,
    BlockUses,
    ShardedParam,
    View,
    cut_last_updates,
    find_uses,
    make_plan,
    mark_final_gradients,
    mark_kept_slices,
    mark_sums,
    separate_ends,
    slices_kept_in_program,
)
from .._program import Block, Value
from .._sharding import (
    CommSchedule,
    layouts_by_preference,
)
from .gather_sources import kept_slice, scan_depths
from .mean_gradients import GradientTarget
from .parameters import Parameters
from .wire_state import DeviceWireState


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """The plan of a program, and how its weights and gradients are laid out in it.

    Attributes:
        top: the plan of its gathers and reductions.
        later: the plan for the micro-batches after the first, which gather from the node slices
            that the first has made (hpZ); None if `top` is the plan for all of them.
        weights: each sharded weight as the program sees it, by index of the leaf.
        depths: for each weight, the number of its leading dims that the program scans over.
        targets: for each differentiated leaf, how its gradient is reduced and stored.
    """

    top: BlockPlan
    later: BlockPlan | None
    weights: dict[int, ShardedParam]
    depths: dict[int, int]
    targets: list[GradientTarget]

    @property
    def means(self) -> frozenset[int]:
        """The indices of the targets whose gradients the program leaves as means."""
        return frozenset(i for i, target in enumerate(self.targets) if target.is_mean)


def plan_program(
    block: Block,
    shapes: Any,
    parameters: Parameters,
    wire_state: DeviceWireState,
    microbatches: int,
    comm: CommSpec,
    updates: Collection[int],
    not_derived: Collection[int] = (),
) -> ProgramPlan:
    """Plan the program of one micro-batch.

    Args:
        block: the traced program. Its inputs are the index of the micro-batch, if there are
            several, the full parameters, and the other inputs.
        shapes: the shapes of the program's outputs: loss, weight, gradients and others.
        parameters: the leaves of all sharded arguments.
        wire_state: tells which weights are sent as differences, and which gradients with residuals.
        microbatches: the number of micro-batches.
        comm: mesh axes, codecs and schedule.
        updates: indices of the leaves that the program updates, where it can.
        not_derived: indices of the targets whose gradients are values that a `custom_vjp` returns,
            not derivatives of the loss.
    """
    first = 1 if microbatches > 1 else 0
    values = block.inputs[first : first + len(parameters.leaves)]
    host = frozenset(
        i
        for i, leaf in enumerate(parameters.leaves)
        if leaf.memory_kind == HOST and _can_fetch(i, wire_state, microbatches, comm)
    )
    weights, uses = _choose_layouts(block, values, parameters, host, comm)
    all_depths = scan_depths(uses)
    depths = {i: all_depths.get(weight, 0) for i, weight in weights.items()}
    targets = []
    if shapes[0] is not None:
        targets = _targets(parameters, weights, depths, wire_state, microbatches, comm)
        targets = [_as_value(x) if i in not_derived else x for i, x in enumerate(targets)]
    output = block.outputs[0] if shapes[0] is not None else None
    loss = output if isinstance(output, Value) else None  # no operation makes a constant
    kept_weights = _slices_to_keep(parameters, weights, depths, wire_state, microbatches, comm)

    def planned(keeps_slices: bool) -> BlockPlan:
        return make_plan(
            block,
            uses,
            _reduce_specs(shapes, targets),
            loss,
            _effective_schedule(comm, bool(host)),
            lambda specs: reduce_axes(specs, comm),
            _gather_axes(comm, keeps_slices),
            parameters.offload.window if parameters.offload else 1,
        )

    top, later = mark_kept_slices(planned(bool(kept_weights)), kept_weights), None
    if microbatches > 1 and kept_weights:
        later = planned(keeps_slices=False)
        # Without kept slices the first micro-batch is like the others.
        if not slices_kept_in_program(top):
            top, later = later, None
    # Otherwise the program cannot divide: sums go on over micro-batches, the sum of weights is not
    # known yet, or half-batches have divisors of their own.
    if microbatches == 1 and not comm.halves and shapes[1] is None:
        top, targets = _with_means(top, shapes, targets, parameters, updates)
        top = cut_last_updates(top)
    top, later = mark_sums(top), later and mark_sums(later)
    top, later = separate_ends(top, comm), later and separate_ends(later, comm)
    return ProgramPlan(top, later, weights, depths, targets)


def _choose_layouts(
    block: Block,
    values: Sequence[Value],
    parameters: Parameters,
    host: frozenset[int],
    comm: CommSpec,
) -> tuple[dict[int, ShardedParam], BlockUses]:
    """Choose the split dim of every weight so that the program can scan and slice its shards.

    A weight keeps the split dim of storage, unless the program scans or slices along that dim. Then
    the next best dim is used, and an all-to-all moves the split of the weight before the program,
    and the split of its gradient after it. Weights in `host` are fetched from host memory by the
    program, unless their split is moved.

    Returns:
        The weights as the program sees them, by index of the leaf; and where it uses them.
    """
    choices = {}
    for i, leaf in enumerate(parameters.leaves):
        layout = parameters.weight_layout(i)
        if layout:
            axes = leaf.split_axes(comm.axes)
            others = layouts_by_preference(leaf.shape, math.prod(comm.sizes[x] for x in axes))
            choices[i] = [layout, *(other for other in others if other.dim != layout.dim)]
    chosen = dict.fromkeys(choices, 0)
    # Leaves for which every dim conflicts: they keep the dim of storage, and are gathered in full
    # before the loop or the slice.
    unsolvable: set[int] = set()
    while True:
        weights = {
            i: ShardedParam(
                i,
                leaf.path,
                leaf.shape,
                leaf.dtype,
                choices[i][chosen[i]],
                in_host=i in host and not chosen[i],
            )
            for i, leaf in enumerate(parameters.leaves)
            if i in choices
        }
        views = {values[i]: View(weight) for i, weight in weights.items()}
        uses = find_uses(block, views, comm.schedule.loop_constant_bytes)
        conflicts = uses.conflicts - unsolvable
        if not conflicts:
            return weights, uses
        for i in conflicts:
            chosen[i] += 1
            if chosen[i] == len(choices[i]):
                chosen[i] = 0
                unsolvable.add(i)


def _can_fetch(i: int, wire_state: DeviceWireState, microbatches: int, comm: CommSpec) -> bool:
    """Return whether the program can fetch leaf `i` from host memory, one layer at a time.

    It cannot if a node slice (hpZ) is made before the program runs, from the full shard.
    """
    makes_slice = _makes_slices(microbatches, comm) and i not in wire_state.slices
    return comm.hpz is None or makes_slice


def _makes_slices(microbatches: int, comm: CommSpec) -> bool:
    """Return whether the program makes node slices in the first gathers of weights (hpZ).

    With several micro-batches, the program of the first micro-batch makes them, and the others run
    a second program, which has to be compiled too. Without prefetch nothing overlaps with gathers,
    so that a second program does not pay: then one program runs all micro-batches, and node slices
    are made before it.
    """
    if comm.hpz is None or comm.sizes[NODE] == 1:
        return False
    return microbatches == 1 or comm.schedule.prefetch > 0


def _slices_to_keep(
    parameters: Parameters,
    weights: dict[int, ShardedParam],
    depths: Mapping[int, int],
    wire_state: DeviceWireState,
    microbatches: int,
    comm: CommSpec,
) -> frozenset[ShardedParam]:
    """Choose the weights whose node slices the program makes in their first gather (hpZ).

    The slices of two kinds of weights are made before the program runs. The program splits the
    first kind along another dim than storage does. The second kind is a stack whose slice in the
    wire state does not have one message for each layer that the program scans: a stack of vectors,
    for example, is encoded as one message.
    """
    if not _makes_slices(microbatches, comm):
        return frozenset()
    leaves = parameters.leaves
    candidates = {i: weight for i, weight in weights.items() if leaves[i].layout == weight.layout}
    for i in wire_state.slices:
        kept = i in candidates and kept_slice(wire_state.slices[i], leaves[i], comm)
        if kept and kept.codec is not None and kept.lead != depths[i]:
            del candidates[i]
    return frozenset(candidates.values())


def _targets(
    parameters: Parameters,
    weights: dict[int, ShardedParam],
    depths: Mapping[int, int],
    wire_state: DeviceWireState,
    microbatches: int,
    comm: CommSpec,
) -> list[GradientTarget]:
    """Decide over which axes the program reduces the gradient of each differentiated leaf.

    Normally it reduces over `local` and `node`. In five cases it reduces over `local` only, and
    `mean_gradients` sums over nodes: (1) several micro-batches with hpZ, where memory for node
    slices of the gradients exists, as node slices of the weights are kept anyway; (2) a residual
    that is added before the sum over nodes; (3) a gradient whose split still has to move to another
    dim; (4) `split="local"`, where nodes all-reduce their slices, with several micro-batches or
    with half-batch sums; (5) nodes that run different numbers of micro-batches. None of these
    applies if sums are added in a tree (`tree_sums`).
    """
    targets = []
    sum_nodes_once = comm.hpz is not None and microbatches > 1
    sum_nodes_once |= NODE not in comm.axes and (microbatches > 1 or comm.halves)
    sum_nodes_once |= comm.node_microbatches is not None
    for i in parameters.differentiated:
        leaf, stored = parameters.leaves[i], parameters.gradient_layout(i)
        if i in parameters.tables:
            assert stored is not None
            spec = ReduceSpec(leaf.path, leaf.shape, leaf.dtype, stored)
            target = GradientTarget(leaf, stored, spec, leaf.layer_size, is_summed=True)
            targets.append(dataclasses.replace(target, is_mean=parameters.tables[i].is_mean))
            continue
        layout = weights[i].layout if i in weights else stored
        reduce_spec = None
        if layout is not None:
            moved = stored is not None and layout.dim != stored.dim
            node_only = sum_nodes_once or moved or i in wire_state.errors
            node_only &= not comm.sums_in_tree  # a node's sum is then a part of the sum over all
            hops = (LOCAL,) if node_only and comm.sizes[NODE] > 1 else REDUCTION_HOPS
            hops = leaf.split_axes(hops)
            reduce_spec = ReduceSpec(leaf.path, leaf.shape, leaf.dtype, layout, hops)
        size = math.prod(leaf.shape[depths.get(i, 0) :])
        if i in wire_state.errors:
            # The wire state was sized before any program was traced, by the leaf alone.
            size = leaf.layer_size
        targets.append(GradientTarget(leaf, stored, reduce_spec, size))
    return targets


def _as_value(target: GradientTarget) -> GradientTarget:
    """Return the target of a gradient that is a value, not a derivative: no codec encodes it."""
    spec = target.reduce_spec and dataclasses.replace(target.reduce_spec, exact=True)
    return dataclasses.replace(target, reduce_spec=spec, size=0, is_value=True)


def _reduce_specs(shapes: Any, targets: Sequence[GradientTarget]) -> list[ReduceSpec | None]:
    """Return, for each output of the program, how it is reduced; None if it is not."""
    loss, weight, _, others = shapes
    num_before = len(jax.tree.leaves((loss, weight)))
    return [
        *[None] * num_before,
        *[None if target.is_summed else target.reduce_spec for target in targets],
        *[None] * len(others),
    ]


def _with_means(
    top: BlockPlan,
    shapes: Any,
    targets: Sequence[GradientTarget],
    parameters: Parameters,
    updates: Collection[int],
) -> tuple[BlockPlan, list[GradientTarget]]:
    """Mark the gradients that are final once reduced, both in the plan and in their targets.

    Returns:
        The plan and the targets, with marks.
    """
    final = _final_gradients(shapes, targets, parameters)
    top = mark_final_gradients(
        top,
        {k: parameters.leaves[i] for k, i in final.items()},
        {k for k, i in final.items() if parameters.has_host_gradient(i)},
        {k: i for k, i in final.items() if i in updates},
    )
    pairs = zip(_outputs(shapes, targets), targets, strict=True)
    means = top.mean_outputs
    return top, [
        dataclasses.replace(target, is_mean=target.is_mean or k in means) for k, target in pairs
    ]


def _final_gradients(
    shapes: Any, targets: Sequence[GradientTarget], parameters: Parameters
) -> dict[int, int]:
    """Return the final gradients (`_plan.final_gradients`): the leaf's index, by output's index."""
    leaves = zip(parameters.differentiated, targets, strict=True)
    found = zip(_outputs(shapes, targets), leaves, strict=True)
    # A weight with a twin is not final: the twin's gradient is added at the end of the step.
    return {k: i for k, (i, target) in found if target.is_final and i not in parameters.twins}


def _outputs(shapes: Any, targets: Sequence[GradientTarget]) -> range:
    """Return the indices of the outputs that are gradients, one for each target."""
    first = len(jax.tree.leaves(shapes[:2]))
    return range(first, first + len(targets))


def _gather_axes(comm: CommSpec, keeps_slices: bool) -> tuple[str, ...]:
    """Return the axes that the program gathers a weight over, in order; at least one.

    With hpZ it gathers over `local` only, unless it makes node slices itself (`keeps_slices`).
    """
    axes = comm.gather_axes if comm.hpz is None or keeps_slices else (LOCAL,)
    return comm.axes_with_peers(axes) or axes[-1:]


def _effective_schedule(comm: CommSpec, fetches: bool) -> CommSchedule:
    """Return the configured schedule, changed if weights are not sharded, as on one device.

    Then gradients are not joined to buckets, and nothing is prefetched unless the program `fetches`
    weights from host memory.
    """
    if comm.num_shards > 1:
        return comm.schedule
    prefetch = comm.schedule.prefetch if fetches else 0
    return dataclasses.replace(comm.schedule, prefetch=prefetch, bucket_bytes=0)
