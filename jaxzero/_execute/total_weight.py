"""Sum the weights of all devices and micro-batches before the program of a step runs.

Where only gradients are divided, the total weight of a weighted mean is needed at the end. Where
the cotangents themselves must be those of the full batch, the total weight is needed first, and is
computed from the batch alone.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._collectives import CommSpec, labelled, sum_over_devices
from .._mesh import microbatch_index
from .._plan import find_uses, make_plan
from .._program import Block, trace
from .block import run_block
from .microbatches import Accumulators, accumulate


def total_weight(
    weight: Callable[[list[Any], list[Any]], Array],
    parameters: Sequence[jax.ShapeDtypeStruct],
    inputs: Sequence[Array],
    specs: Sequence[Any],
    microbatches: int,
    comm: CommSpec,
) -> Array:
    """Add up the weights of all devices and micro-batches.

    Args:
        weight: a function of full parameters and the inputs of one micro-batch, which returns the
            micro-batch's weight, a scalar.
        parameters: shapes and dtypes of the full parameters.
        inputs: this device's rows, and replicated values.
        specs: the `PartitionSpec` of each input.
        microbatches: how many parts the rows are cut into.
        comm: mesh axes and their sizes.

    Raises:
        ValueError: the weight is computed from parameters.
    """
    num = len(parameters)

    def run(index: Array | None, rows: list[Any]) -> tuple[Accumulators, list[Any]]:
        indices = [] if index is None else [index]

        def function(*arrays: Any) -> Array:
            index, arrays = (None, arrays) if not indices else (arrays[0], arrays[1:])
            with microbatch_index(index):
                return weight(list(arrays[:num]), list(arrays[num:]))

        block, _ = trace(function, *indices, *parameters, *rows)
        block = _needed(block)
        read = {x for operation in block.operations for x in operation.inputs}
        if not read.isdisjoint(block.inputs[len(indices) : len(indices) + num]):
            raise ValueError(
                "The weight that the function returns beside the sum of losses is computed from "
                "parameters. Gradients that are not reduced by 'mean' (the state of fp8 layers) "
                "need the weight of the full batch before the loss: compute it from the batch."
            )
        uses = find_uses(block, {}, sys.maxsize)
        axes = comm.axes[-1:]  # a plan has an axis; without weights, nothing is sent over it
        plan = make_plan(block, uses, [None], None, comm.schedule, lambda specs: axes, axes)
        outputs, _, _ = run_block(plan, comm, [*indices, *[None] * num, *rows], {}, {})
        return Accumulators(jnp.zeros(()), jnp.asarray(outputs[0]), []), []

    sums, _ = accumulate(run, inputs, specs, microbatches, comm)
    with labelled("other", "loss"):
        return sum_over_devices(sums.weight, comm)


def _needed(block: Block) -> Block:
    """Return the block with only the operations that its outputs need: no prints, for example."""
    live, kept = {*block.outputs}, []
    for operation in reversed(block.operations):
        if not live.isdisjoint(operation.outputs):
            kept.append(operation)
            live.update(operation.inputs)
    return dataclasses.replace(block, operations=tuple(reversed(kept)))
