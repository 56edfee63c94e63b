"""Run a step on one pipeline stage, which has some layers, and a slice of every other leaf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from .._collectives import (
    CommSpec,
    HalfBatchSum,
    all_gather,
    all_reduce,
    labelled,
    reduce_scatter,
)
from .._execute import (
    DeviceWireState,
    HalfSums,
    LeafUpdate,
    Parameters,
    Result,
    number_after,
    run_on_device,
    split_microbatches,
)
from .._mesh import STAGE
from .._sharding import LeafSpec, ZeroConfig, split_dim
from .._stages import Encoding, LayerLists, Staged
from .arguments import Options


def on_stages(options: Options, config: ZeroConfig) -> Options:
    """Return the options of a call under `config`, which may have pipeline stages.

    With stages, a call with gradients that does not set `microbatches` runs
    `config.stages.microbatches` of them.

    Raises:
        NotImplementedError: an option does not work with stages.
    """
    if config.stages is None:
        return options
    for refused, name, instead in (
        (options.shares is not None, "shares", "leave it out: all stages run all micro-batches"),
        (options.gradient_reduce is not None, "gradient_reduce", "leave out `stages`"),
    ):
        if refused:
            raise NotImplementedError(f"`{name}` does not work with `stages`: {instead}.")
    if options.microbatches > 1 or not options.has_gradients:
        return options
    return dataclasses.replace(options, microbatches=config.stages.microbatches)


def check_no_tangents(config: ZeroConfig) -> None:
    """Raise `NotImplementedError` if the config has stages: a step with stages has no tangents."""
    if config.stages is not None:
        raise NotImplementedError(
            "`jax.jvp` of a step with `stages` is not possible. Take a config without stages, such "
            "as `jz.zero3()`, for derivatives of gradients."
        )


def run_on_stage(
    flat: Any,
    parameters: Parameters,
    stored: Sequence[Array],
    wire_state: DeviceWireState,
    inputs: Sequence[Array],
    specs: Sequence[Any],
    microbatches: int,
    comm: CommSpec,
    updates: Mapping[int, LeafUpdate] | None = None,
    share_of_loss: Array | float | None = None,
    *,
    lists: LayerLists,
) -> Result:
    """Run the step on one device of a pipeline stage: `run_on_device` for a config with stages.

    The arguments are those of `run_on_device`, and `lists`, which says which leaves of `parameters`
    are layers, and how the stages divide the layers. The result has the gradients of all leaves, in
    their stored layouts, as without stages.
    """
    assert share_of_loss is None and lists.stages is not None
    arrays, differentiated = lists.arrays, tuple(lists.numbers(parameters.differentiated))
    is_stack = [lists.is_divided(j) for j in range(len(arrays))]
    if not any(is_stack):
        raise ValueError(_without_layers(lists))
    given = _by_microbatch(inputs, specs, microbatches)
    staged = Staged(
        flat,
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arrays],
        given,
        [leaf.path if layers else None for leaf, layers in zip(arrays, is_stack, strict=True)],
        lists.frozen,
        differentiated,
        [split_dim(spec) is not None for spec in specs],
        microbatches,
        1 / comm.num_runs(microbatches),
        parameters.activations,
        len(parameters.exact),
        Encoding(lists.stages.messages, comm.min_quantized_size),
    )
    whole = _of_stage(lists, stored, staged)
    leaves = tuple(map(_on_stage, arrays, whole, is_stack))
    on_stage = dataclasses.replace(
        parameters, leaves=leaves, differentiated=differentiated, moves_rows=False, activations=None
    )
    result = run_on_device(
        staged,
        on_stage,
        whole,
        wire_state,
        given,
        [PartitionSpec()] * len(given),
        1,  # `staged` runs all micro-batches by itself
        comm,
        _updates_of_arrays(lists, updates or {}),
        share_of_gradients=None if staged.is_weighted else 1 / comm.num_devices,
        all_halves=lambda sums: _of_all_stages(lists, leaves, parameters, comm, sums),
    )
    return _of_step(lists, parameters, differentiated, staged, result)


def _of_step(
    lists: LayerLists,
    parameters: Parameters,
    differentiated: Sequence[int],
    staged: Staged,
    result: Result,
) -> Result:
    """Convert the result of `run_on_device` on a stage to the result of the step.

    Gradients and updates by array of `lists` become gradients and updates by leaf of `parameters`.
    """
    others, num = [x[0] for x in result.others], len(staged.program.shapes[3])
    made = dict(zip(differentiated, result.gradients, strict=True))
    gradients = _of_leaves(lists, made, next(iter(others[num:]), None))
    return dataclasses.replace(
        result,
        gradients=[gradients[i] for i in parameters.differentiated],
        others=others[:num],
        plan=dataclasses.replace(result.plan, stages=staged.described, activations=staged.chosen),
        program=staged.program,
        block=staged.block,
        updated={lists.members[j][0]: x for j, x in result.updated.items()},
    )


def _without_layers(lists: LayerLists) -> str:
    assert lists.stages is not None
    paths = [f"`{leaf.path}`" for leaf in lists.leaves]
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return (
        f"No leaf of the parameters is a stack of layers: `layers` of `jz.Stages` is "
        f"{lists.stages.layers!r}, and the leaves are {', '.join(paths[:4])}{more}. Give the path "
        'of the stacks, such as "params.layers", or of a list of layers, with `*` for the number '
        'of a layer, such as "layers.*".'
    )


def _by_microbatch(inputs: Sequence[Array], specs: Sequence[Any], microbatches: int) -> list[Array]:
    """Reshape inputs with rows to `[microbatches, ...]`; return the other inputs as they are."""
    return [
        x if split_dim(spec) is None else split_microbatches(x, spec, microbatches)
        for x, spec in zip(inputs, specs, strict=True)
    ]


def _of_stage(lists: LayerLists, stored: Sequence[Array], staged: Staged) -> list[Array]:
    """Return this device's shard of each array of `lists`, as its stage computes with it.

    A stack or list of layers has the layers of this stage. A leaf outside of the layers is whole:
    the slices of it that the stages store are all-gathered over the stages.
    """
    arrays = []
    for j, (leaf, members) in enumerate(zip(lists.arrays, lists.members, strict=True)):
        shards = [stored[i] for i in members]
        if lists.is_list(j):
            arrays.append(lists.of_stage(j, shards, staged.dtype_read(j)))
        elif lists.is_divided(j):
            arrays += shards
        else:
            arrays.append(_gathered(shards[0], leaf, staged.dtype_read(j)))
    return arrays


def _updates_of_arrays(
    lists: LayerLists, updates: Mapping[int, LeafUpdate]
) -> dict[int, LeafUpdate]:
    """Return `updates`, indexed by leaf, with the index of the leaf's array in `lists` instead.

    The updates of a leaf that is one layer of a list are left out.
    """
    own = {x[0]: j for j, x in enumerate(lists.members) if not lists.is_list(j)}
    return {own[i]: update for i, update in updates.items() if i in own}


def _of_leaves(
    lists: LayerLists, gradients: Mapping[int, Array | None], arrived: Array | None = None
) -> dict[int, Any]:
    """Convert gradients, indexed by array of `lists`, to gradients indexed by leaf.

    Each gradient gets the layout in which its leaf is stored. The gradient of a leaf outside of the
    layers is summed over the stages; the sum waits for `arrived` (see `Pipeline.run`).
    """
    of_leaves: dict[int, Any] = {}
    for j, x in gradients.items():
        members = lists.members[j]
        if x is None:
            of_leaves |= dict.fromkeys(members)
        elif lists.is_list(j):
            of_leaves |= zip(members, lists.to_leaves(j, x), strict=True)
        else:
            leaf, divided = lists.arrays[j], lists.is_divided(j)
            of_leaves[members[0]] = x if divided else _scattered(x, leaf, arrived)
    return of_leaves


def _of_all_stages(
    lists: LayerLists,
    on_stage: Sequence[LeafSpec],
    parameters: Parameters,
    comm: CommSpec,
    sums: HalfSums,
) -> HalfSums:
    """Convert half-batch sums of gradients, by array of `lists`, to sums by leaf.

    Args:
        lists: the arrays of a stage, and the leaves that they are made of.
        on_stage: the layout of each array inside the stage.
        parameters: says which leaves are differentiated.
        comm: the number of devices and the axis of the halves.
        sums: the half-batch sums that the stage has computed.
    """
    wanted = parameters.differentiated
    arrays = lists.numbers(wanted)
    is_flat = [on_stage[j].layout is None for j in arrays]
    parts = []
    for part in ("total", "first"):
        of_arrays = {}
        for j, x, flat in zip(arrays, sums.shards, is_flat, strict=True):
            of_arrays[j] = None if x is None else getattr(x, part)
            if x is not None and flat:  # a shard of the flattened sum
                whole = all_gather(of_arrays[j], comm.halves_axis, 0)
                shape = on_stage[j].shape
                of_arrays[j] = whole[: math.prod(shape)].reshape(shape)
        parts.append(_of_leaves(lists, of_arrays))
    total, first = parts
    shards = [None if total[i] is None else HalfBatchSum(total[i], first[i]) for i in wanted]
    copies = {}
    for j, flat in zip(arrays, is_flat, strict=True):
        for i in lists.members[j]:
            is_whole = lists.leaves[i].stages is None
            copies[i] = comm.num_devices if flat else 1
            copies[i] *= lax.axis_size(STAGE) if is_whole else 1
    return HalfSums(shards, [copies[i] for i in wanted], sums.weight, (STAGE, *sums.axes))


def _on_stage(leaf: LeafSpec, stored: Array, layers: bool) -> LeafSpec:
    """Return the layout that a leaf has inside one stage.

    Args:
        leaf: the layout over all stages.
        stored: the stage's array.
        layers: whether the leaf is a stack, of which the stage has some layers.
    """
    shape = (stored.shape[0], *leaf.shape[1:]) if layers else leaf.shape
    return dataclasses.replace(leaf, shape=shape, other_axes=PartitionSpec(), stages=None)


def _gathered(x: Array, leaf: LeafSpec, dtype: Any) -> Array:
    """Return a leaf outside of the layers, whole, from the slice `x` that this stage stores.

    The slices are all-gathered over the stages as `dtype`. A leaf that each stage stores whole is
    returned unchanged.
    """
    if leaf.stages is None:
        return x
    with labelled("weights", leaf.path):
        return all_gather(x.astype(dtype), STAGE, leaf.stages.dim).astype(x.dtype)


def _scattered(x: Array, leaf: LeafSpec, arrived: Array | None) -> Array:
    """Reduce-scatter a gradient over the stages; all-reduce it if each stage stores the whole leaf.

    The sum waits for `arrived`, if it is given.
    """
    if arrived is not None:
        x = x * number_after(1, arrived).astype(x.dtype)
    with labelled("gradients", leaf.path):
        if leaf.stages is None:
            return all_reduce(x, STAGE)
        return reduce_scatter(x, STAGE, leaf.stages.dim)
