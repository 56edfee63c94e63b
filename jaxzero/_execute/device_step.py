"""One device's training step: trace the user's function, plan it, run the plan, average the sums.

This is ZeRO's algorithm from top to bottom (https://arxiv.org/abs/1910.02054, section 5). All of
it happens while JAX traces the body of the `shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from .._activations import Chosen
from .._collectives import (
    CommSpec,
    EncodedShards,
    copy_to_device,
    copy_to_host,
    from_stored,
    gathered_aval,
    in_region,
    labelled,
)
from .._mesh import in_host, microbatch_index
from .._plan import (
    BlockPlan,
    MovedRows,
    Plan,
    ShardedParam,
    slices_kept_in_program,
)
from .._program import (
    Block,
    Constant,
    OpenProgram,
    trace,
    values_made_of,
)
from .._sharding import split_dim
from .._simigrad import GradientHalves
from .block import run_block
from .gather_sources import gather_source, kept_slice, next_slice
from .loop_inputs import LeafUpdate
from .mean_gradients import HalfSums, MeanGradients, mean_over_devices
from .microbatches import Accumulators, accumulate, split_microbatches
from .parameters import Parameters
from .program_plan import ProgramPlan, plan_program
from .table_rows import with_table_shards
from .to_plan import to_plan
from .token_parts import note_exchanges
from .wire_state import DeviceWireState

# The user's function on flat lists: `(parameters, inputs) -> (loss, weight, gradients, others)`,
# where `weight` is the sum of example weights. The first three are None, None and [] in a
# forward-only program.
Flat = Callable[[list[Any], list[Any]], tuple[Any, Any, list[Any], list[Any]]]


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of a step on one device, and the program and plan that computed them."""

    loss: Array | None  # mean over the batch; None in a forward-only program
    gradients: list[Any]  # means, in the layout of storage; None for leaves that were updated
    others: list[Array]  # other outputs, stacked over micro-batches
    wire_state: DeviceWireState  # for the next step
    plan: Plan
    program: OpenProgram  # the user's function, differentiated, as it was traced
    block: Block  # the same, with the index of the micro-batch first if there are several
    halves: GradientHalves | None = None  # inner products of half-batch gradients, if requested
    # The new stacks of each leaf that was updated, as in `LeafUpdate.stacks`, by index of the leaf.
    updated: Mapping[int, list[Array]] = dataclasses.field(default_factory=dict)


def run_on_device(
    flat: Flat,
    parameters: Parameters,
    stored: Sequence[Array],
    wire_state: DeviceWireState,
    inputs: Sequence[Array],
    specs: Sequence[Any],
    microbatches: int,
    comm: CommSpec,
    updates: Mapping[int, LeafUpdate] | None = None,
    share_of_loss: Array | float | None = None,
    share_of_gradients: float | None = None,
    all_halves: Callable[[HalfSums], HalfSums] | None = None,
) -> Result:
    """Run one step on one device: trace, plan, run every micro-batch, average over devices.

    Args:
        flat: the user's function on flat lists of arrays.
        parameters: shape, layout and name of each array in `stored`.
        stored: this device's shards of the sharded arguments (full arrays below stage 3).
        wire_state: node slices and residuals from the previous step.
        inputs: this device's rows of the batch, and replicated values.
        specs: the `PartitionSpec` of each input; an input that its spec splits holds rows.
        microbatches: how many equal parts the rows are cut into, run one after the other. If
            `comm.node_microbatches` gives a node fewer, its devices leave out the last ones.
        comm: mesh axes, codecs and schedule of all collectives.
        updates: by index of the leaf, the updates that the program runs once gradients are known.
        share_of_loss: a factor by which `flat` multiplies the loss before it differentiates it, so
            that the sum over devices and micro-batches is the mean; `flat` gets it as its last
            input. None: `flat` differentiates the loss itself.
        share_of_gradients: a factor by which `flat` multiplies the gradients, but not the loss it
            returns.
        all_halves: with stages, converts the sums of gradients over half-batches (for SimiGrad)
            from one for each array of this stage to one for each leaf. None: there are no stages.
    """
    updates, comm, updated = updates or {}, _with_loop_limit(comm), dict[int, list[Array]]()
    if share_of_loss is not None:
        inputs, specs = [*inputs, jnp.asarray(share_of_loss)], [*specs, PartitionSpec()]
    full = _full_weights(stored, parameters)
    block, traced = _trace(flat, parameters, stored, full, inputs, specs, microbatches, comm)
    shapes, bare = traced.shapes, share_of_loss is None and share_of_gradients is None
    chosen, shapes, parameters = to_plan(block, shapes, parameters, specs, microbatches, comm, bare)
    stored, full = with_table_shards(full, stored, parameters)
    share, not_derived = _share(share_of_loss, share_of_gradients, chosen.block, shapes, parameters)
    comm = _with_divisor(comm, share)
    program = plan_program(
        chosen.block, shapes, parameters, wire_state, microbatches, comm, updates, not_derived
    )
    slices, sources = _gather_sources(stored, parameters, program, wire_state, comm)
    runs_first = microbatches == 1 or program.later is not None  # outside of a loop

    def run(plan: BlockPlan, index: Array | None, inputs: list[Any]) -> Any:
        arrays = [*full, *inputs] if index is None else [index, *full, *inputs]
        outputs, sources_now, stacks = run_block(plan, comm, arrays, sources, updates)
        note_exchanges(plan.block)
        if runs_first and plan is program.top:  # tracers of a loop must not leave it
            sources.update(sources_now)
            updated.update(stacks)
        loss, weight, gradients, others = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        return Accumulators(jnp.zeros(()) if loss is None else loss, weight, gradients), others

    first = functools.partial(run, program.top) if runs_first else None
    later = functools.partial(run, program.later or program.top)
    sums, others = accumulate(later, inputs, specs, microbatches, comm, first, program.means)
    plan = _plan_of_step(program, sources, parameters.tables, chosen, microbatches, comm)
    result = Result(None, [], others, wire_state, plan, traced, block)
    if shapes[0] is None:
        return result
    means, residuals = _means(
        sums, program, parameters, wire_state, microbatches, comm, share, all_halves
    )
    kept = {i: sources[x].data for i, x in program.weights.items() if i in wire_state.slices}
    return dataclasses.replace(
        result,
        loss=means.loss.astype(shapes[0].dtype),
        gradients=means.gradients,
        # The slices of tables, which are not gathered, stay as they are.
        wire_state=DeviceWireState({**wire_state.slices, **kept, **slices}, residuals),
        halves=means.halves,
        updated=updated,
    )


