"""One device's training step: trace the user's function, plan it, run the plan, average the sums.

This is ZeRO's algorithm from top to bottom (https://arxiv.org/abs/1910.02054, section 5). All of
it happens while JAX traces the body of the `shard_map`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._collectives import CommSpec, EncodedShards, ReduceSpec, from_stored, gathered_aval, labelled
from .._mesh import LOCAL, NODE, REDUCTION_HOPS, microbatch_index
from .._plan import (
    BlockUses,
    Plan,
    ShardedParam,
    View,
    find_uses,
    make_plan,
    mark_kept_slices,
    slices_kept_in_program,
)
from .._program import Block, Value, trace
from .._sharding import CommSchedule, DimSharding, LeafSpec, layouts_by_preference, split_dim, unpad
from .._simigrad import GradientHalves
from .block import run_block
from .gather_sources import gather_source, scan_depths
from .mean_gradients import GradientTarget, MeanGradients, mean_over_devices
from .microbatches import Accumulators, accumulate, split_microbatches
from .weight_differences import kept_slice, next_slice
from .wire_state import LocalWireState


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The leaves of all sharded arguments, in order, and whether the ZeRO stage shards them."""

    leaves: tuple[LeafSpec, ...]
    differentiated: tuple[int, ...]  # indices into `leaves` of those that get gradients
    weights_split: bool  # whether weights are sharded (stage 3)
    gradients_split: bool  # whether gradients are sharded (stages 2 and 3)

    def weight_layout(self, i: int) -> DimSharding | None:
        return self.leaves[i].layout if self.weights_split else None

    def gradient_layout(self, i: int) -> DimSharding | None:
        return self.leaves[i].layout if self.gradients_split else None


