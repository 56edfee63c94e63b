"""What a program holds whole: a stack for all layers at once, a weight for a full loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Set
from typing import Any

from .._collectives import readable_bytes
from .._program import Fork, Loop, Operation, kept_values
from .block_plan import BlockPlan

_CALLS = {"cond", "while"}


@dataclasses.dataclass(frozen=True)
class HeldWhole:
    """An array that a device holds whole for longer than one layer, and why.

    Attributes:
        name: of the leaf; "" for a value that is made of weights.
        shape, dtype: of the full array.
        why: which operation needs it, and where that is in the user's program.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    why: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the full array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        array = f"{self.dtype}{list(self.shape)}"
        name = f"{self.name} " if self.name else ""
        return f"held whole: {name}{array}, {readable_bytes(self.num_bytes)}: {self.why}"


def find_held_whole(plan: BlockPlan) -> Iterator[HeldWhole]:
    """Find what a block and its loops hold whole, each with the first operation that needs it."""
    block = plan.block
    scanned = {stack.view.weight for loop in plan.uses.loops.values() for stack in loop.stacks}
    seen = set()
    for use in plan.uses.uses:
        weight = use.view.weight
        if weight in seen or use.index == len(block.operations):
            continue
        why = _why(block.operations[use.index], weight in scanned)
        if why:
            seen.add(weight)
            yield HeldWhole(weight.name, use.view.shape, use.view.dtype, why)
    yield from _gradients(plan, {weight.name for weight in scanned})
    weights = [value for value in block.inputs if value in plan.uses.views]
    for value, operation in kept_values(block, weights, plan.last_forward):
        if value not in plan.uses.views:
            made = f"made of weights by `{operation.name}` and kept, {operation.where}"
            yield HeldWhole("", value.shape, value.dtype, made)
    for loop in plan.loops.values():
        yield from find_held_whole(loop.body)


def _gradients(plan: BlockPlan, scanned: Set[str]) -> Iterator[HeldWhole]:
    """Gradients of scanned stacks, by the names of these, that are not reduced layer by layer."""
    makers = {value: x for x in plan.block.operations for value in x.outputs}
    reduced = {**plan.gradients.reduces}
    reduced |= {plan.block.outputs[i]: spec for i, spec in plan.gradients.at_end.items()}
    seen = set()
    for value, spec in reduced.items():
        if spec.name in scanned - seen and value in makers and value not in plan.zeros:
            seen.add(spec.name)
            why = f"`{makers[value].name}` makes its gradient for all layers at once"
            why = f"{why}, {makers[value].where}"
            yield HeldWhole(spec.name, value.shape, value.dtype, why)


def _why(operation: Operation, is_scanned: bool) -> str:
    """Why a weight that `operation` reads is held whole; "" if it is not."""
    if isinstance(operation, Loop) or operation.name in _CALLS:
        differ = ", and devices may take different branches" if isinstance(operation, Fork) else ""
        return f"`{operation.name}` reads it from its start to its end{differ}, {operation.where}"
    if is_scanned:
        return f"`{operation.name}` needs all layers at once, {operation.where}"
    return ""
