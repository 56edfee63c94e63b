"""What one device runs: trace the user's function, plan it, emit it, finish the sums.

All of it happens while the body of the `shard_map` is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._accumulate import Sums, accumulate, mean_over_devices, split_microbatches
from ._arguments import split_dim
from ._collectives import Wire, gathered_aval, move_split, pad, unpad
from ._emit import emit
from ._gradients import Demand
from ._mesh import microbatch_index
from ._partition import Layout, Leaf, layouts_by_preference
from ._program import Block, Value, trace
from ._schedule import Plan, make_plan
from ._uses import BlockUses, View, Weight, find_uses


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The leaves of all sharded arguments, in order, and what is split of them."""

    leaves: tuple[Leaf, ...]
    differentiated: tuple[int, ...]  # those that get gradients
    weights_split: bool  # ZeRO stage 3
    gradients_split: bool  # ZeRO stage 2 and 3

    def weight_layout(self, i: int) -> Layout | None:
        return self.leaves[i].layout if self.weights_split else None

    def gradient_layout(self, i: int) -> Layout | None:
        return self.leaves[i].layout if self.gradients_split else None


# The user's function on flat arrays, parameters and inputs: `(loss, weight, gradients, others)`.
# The first three are None, None and [] in a forward-only program.
Flat = Callable[[list[Any], list[Any]], tuple[Any, Any, list[Any], list[Any]]]


def run_on_device(
    flat: Flat,
    parameters: Parameters,
    stored: Sequence[Array],
    inputs: Sequence[Array],
    specs: Sequence[Any],
    microbatches: int,
    wire: Wire,
) -> tuple[Array | None, list[Any], list[Array], Plan]:
    """Trace, plan and run.

    Args:
        flat: the user's function.
        parameters: what `stored` are.
        stored: this device's pieces of the sharded arguments.
        inputs: this device's rows of the batch, and replicated values.
        specs: for each input, which it is.
        microbatches: how many.
        wire: how values travel.

    Returns:
        The mean loss; gradients in stored form; other outputs, stacked over micro-batches;
        and the plan.
    """
    whole = [
        None if parameters.weight_layout(i) else unpad(x, leaf.layout) if leaf.layout else x
        for i, (leaf, x) in enumerate(zip(parameters.leaves, stored, strict=True))
    ]
    block, shapes = _trace(flat, parameters, stored, whole, inputs, specs, microbatches, wire)
    first = 1 if microbatches > 1 else 0
    values = block.inputs[first : first + len(stored)]
    weights, uses = _choose_layouts(block, values, parameters, wire)
    demands, is_split = _demands(shapes, parameters, weights)
    loss = block.outputs[0] if shapes[0] is not None else None
    top = make_plan(block, uses, demands, loss if isinstance(loss, Value) else None)
    plan = Plan(top, tuple(_reduced_last(parameters, is_split)))

    shards = {
        weight: _to_layout(stored[i], parameters.leaves[i], weight.layout, wire)
        for i, weight in weights.items()
    }

    def run(index: Array | None, inputs: list[Any]) -> tuple[Sums, list[Any]]:
        indices = [] if index is None else [index]
        outputs = emit(top, wire, [*indices, *whole, *inputs], shards)
        loss, weight, gradients, others = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        zero = jnp.zeros(()) if loss is None else loss
        return Sums(zero, weight, gradients), others

    sums, others = accumulate(run, inputs, specs, microbatches)
    if shapes[0] is None:
        return None, [], others, plan
    loss, gradients = mean_over_devices(sums, is_split, microbatches, wire)
    gradients = [
        _stored_gradient(x, parameters, i, weights.get(i), wire)
        for x, i in zip(gradients, parameters.differentiated, strict=True)
    ]
    return loss.astype(shapes[0].dtype), gradients, others, plan


def _trace(
    flat: Flat,
    parameters: Parameters,
    stored: Sequence[Array],
    whole: Sequence[Any],
    inputs: Sequence[Array],
    specs: Sequence[Any],
    microbatches: int,
    wire: Wire,
) -> tuple[Block, Any]:
    """The program of one micro-batch, on full parameters that never exist."""
    full = []
    for i, (shard, x) in enumerate(zip(stored, whole, strict=True)):
        layout = parameters.weight_layout(i)
        full.append(gathered_aval(shard, layout, wire) if layout else x)
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
    block: Block, values: Sequence[Value], parameters: Parameters, wire: Wire
) -> tuple[dict[int, Weight], BlockUses]:
    """Cut every weight so that the program can scan and slice it as shards.

    Storage decides, unless the program scans (or slices) a weight over the very dim that it
    is split on: then the next best dim is taken, and the shards change dims by an
    all-to-all on the way in and out.
    """
    choices = {}
    for i, leaf in enumerate(parameters.leaves):
        layout = parameters.weight_layout(i)
        if layout:
            others = layouts_by_preference(leaf.shape, wire.pieces)
            choices[i] = [layout, *(other for other in others if other.dim != layout.dim)]
    chosen = dict.fromkeys(choices, 0)
    hopeless: set[int] = set()
    while True:
        weights = {
            i: Weight(i, leaf.path, leaf.shape, leaf.dtype, choices[i][chosen[i]])
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


def _demands(
    shapes: Any, parameters: Parameters, weights: dict[int, Weight]
) -> tuple[list[Demand | None], list[bool]]:
    """How each output of the program is wanted; and for each gradient, whether it is split."""
    loss, weight, gradients, others = shapes
    wanted: list[Demand | None] = []
    for i in parameters.differentiated if gradients else ():
        layout = weights[i].layout if i in weights else parameters.gradient_layout(i)
        wanted.append(Demand(parameters.leaves[i].path, layout) if layout else None)
    num_before = len(jax.tree.leaves((loss, weight)))
    demands = [*[None] * num_before, *wanted, *[None] * len(others)]
    return demands, [demand is not None for demand in wanted]


def _reduced_last(parameters: Parameters, is_split: Sequence[bool]) -> list[str]:
    pairs = zip(parameters.differentiated, is_split, strict=False)
    return [parameters.leaves[i].path for i, split in pairs if not split]


def _to_layout(shard: Array, leaf: Leaf, layout: Layout, wire: Wire) -> Array:
    assert leaf.layout is not None
    if leaf.layout.dim == layout.dim:
        return shard
    return move_split(shard, leaf.shape, leaf.layout, layout, wire)


def _stored_gradient(
    x: Array, parameters: Parameters, i: int, weight: Weight | None, wire: Wire
) -> Array:
    """A mean gradient in the type, cut and padding of its parameter."""
    leaf = parameters.leaves[i]
    x = x.astype(leaf.dtype)
    if leaf.layout is None:
        return x
    if parameters.gradient_layout(i) is None:
        return pad(x, leaf.layout)
    if weight is None or weight.layout.dim == leaf.layout.dim:
        return x
    return move_split(x, leaf.shape, weight.layout, leaf.layout, wire)