def _full_weights(stored: Sequence[Array], parameters: Parameters) -> list[Array | None]:
    """Return each leaf's array without padding; None if the program gathers the leaf."""
    return [
        None if parameters.weight_layout(i) else leaf.unpad(x)
        for i, (leaf, x) in enumerate(zip(parameters.leaves, stored, strict=True))
    ]


def _plan_of_step(
    program: ProgramPlan,
    sources: Mapping[ShardedParam, EncodedShards],
    tables: Mapping[int, MovedRows],
    chosen: Chosen,
    microbatches: int,
    comm: CommSpec,
) -> Plan:
    """Return the plan that users see, still without transfers.

    `sources` are the shards and node slices of the weights after the run.
    """
    slices = [x.data for x in sources.values() if comm.hpz and not in_host(x.data)]
    return Plan(
        program.top,
        at_end=tuple(x.leaf.path for x in program.targets if x.reduce_spec is None),
        slice_bytes=sum(x.nbytes for x in slices),
        microbatches=microbatches,
        rows=tuple(tables.values()),
        later=program.later,
        activations=chosen,
    )


def _with_loop_limit(comm: CommSpec) -> CommSpec:
    """Let loops hold constants of any size on one device, where all weights are full already."""
    if comm.num_shards > 1:
        return comm
    schedule = dataclasses.replace(comm.schedule, loop_constant_bytes=sys.maxsize)
    return dataclasses.replace(comm, schedule=schedule)


def _gather_sources(
    stored: Sequence[Array],
    parameters: Parameters,
    program: ProgramPlan,
    wire_state: DeviceWireState,
    comm: CommSpec,
) -> tuple[dict[int, Array], dict[ShardedParam, EncodedShards]]:
    """Make the array that each weight is gathered from: its shard or its node slice.

    If the program makes the node slice, in the first gather of the weight, the array is the shard.

    Returns:
        The new node slices, by index of the leaf, of weights whose differences are sent before the
        program; and the gather sources of all weights.
    """
    slices, sources = {}, {}
    kept_in_program = slices_kept_in_program(program.top)
    from_shards = dataclasses.replace(comm, hpz=None)
    for i, weight in program.weights.items():
        leaf, shard, node_slice, kept = parameters.leaves[i], stored[i], None, None
        in_program = weight in kept_in_program
        if i in wire_state.slices:
            kept = kept_slice(wire_state.slices[i], leaf, comm)
            shard = copy_to_device(shard, "weights", leaf.path, windowed=False)
            if not in_program:
                node_slice = next_slice(shard, kept, leaf, comm)
                slices[i] = node_slice.data
        with labelled("weights", leaf.path):
            spec, depth = from_shards if in_program else comm, program.depths.get(i, 0)
            exact = i in parameters.exact
            source = gather_source(shard, leaf, weight, depth, spec, node_slice, exact)
            sources[weight] = dataclasses.replace(source, kept=kept) if in_program else source
    return slices, sources


