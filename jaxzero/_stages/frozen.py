"""Layers that are not trained, before those that are: a pipeline of their own.

Where the first layers are frozen, a program has two forward loops over layers, and a backward loop
over the second one's. All stages divide both: a stage has a part of the frozen layers and a part of
the active ones, and no stage is left without backward. First all micro-batches pass through the
frozen layers, forward alone; what these return is an input of the program of the active layers. So
with `P` of `L` layers frozen, `m` micro-batches take on `S` stages the time of

    (m + S - 1) / S (P F + (L - P) (F + B)),

of forwards `F` and backwards `B` of a layer. To cut one pipeline anew by cost could be no faster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from .._program import Block, Loop, Value, operations_for, scan_indexed_stacks, without_dead_code
from .cut import dependents, stack_views


class FrozenCut(NamedTuple):
    """A program, cut behind its frozen layers.

    Attributes:
        first: the program of the frozen layers; its outputs are `passed`.
        rest: the program of what follows, where these are inputs; it has the outputs of the whole.
        passed: what the frozen layers return and the rest reads.
    """

    first: Block
    rest: Block
    passed: tuple[Value, ...]


def cut_behind_frozen(
    block: Block, stacks: Mapping[Value, str], trained: Collection[Value]
) -> FrozenCut | None:
    """Cut a program of one micro-batch behind its frozen layers; None if it has none.

    Args:
        block: the program.
        stacks: its inputs that are stacks of layers, with their paths.
        trained: those of them that it has gradients of.

    Raises:
        NotImplementedError: gradients pass through the frozen layers.
    """
    block = scan_indexed_stacks(block, list(stacks))
    views = stack_views(block, stacks)
    scanned = {
        x: {views[stack].source for stack in x.inputs[x.first_stack :] if stack in views}
        for x in block.operations
        if isinstance(x, Loop)
    }
    forward = [x for x, sources in scanned.items() if sources and not x.is_reversed]
    if len(forward) != 2 or not scanned[forward[0]].isdisjoint(trained):
        return None
    loop, after = forward
    if dependents(block, loop.outputs).isdisjoint(after.inputs):
        return None
    for other in scanned.keys() - {loop}:
        if not scanned[other].isdisjoint(scanned[loop]):
            raise NotImplementedError(
                f"Gradients pass through the frozen layers at {loop.where}, to parameters before "
                "or in them. With `stages`, name these in `before` of `zero.freeze`, or leave out "
                "`stages`."
            )
    others = [x for x in block.operations if x is not loop]
    read = {x for operation in others for x in operation.values} | {*block.outputs}
    passed = tuple(x for x in loop.outputs if x in read)
    first = Block(block.inputs, passed, tuple(operations_for(block, passed, block.inputs)))
    rest = Block((*block.inputs, *passed), block.outputs, tuple(others))
    return FrozenCut(first, without_dead_code(rest), passed)
