"""Mark final gradients, which are divided where they are reduced, and sums that loops add to.

A gradient is final if the program only casts it after its reduction; the casts are delayed until
its mean is taken. A final gradient is divided (sum to mean) where it is reduced. A loop divides one
layer in each iteration: the loop's stack is then the gradient that the step returns, in the dtype
of the leaf, and no stack of sums exists beside it. A gradient in host memory must be divided before
it is copied there, since host arrays cannot be computed with. In each iteration, a loop copies one
layer of such a gradient, or updates one layer of the leaf with it. Outside of loops a bucket is
divided as a whole, if all of its gradients are final.

Any other gradient is divided, or copied, at the end of the step. That is one more pass over memory,
because the barrier in between keeps XLA from fusing the division with the reduction.

[Note: sums in place] A loop inside another one, such as the loop over layers inside the loop over
micro-batches, makes a stack of gradients, which the outer loop adds to a sum that it carries. The
inner loop adds each layer to the sum's layer instead, so that the stack does not exist beside the
sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from .._program import ADDITIONS, Atom, Loop, Value, movable_ops
from .._sharding import LeafSpec
from .block_plan import BlockPlan, LoopPlan


def mark_final_gradients(
    plan: BlockPlan,
    leaves: Mapping[int, LeafSpec],
    in_host: Collection[int],
    updates: Mapping[int, int],
) -> BlockPlan:
    """Return a program's plan in which the final gradients are marked, in loops and outside.

    A reduced gradient, and each cast between it and the output, is read only once (`find_reduces`),
    so dividing it or moving it to host memory changes no other result.

    Args:
        plan: the plan of the full program.
        leaves: for each output of the program that is a final gradient, its index and its leaf.
        in_host: the indices of those outputs that are copied to host memory.
        updates: the indices of those outputs whose leaves a loop may update, each with the index of
            the leaf.
    """
    makers = {
        value: index for index, op in enumerate(plan.block.operations) for value in op.outputs
    }
    marked: dict[int, dict[int, int]] = {}  # by loop and output of it, the output of the program
    values: dict[Value, LeafSpec] = {}
    final: dict[Value, int] = {}  # on the device, outside of loops: the outputs
    for i in leaves:
        value = _before_casts(plan, makers, plan.block.outputs[i])
        index = makers.get(value, -1) if isinstance(value, Value) else -1
        is_reduced = value in plan.gradients.reduces and value not in plan.zeros
        if isinstance(value, Value) and is_reduced:
            if i in in_host:
                values[value] = leaves[i]
            else:
                final[value] = i
        if value in plan.gradients.reduces:
            continue  # a stack that a loop makes, and that is reduced after it
        if i in plan.gradients.at_end or index not in plan.gradients.loops:
            continue
        loop = plan.block.operations[index]
        assert isinstance(loop, Loop) and isinstance(value, Value)
        number = loop.outputs.index(value)
        if number < loop.num_carry:
            continue
        if plan.loops[index].is_pipelined or not (i in in_host or i in updates):
            marked.setdefault(index, {})[number] = i
    loops = {
        index: _marked(loop, marked.get(index, {}), leaves, in_host, updates)
        for index, loop in plan.loops.items()
    }
    means = {marked[index][number] for index, loop in loops.items() for number in loop.means}
    groups = [group.values for group in plan.reduce_groups if final.keys() >= set(group.values)]
    divided = {value: final[value] for values in groups for value in values}
    return dataclasses.replace(
        plan,
        loops=loops,
        host_gradients=values,
        means={value: leaves[i] for value, i in divided.items()},
        mean_outputs=frozenset({*means, *divided.values()}),
    )


def mark_sums(plan: BlockPlan) -> BlockPlan:
    """Return a plan in which inner loops add gradients to the sums that outer loops carry.

    See [Note: sums in place].
    """
    operations = plan.block.operations
    makers = {value: index for index, x in enumerate(operations) for value in x.outputs}
    added: dict[int, dict[int, Value]] = {}  # by loop and output of it, the sum
    additions = []
    for index in plan.gradients.on_shards:
        sums = [x for x in operations[index].values if x in plan.gradients.sums]
        if operations[index].name not in ADDITIONS or len(sums) != 1:
            continue
        (term,) = (x for x in operations[index].inputs if x not in sums)
        stack = _before_casts(plan, makers, term)
        loop = makers.get(stack, -1) if isinstance(stack, Value) else -1
        operation = operations[loop] if loop in plan.gradients.loops else None
        if isinstance(operation, Loop) and stack not in plan.gradients.reduces:
            number = operation.outputs.index(stack)
            if number >= operation.num_carry and number not in added.get(loop, {}):
                added.setdefault(loop, {})[number] = sums[0]
                additions.append(index)
    loops = {
        index: dataclasses.replace(loop, body=mark_sums(loop.body), sums=added.get(index, {}))
        for index, loop in plan.loops.items()
    }
    return dataclasses.replace(plan, loops=loops, added=frozenset(additions))


def _marked(
    loop: LoopPlan,
    outputs: Mapping[int, int],
    leaves: Mapping[int, LeafSpec],
    in_host: Collection[int],
    updates: Mapping[int, int],
) -> LoopPlan:
    updated = {number: updates[i] for number, i in outputs.items() if i in updates}
    others = {number: i for number, i in outputs.items() if number not in updated}
    return dataclasses.replace(
        loop,
        host_gradients={number: leaves[i] for number, i in others.items() if i in in_host},
        means={number: leaves[i] for number, i in others.items() if i not in in_host},
        updates=updated,
    )


def _before_casts(plan: BlockPlan, makers: Mapping[Value, int], atom: Atom) -> Atom:
    """Return the value before the casts on reduced shards that made `atom`; `atom` if none did."""
    while isinstance(atom, Value) and makers.get(atom) in plan.gradients.on_shards:
        operation = plan.block.operations[makers[atom]]
        source = operation.source
        if source is None or not isinstance(operation.view(), movable_ops.ConvertDtype):
            break
        atom = source
    return atom