# The user's function on flat lists: `(parameters, inputs) -> (loss, weight, gradients, others)`,
# where `weight` is the sum of example weights. The first three are None, None and [] in a
# forward-only program.
Flat = Callable[[list[Any], list[Any]], tuple[Any, Any, list[Any], list[Any]]]


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of a step on one device."""

    loss: Array | None  # mean over the batch; None in a forward-only program
    gradients: list[Any]  # means, in the layout in which gradients are stored
    others: list[Array]  # other outputs, stacked over micro-batches
    wire_state: LocalWireState  # for the next step
    plan: Plan
    halves: GradientHalves | None = None  # inner products of half-batch gradients, if requested


def run_on_device(
    flat: Flat,
    parameters: Parameters,
    stored: Sequence[Array],
    wire_state: LocalWireState,
    inputs: Sequence[Array],
    specs: Sequence[Any],
    microbatches: int,
    comm: CommSpec,
) -> Result:
    """Run one step on one device: trace, plan, run every micro-batch, average over devices.

    Args:
        flat: the user's function on flat lists of arrays.
        parameters: shape, layout and name of each array in `stored`.
        stored: this device's shards of the sharded arguments (full arrays below stage 3).
        wire_state: node slices and residuals from the previous step.
        inputs: this device's rows of the batch, and replicated values.
        specs: the `PartitionSpec` of each input; inputs that it splits are rows.
        microbatches: how many equal parts the rows are cut into, run one after the other.
        comm: mesh axes, codecs and schedule of all collectives.
    """
    # Weights that stage 1 or 2 leaves unsharded are full already, and passed to the program so.
    full = [
        None if parameters.weight_layout(i) else unpad(x, leaf.layout) if leaf.layout else x
        for i, (leaf, x) in enumerate(zip(parameters.leaves, stored, strict=True))
    ]
    block, shapes = _trace(flat, parameters, stored, full, inputs, specs, microbatches, comm)
    first = 1 if microbatches > 1 else 0  # input 0 is then the index of the micro-batch
    values = block.inputs[first : first + len(stored)]
    weights, uses = _choose_layouts(block, values, parameters, comm)
    all_depths = scan_depths(uses)
    depths = {i: all_depths.get(weight, 0) for i, weight in weights.items()}
    targets = []
    if shapes[0] is not None:
        targets = _targets(parameters, weights, depths, wire_state, microbatches, comm)
    reduce_specs = _reduce_specs(shapes, targets)
    output = block.outputs[0] if shapes[0] is not None else None
    loss = output if isinstance(output, Value) else None  # a constant ends no region
    kept_weights = _slices_to_keep(parameters, weights, wire_state, microbatches, comm)
    num_hops = _num_gather_axes(comm, bool(kept_weights))
    top = make_plan(block, uses, reduce_specs, loss, _effective_schedule(comm), num_hops)
    top = mark_kept_slices(top, kept_weights)
    slices, sources = _gather_sources(
        stored, parameters, weights, depths, wire_state, slices_kept_in_program(top), comm
    )
    last_sources = dict(sources)

    def run(index: Array | None, inputs: list[Any]) -> tuple[Accumulators, list[Any]]:
        indices = [] if index is None else [index]
        outputs, sources_now = run_block(top, comm, [*indices, *full, *inputs], sources)
        if index is None:
            last_sources.update(sources_now)
        loss, weight, gradients, others = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        zero = jnp.zeros(()) if loss is None else loss
        return Accumulators(zero, weight, gradients), others

    sums, others = accumulate(run, inputs, specs, microbatches)
    kept = sum(x.data.nbytes for x in last_sources.values()) if comm.hpz else 0
    if shapes[0] is None:
        plan = Plan(top, slice_bytes=kept, codecs=comm.described)
        return Result(None, [], others, wire_state, plan)
    means, residuals = _means(sums, targets, parameters, wire_state, microbatches, comm)
    at_end = tuple(target.leaf.path for target in targets if target.reduce_spec is None)
    return Result(
        means.loss.astype(shapes[0].dtype),
        means.gradients,
        others,
        LocalWireState(slices, residuals),
        Plan(top, at_end, slice_bytes=kept, codecs=comm.described),
        means.halves,
    )


def _num_gather_axes(comm: CommSpec, keeps_slices: bool) -> int:
    """The largest number of mesh axes that the program gathers a weight over; at least 1.

    With hpZ it gathers over `local` only, unless it makes node slices itself (`keeps_slices`).
    """
    axes = comm.gather_axes if comm.hpz is None or keeps_slices else (LOCAL,)
    return max(1, len(comm.axes_with_peers(axes)))


def _gather_sources(
    stored: Sequence[Array],
    parameters: Parameters,
    weights: dict[int, ShardedParam],
    depths: Mapping[int, int],
    wire_state: LocalWireState,
    kept_in_program: frozenset[ShardedParam],
    comm: CommSpec,
) -> tuple[dict[int, Array], dict[ShardedParam, EncodedShards]]:
    """Make the array that each weight is gathered from: its shard or its node slice.

    For weights in `kept_in_program` it is the shard: the program makes their node slices in their
    first gather.

    Returns:
        The new node slices of weights that are sent as differences, for the wire state, by index
        of the leaf; and the gather sources of all weights.
    """
    slices, sources = {}, {}
    from_shards = dataclasses.replace(comm, hpz=None)
    for i, weight in weights.items():
        leaf, node_slice = parameters.leaves[i], None
        if i in wire_state.slices:
            kept = kept_slice(wire_state.slices[i], leaf, comm)
            node_slice = next_slice(stored[i], kept, leaf, comm)
            slices[i] = node_slice.data
        with labelled("weights", leaf.path):
            spec = from_shards if weight in kept_in_program else comm
            depth = depths.get(i, 0)
            sources[weight] = gather_source(stored[i], leaf, weight, depth, spec, node_slice)
    return slices, sources


def _slices_to_keep(
    parameters: Parameters,
    weights: dict[int, ShardedParam],
    wire_state: LocalWireState,
    microbatches: int,
    comm: CommSpec,
) -> frozenset[ShardedParam]:
    """Choose the weights whose node slices the program makes in their first gather (hpZ).

    The other node slices are made before the program runs. This is needed with several
    micro-batches, which share them; with weight differences, which update them; and where the
    program splits a weight along another dim than storage does.
    """
    if comm.hpz is None or microbatches > 1 or comm.sizes[NODE] == 1:
        return frozenset()
    leaves = parameters.leaves
    return frozenset(
        weight
        for i, weight in weights.items()
        if i not in wire_state.slices and leaves[i].layout == weight.layout
    )


def _effective_schedule(comm: CommSpec) -> CommSchedule:
    """The configured schedule, but without prefetch and buckets if no leaf is sharded."""
    if comm.num_shards == 1:
        return dataclasses.replace(comm.schedule, prefetch=0, bucket_bytes=0)
    return comm.schedule


def _means(
    sums: Accumulators,
    targets: Sequence[GradientTarget],
    parameters: Parameters,
    wire_state: LocalWireState,
    microbatches: int,
    comm: CommSpec,
) -> tuple[MeanGradients, dict[int, Array]]:
    """Average over devices; also return the new residuals `[1, *shape]`, by index of the leaf."""
    numbers = parameters.differentiated
    errors = [wire_state.errors[i][0] if i in wire_state.errors else None for i in numbers]
    means = mean_over_devices(sums, targets, errors, microbatches, comm)
    pairs = zip(numbers, means.residuals, strict=True)
    return means, {i: jnp.expand_dims(x, 0) for i, x in pairs if x is not None}


def _trace(
    flat: Flat,
    parameters: Parameters,
    stored: Sequence[Array],
    full_weights: Sequence[Any],
    inputs: Sequence[Array],
    specs: Sequence[Any],
    microbatches: int,
    comm: CommSpec,
) -> tuple[Block, Any]:
    """Trace one micro-batch on the shapes of the full parameters, without gathering them."""
    full = []
    for i, (shard, x) in enumerate(zip(stored, full_weights, strict=True)):
        layout = parameters.weight_layout(i)
        leaf = parameters.leaves[i]
        decoded = shard
        if leaf.codec is not None:
            decoded = jax.ShapeDtypeStruct(from_stored(shard, leaf).shape, leaf.dtype)
        full.append(gathered_aval(decoded, layout, comm) if layout else x)
    rows = [
        jax.eval_shape(lambda x, spec=spec: split_microbatches(x, spec, microbatches)[0], x)
        if microbatches > 1 and split_dim(spec) is not None
        else x
        for x, spec in zip(inputs, specs, strict=True)
    ]

    def function(*arrays):
        index = arrays[0] if microbatches > 1 else None
        arrays = arrays[1:] if microbatches > 1 else arrays
        with microbatch_index(index):
            return flat(list(arrays[: len(stored)]), list(arrays[len(stored) :]))

    index = [jax.ShapeDtypeStruct((), jnp.arange(1).dtype)] if microbatches > 1 else []
    return trace(function, *index, *full, *rows)


def _choose_layouts(
    block: Block, values: Sequence[Value], parameters: Parameters, comm: CommSpec
) -> tuple[dict[int, ShardedParam], BlockUses]:
    """Choose the split dim of every weight so that the program can scan and slice its shards.

    A weight keeps the split dim of storage, unless the program scans or slices over that dim.
    Then the next best dim is used, and an all-to-all moves the split of the weight before the
    program and that of its gradient after it.
    """
    choices = {}
    for i, leaf in enumerate(parameters.leaves):
        layout = parameters.weight_layout(i)
        if layout:
            others = layouts_by_preference(leaf.shape, comm.num_shards)
            choices[i] = [layout, *(other for other in others if other.dim != layout.dim)]
    chosen = dict.fromkeys(choices, 0)
    # Leaves for which every dim conflicts: they keep the dim of storage, and are gathered in full
    # before the loop or the slice.
    unsolvable: set[int] = set()
    while True:
        weights = {
            i: ShardedParam(i, leaf.path, leaf.shape, leaf.dtype, choices[i][chosen[i]])
            for i, leaf in enumerate(parameters.leaves)
            if i in choices
        }
        uses = find_uses(block, {values[i]: View(weight) for i, weight in weights.items()})
        conflicts = uses.conflicts - unsolvable
        if not conflicts:
            return weights, uses
        for i in conflicts:
            chosen[i] += 1
            if chosen[i] == len(choices[i]):
                chosen[i] = 0
                unsolvable.add(i)


def _targets(
    parameters: Parameters,
    weights: dict[int, ShardedParam],
    depths: Mapping[int, int],
    wire_state: LocalWireState,
    microbatches: int,
    comm: CommSpec,
) -> list[GradientTarget]:
    """Decide over which axes the program reduces the gradient of each differentiated leaf.

    Normally these are `local` and `node`. In four cases it is `local` only, and `mean_gradients`
    sums over nodes: several micro-batches with hpZ, which keeps node slices of the weights anyway,
    so that node slices of gradients fit too; a residual that is added before the sum over nodes; a
    gradient whose split still has to move to another dim; and `split="local"`, where nodes
    all-reduce their slices, with several micro-batches or with half-batch sums.
    """
    targets = []
    sum_nodes_once = comm.hpz is not None and microbatches > 1
    sum_nodes_once |= NODE not in comm.axes and (microbatches > 1 or comm.halves)
    for i in parameters.differentiated:
        leaf, stored = parameters.leaves[i], parameters.gradient_layout(i)
        layout = weights[i].layout if i in weights else stored
        reduce_spec = None
        if layout is not None:
            moved = stored is not None and layout.dim != stored.dim
            node_only = sum_nodes_once or moved or i in wire_state.errors
            hops = (LOCAL,) if node_only and comm.sizes[NODE] > 1 else REDUCTION_HOPS
            reduce_spec = ReduceSpec(leaf.path, leaf.shape, leaf.dtype, layout, hops)
        size = math.prod(leaf.shape[depths.get(i, 0) :])
        if i in wire_state.errors:
            # The wire state was sized before any program was traced, by the leaf alone.
            size = leaf.layer_size
        targets.append(GradientTarget(leaf, stored, reduce_spec, size))
    return targets


def _reduce_specs(shapes: Any, targets: Sequence[GradientTarget]) -> list[ReduceSpec | None]:
    """The reduction of each output of the program; None if it is not reduced."""
    loss, weight, _, others = shapes
    num_before = len(jax.tree.leaves((loss, weight)))
    return [
        *[None] * num_before,
        *[target.reduce_spec for target in targets],
        *[None] * len(others),
    ]
