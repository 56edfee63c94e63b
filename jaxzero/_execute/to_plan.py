"""Rewrite a traced program so that it sends less, and holds less in full, before it is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._activations import Chosen, choose_activations
from .._collectives import CommSpec
from .._mesh import num_token_parts
from .._plan import most_held
from .._program import (
    Block,
    Value,
    recompute_in_backward,
    scan_indexed_stacks,
    sink_into_loops,
    split_conds,
)
from .._sharding import split_dim
from .microbatches import check_exchanges
from .parameters import Parameters
from .table_rows import with_rows


def to_plan(
    block: Block,
    shapes: Any,
    parameters: Parameters,
    specs: Sequence[Any],
    microbatches: int,
    comm: CommSpec,
    is_plain: bool,
) -> tuple[Chosen, Any, Parameters]:
    """Rewrite a traced program into the program that is planned.

    Devices exchange rows of tables where these are fewer bytes than the table. A `cond` in which
    all devices take the same branch becomes branches that gather their own weights. Loops scan the
    stacks that they index. Values made of weights are computed where they are used. What forward
    keeps for backward is chosen.

    Args:
        block: the traced program of one micro-batch.
        shapes: the shapes of its outputs: loss, weight, gradients and others.
        parameters: the leaves of all sharded arguments.
        specs: the `PartitionSpec` of each of the program's other inputs.
        microbatches: the number of micro-batches; if several, their index is the first input.
        comm: mesh axes, codecs and schedule.
        is_plain: whether neither the loss nor the gradients are multiplied by a share.

    Returns:
        The program, with what forward keeps; the shapes of its outputs; and its parameters, with
        the tables whose rows are sent.
    """
    block, shapes, parameters = with_rows(block, shapes, parameters, microbatches, comm, is_plain)
    first = 1 if microbatches > 1 else 0  # the index of the micro-batch
    last = first + len(parameters.leaves)
    weights = {i: x for i, x in enumerate(block.inputs[first:last]) if parameters.weight_layout(i)}
    others = zip(block.inputs[last:], specs, strict=True)
    uniform = [value for value, spec in others if split_dim(spec) is None]
    uniform += block.inputs[:first]
    block = split_conds(block, list(weights.values()), uniform, most_held(comm.schedule))
    block = _without_whole_weights(block, shapes, weights, parameters)
    if comm.node_microbatches is not None:
        check_exchanges(block)
    return _choose(block, shapes, weights, parameters), shapes, parameters


def _without_whole_weights(
    block: Block, shapes: Any, weights: Mapping[int, Value], parameters: Parameters
) -> Block:
    """Make loops scan stacks that they index, and compute values made of weights where used.

    `weights` are the inputs that are sharded weights, by index of the leaf.
    """
    block = scan_indexed_stacks(block, list(weights.values()))
    if shapes[0] is None:
        return sink_into_loops(block, list(weights.values()), [])
    first = len(jax.tree.leaves(shapes[:2]))
    gradients = enumerate(parameters.differentiated, start=first)
    block = sink_into_loops(
        block, list(weights.values()), [k for k, i in gradients if i in weights]
    )
    loss = block.outputs[0]
    if not isinstance(loss, Value):
        return block
    return recompute_in_backward(block, list(weights.values()), loss)


def _choose(
    block: Block, shapes: Any, weights: Mapping[int, Value], parameters: Parameters
) -> Chosen:
    """Choose the activations that forward keeps for backward."""
    if shapes[0] is None:
        return Chosen(lambda: block, [])
    gradients = len(jax.tree.leaves(shapes[:2]))
    others = gradients + len(parameters.differentiated)
    end = len(block.outputs) - len(parameters.exact)
    results = [*block.outputs[:gradients], *block.outputs[others:end]]
    return choose_activations(
        block,
        list(weights.values()),
        results,
        parameters.activations,
        token_parts=num_token_parts(),
    )