@in_region("the end")
def _means(
    sums: Accumulators,
    program: ProgramPlan,
    parameters: Parameters,
    wire_state: DeviceWireState,
    microbatches: int,
    comm: CommSpec,
    share: Array | float | None,
    all_halves: Callable[[HalfSums], HalfSums] | None,
) -> tuple[MeanGradients, dict[int, Array]]:
    """Average loss and gradients over devices and micro-batches, from one device's sums.

    Returns:
        The means; and the new residuals, `[1, *shape]`, by index of the leaf.
    """
    numbers = parameters.differentiated
    errors = [wire_state.errors[i][0] if i in wire_state.errors else None for i in numbers]
    means = mean_over_devices(sums, program.targets, errors, microbatches, comm, share, all_halves)
    merged = parameters.merged(means.gradients)
    gradients = [
        copy_to_host(x, "gradients", parameters.leaves[i].path, windowed=False)
        if x is not None and parameters.has_host_gradient(i)
        else x
        for i, x in zip(numbers[: len(merged)], merged, strict=True)
    ]
    pairs = zip(numbers, means.residuals, strict=True)
    residuals = {i: jnp.expand_dims(x, 0) for i, x in pairs if x is not None}
    return dataclasses.replace(means, gradients=gradients), residuals


def _share(
    share_of_loss: Array | float | None,
    share_of_gradients: float | None,
    block: Block,
    shapes: Any,
    parameters: Parameters,
) -> tuple[Array | float | None, frozenset[int]]:
    """Find the factor that `flat` multiplies by, and the gradients that do not depend on the loss.

    Returns:
        `share_of_loss`, rounded to the dtype of the loss, or `share_of_gradients` if the former is
        None; and the indices of the targets whose gradients are not derivatives, because a
        `custom_vjp` returns values in their place.
    """
    if share_of_loss is None:
        return share_of_gradients, frozenset()
    *others, _ = block.inputs
    values = values_made_of(block, others)
    first = len(jax.tree.leaves(shapes[:2]))
    outputs = block.outputs[first : first + len(parameters.differentiated)]
    weights = [parameters.weight_of[i] for i in parameters.differentiated]
    pairs = zip(weights, outputs, strict=True)
    # The gradient of a weight with a twin is the sum of two outputs. If one of the two depends on
    # the loss, the sum does too, as it would if the rows of the table were not sent.
    derived = {i for i, x in pairs if not (isinstance(x, Constant) or x in values)}
    not_derived = frozenset(k for k, i in enumerate(weights) if i not in derived)
    dtype = shapes[0].dtype
    if not isinstance(share_of_loss, jax.Array):
        return float(np.asarray(share_of_loss).astype(dtype)), not_derived
    # Rounded to the dtype of the loss, which it multiplies: the divisor of the sums is made of the
    # same numbers.
    return share_of_loss.astype(dtype).astype(share_of_loss.dtype), not_derived


def _with_divisor(comm: CommSpec, share: Array | float | None) -> CommSpec:
    """Let reductions divide by the sum of all devices' shares, if the share is a constant."""
    is_known = isinstance(share, float)  # a share by weight is not, and `_means` divides by it
    return dataclasses.replace(comm, mean_divisor=comm.num_devices * share) if is_known else comm


def _trace(
    flat: Flat,
    parameters: Parameters,
    stored: Sequence[Array],
    full_weights: Sequence[Any],
    inputs: Sequence[Array],
    specs: Sequence[Any],
    microbatches: int,
    comm: CommSpec,
) -> tuple[Block, OpenProgram]:
    """Trace one micro-batch with the shapes of the full parameters; nothing is gathered.

    Returns:
        The program as a block, and as an open program with the shapes of its outputs.
    """
    full = []
    avals: dict[Any, Any] = {}  # computed once for the equal layers of an unrolled program
    for i, (shard, x) in enumerate(zip(stored, full_weights, strict=True)):
        layout = parameters.weight_layout(i)
        leaf = parameters.leaves[i]
        decoded = jax.ShapeDtypeStruct(shard.shape, leaf.dtype)
        if leaf.codec is not None:
            decoded = jax.ShapeDtypeStruct(from_stored(shard, leaf).shape, leaf.dtype)
        if layout is None:
            full.append(x)
            continue
        axes = leaf.split_axes(comm.axes)
        key = decoded.shape, decoded.dtype, layout, axes
        if key not in avals:
            avals[key] = gathered_aval(decoded, layout, axes)
        full.append(avals[key])
    rows = [
        jax.eval_shape(lambda x, spec=spec: split_microbatches(x, spec, microbatches)[0], x)
        if split_dim(spec) is not None and microbatches > 1
        else x
        for x, spec in zip(inputs, specs, strict=True)
    ]

    def function(*arrays):
        index = arrays[0] if microbatches > 1 else None
        arrays = arrays[1:] if microbatches > 1 else arrays
        with microbatch_index(index):
            return flat(list(arrays[: len(stored)]), list(arrays[len(stored) :]))

    # `accumulate` counts with `jnp.arange`, whose integers have 64 bits under x64.
    index = [jax.ShapeDtypeStruct((), jnp.arange(1).dtype)] if microbatches > 1 else []
    return trace(function, *index, *full, *rows)
