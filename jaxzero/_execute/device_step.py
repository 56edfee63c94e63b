"""What one device runs: trace the user's function, plan it, emit it, finish the sums.

All of it happens while the body of the `shard_map` is traced.
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
    keep_slices,
    kept_inside,
    make_plan,
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
    """The leaves of all sharded arguments, in order, and what is split of them."""

    leaves: tuple[LeafSpec, ...]
    differentiated: tuple[int, ...]  # those that get gradients
    weights_split: bool  # ZeRO stage 3
    gradients_split: bool  # ZeRO stage 2 and 3

    def weight_layout(self, i: int) -> DimSharding | None:
        return self.leaves[i].layout if self.weights_split else None

    def gradient_layout(self, i: int) -> DimSharding | None:
        return self.leaves[i].layout if self.gradients_split else None


# The user's function on flat arrays, parameters and inputs: `(loss, weight, gradients, others)`.
# The first three are None, None and [] in a forward-only program.
Flat = Callable[[list[Any], list[Any]], tuple[Any, Any, list[Any], list[Any]]]


@dataclasses.dataclass(frozen=True)
class Result:
    """What one device made of a step."""

    loss: Array | None  # None in a forward-only program
    gradients: list[Any]  # means, in stored form
    others: list[Array]  # other outputs, stacked over micro-batches
    memory: LocalWireState
    plan: Plan
    halves: GradientHalves | None = None  # of the devices, if they are wanted


def run_on_device(
    flat: Flat,
    parameters: Parameters,
    stored: Sequence[Array],
    memory: LocalWireState,
    inputs: Sequence[Array],
    specs: Sequence[Any],
    microbatches: int,
    comm: CommSpec,
) -> Result:
    """Trace, plan and run.

    Args:
        flat: the user's function.
        parameters: what `stored` are.
        stored: this device's pieces of the sharded arguments.
        memory: what is remembered from the step before.
        inputs: this device's rows of the batch, and replicated values.
        specs: for each input, which it is.
        microbatches: how many.
        comm: how values travel.
    """
    whole = [
        None if parameters.weight_layout(i) else unpad(x, leaf.layout) if leaf.layout else x
        for i, (leaf, x) in enumerate(zip(parameters.leaves, stored, strict=True))
    ]
    block, shapes = _trace(flat, parameters, stored, whole, inputs, specs, microbatches, comm)
    first = 1 if microbatches > 1 else 0
    values = block.inputs[first : first + len(stored)]
    weights, uses = _choose_layouts(block, values, parameters, comm)
    all_depths = scan_depths(uses)
    depths = {i: all_depths.get(weight, 0) for i, weight in weights.items()}
    targets = []
    if shapes[0] is not None:
        targets = _targets(parameters, weights, depths, memory, microbatches, comm)
    loss = block.outputs[0] if shapes[0] is not None else None
    reduce_specs = _reduce_specs(shapes, targets)
    loss = loss if isinstance(loss, Value) else None
    to_keep = _to_keep(parameters, weights, memory, microbatches, comm)
    num_hops = max(1, len(comm.long(comm.gather_axes if not comm.hpz or to_keep else (LOCAL,))))
    top = make_plan(block, uses, reduce_specs, loss, _schedule(comm), num_hops)
    top = keep_slices(top, to_keep)
    slices, held = _held(stored, parameters, weights, depths, memory, kept_inside(top), comm)
    held_last = dict(held)

    def run(index: Array | None, inputs: list[Any]) -> tuple[Accumulators, list[Any]]:
        indices = [] if index is None else [index]
        outputs, held_now = run_block(top, comm, [*indices, *whole, *inputs], held)
        if index is None:
            held_last.update(held_now)
        loss, weight, gradients, others = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        zero = jnp.zeros(()) if loss is None else loss
        return Accumulators(zero, weight, gradients), others

    sums, others = accumulate(run, inputs, specs, microbatches)
    kept = sum(x.data.nbytes for x in held_last.values()) if comm.hpz else 0
    if shapes[0] is None:
        return Result(None, [], others, memory, Plan(top, slice_bytes=kept, codecs=comm.described))
    means, lost = _means(sums, targets, parameters, memory, microbatches, comm)
    at_end = tuple(want.leaf.path for want in targets if want.reduce_spec is None)
    return Result(
        means.loss.astype(shapes[0].dtype),
        means.gradients,
        others,
        LocalWireState(slices, lost),
        Plan(top, at_end, slice_bytes=kept, codecs=comm.described),
        means.halves,
    )


def _held(
    stored: Sequence[Array],
    parameters: Parameters,
    weights: dict[int, ShardedParam],
    depths: Mapping[int, int],
    memory: LocalWireState,
    later: frozenset[ShardedParam],
    comm: CommSpec,
) -> tuple[dict[int, Array], dict[ShardedParam, EncodedShards]]:
    """What each weight is gathered from; and the slices to remember.

    Slices of the weights in `later` are made where the program first gathers those.
    """
    slices, held = {}, {}
    from_shards = dataclasses.replace(comm, hpz=None)
    for i, weight in weights.items():
        leaf, known = parameters.leaves[i], None
        if i in memory.slices:
            kept = kept_slice(memory.slices[i], leaf, comm)
            known = next_slice(stored[i], kept, leaf, comm)
            slices[i] = known.data
        with labelled("weights", leaf.path):
            how = from_shards if weight in later else comm
            held[weight] = gather_source(stored[i], leaf, weight, depths.get(i, 0), how, known)
    return slices, held


def _to_keep(
    parameters: Parameters,
    weights: dict[int, ShardedParam],
    memory: LocalWireState,
    microbatches: int,
    comm: CommSpec,
) -> frozenset[ShardedParam]:
    """The weights whose slices are best made where they are first gathered (hpZ).

    Not those of several micro-batches, which share them, nor those that are brought up to
    date by differences; nor those that are cut along another dim inside the node.
    """
    if comm.hpz is None or microbatches > 1 or comm.sizes[NODE] == 1:
        return frozenset()
    leaves = parameters.leaves
    return frozenset(
        weight
        for i, weight in weights.items()
        if i not in memory.slices and leaves[i].layout == weight.layout
    )


def _schedule(comm: CommSpec) -> CommSchedule:
    """What was asked for; where nothing is sent there is nothing to plan."""
    if comm.pieces == 1:
        return dataclasses.replace(comm.schedule, prefetch=0, bucket_bytes=0)
    return comm.schedule


def _means(
    sums: Accumulators,
    targets: Sequence[GradientTarget],
    parameters: Parameters,
    memory: LocalWireState,
    microbatches: int,
    comm: CommSpec,
) -> tuple[MeanGradients, dict[int, Array]]:
    """The means, and what rounding lost, by number of leaf."""
    numbers = parameters.differentiated
    errors = [memory.errors[i][0] if i in memory.errors else None for i in numbers]
    means = mean_over_devices(sums, targets, errors, microbatches, comm)
    pairs = zip(numbers, means.lost, strict=True)
    return means, {i: jnp.expand_dims(x, 0) for i, x in pairs if x is not None}


def _trace(
    flat: Flat,
    parameters: Parameters,
    stored: Sequence[Array],
    whole: Sequence[Any],
    inputs: Sequence[Array],
    specs: Sequence[Any],
    microbatches: int,
    comm: CommSpec,
) -> tuple[Block, Any]:
    """The program of one micro-batch, on full parameters that never exist."""
    full = []
    for i, (shard, x) in enumerate(zip(stored, whole, strict=True)):
        layout = parameters.weight_layout(i)
        leaf = parameters.leaves[i]
        piece = shard
        if leaf.codec is not None:
            piece = jax.ShapeDtypeStruct(from_stored(shard, leaf).shape, leaf.dtype)
        full.append(gathered_aval(piece, layout, comm) if layout else x)
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
    """Cut every weight so that the program can scan and slice it as shards.

    Storage decides, unless the program scans (or slices) a weight over the very dim that it
    is split on: then the next best dim is taken, and the shards change dims by an
    all-to-all on the way in and out.
    """
    choices = {}
    for i, leaf in enumerate(parameters.leaves):
        layout = parameters.weight_layout(i)
        if layout:
            others = layouts_by_preference(leaf.shape, comm.pieces)
            choices[i] = [layout, *(other for other in others if other.dim != layout.dim)]
    chosen = dict.fromkeys(choices, 0)
    hopeless: set[int] = set()
    while True:
        weights = {
            i: ShardedParam(i, leaf.path, leaf.shape, leaf.dtype, choices[i][chosen[i]])
            for i, leaf in enumerate(parameters.leaves)
            if i in choices
        }
        uses = find_uses(block, {values[i]: View(weight) for i, weight in weights.items()})
        conflicts = uses.conflicts - hopeless
        if not conflicts:
            return weights, uses
        for i in conflicts:
            chosen[i] += 1
            if chosen[i] == len(choices[i]):
                chosen[i] = 0
                hopeless.add(i)


def _targets(
    parameters: Parameters,
    weights: dict[int, ShardedParam],
    depths: Mapping[int, int],
    memory: LocalWireState,
    microbatches: int,
    comm: CommSpec,
) -> list[GradientTarget]:
    """For each differentiated leaf, how far the program reduces its gradient.

    Only inside the node, if the sum over nodes is better taken once, at the end: for all
    micro-batches, if the memory for slices is there anyway; if an error is added to it; if
    the slice still has to be cut along another dim; or if it stays whole on every node, and is
    targets in halves.
    """
    targets = []
    once = comm.hpz is not None and microbatches > 1
    once |= NODE not in comm.axes and (microbatches > 1 or comm.halves)
    for i in parameters.differentiated:
        leaf, stored = parameters.leaves[i], parameters.gradient_layout(i)
        layout = weights[i].layout if i in weights else stored
        reduce_spec = None
        if layout is not None:
            moved = stored is not None and layout.dim != stored.dim
            late = once or moved or i in memory.errors
            hops = (LOCAL,) if late and comm.sizes[NODE] > 1 else REDUCTION_HOPS
            reduce_spec = ReduceSpec(leaf.path, leaf.shape, leaf.dtype, layout, hops)
        size = math.prod(leaf.shape[depths.get(i, 0) :])
        if i in memory.errors:  # made for it, whatever the program scans
            size = leaf.layer_size
        targets.append(GradientTarget(leaf, stored, reduce_spec, size))
    return targets


def _reduce_specs(shapes: Any, targets: Sequence[GradientTarget]) -> list[ReduceSpec | None]:
    """How each output of the program is wanted."""
    loss, weight, _, others = shapes
    num_before = len(jax.tree.leaves((loss, weight)))
    return [*[None] * num_before, *[want.reduce_spec for want in targets], *[None] * len(others)]
