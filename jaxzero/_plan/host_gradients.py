"""Mark the gradients that are copied to host memory, or used up, as soon as they are reduced.

A host array cannot be computed with, so these are the gradients that are final: those that nothing
but a cast follows. (A cast of a reduced gradient is delayed until its mean is taken.) A loop writes
them one layer in each iteration, or updates a layer of the leaf with it. Any other gradient is
copied at the end of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .._program import Atom, Loop, Value, movable_ops
from .._sharding import LeafSpec
from .block_plan import BlockPlan, LoopPlan


def mark_host_gradients(
    plan: BlockPlan, leaves: Mapping[int, LeafSpec], updates: Mapping[int, int]
) -> BlockPlan:
    """Mark gradients at the top level, and stacks of gradients that loops there make.

    Args:
        plan: the plan of the full program.
        leaves: the outputs of the program that are gradients for host memory: their indices, and
            the leaves that they belong to.
        updates: the outputs that are gradients of leaves which a loop may update: their indices,
            and those of the leaves.
    """
    makers = {
        value: index for index, op in enumerate(plan.block.operations) for value in op.outputs
    }
    marked: dict[int, dict[int, int]] = {}  # by loop and output of it, the output of the program
    values: dict[Value, LeafSpec] = {}
    for i in {**leaves, **updates}:
        value = _before_casts(plan, makers, plan.block.outputs[i])
        index = makers.get(value, -1) if isinstance(value, Value) else -1
        is_reduced = value in plan.gradients.reduces and value not in plan.zeros
        if i in leaves and isinstance(value, Value) and is_reduced:
            values[value] = leaves[i]
        if value in plan.gradients.reduces:
            continue  # a stack that a loop makes, and that is reduced after it
        if i in plan.gradients.at_end or index not in plan.gradients.loops:
            continue
        loop = plan.block.operations[index]
        assert isinstance(loop, Loop) and isinstance(value, Value)
        number = loop.outputs.index(value)
        if number >= loop.num_carry and plan.loops[index].is_pipelined:
            marked.setdefault(index, {})[number] = i
    loops = {
        index: _marked(loop, marked.get(index, {}), leaves, updates)
        for index, loop in plan.loops.items()
    }
    return dataclasses.replace(plan, loops=loops, host_gradients=values)


def _marked(
    loop: LoopPlan,
    outputs: Mapping[int, int],
    leaves: Mapping[int, LeafSpec],
    updates: Mapping[int, int],
) -> LoopPlan:
    updated = {number: updates[i] for number, i in outputs.items() if i in updates}
    stored = {number: leaves[i] for number, i in outputs.items() if number not in updated}
    return dataclasses.replace(loop, host_gradients=stored, updates=updated)


def _before_casts(plan: BlockPlan, makers: Mapping[Value, int], atom: Atom) -> Atom:
    """The value that `atom` is a cast of, or `atom`; the casts run on reduced shards."""
    while isinstance(atom, Value) and makers.get(atom) in plan.gradients.on_shards:
        operation = plan.block.operations[makers[atom]]
        source = operation.source
        if source is None or not isinstance(operation.view(), movable_ops.ConvertDtype):
            break
        atom = source
    return atom
