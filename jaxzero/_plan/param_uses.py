"""Analysis of the weights: where each is needed whole, and where it can stay a shard.

Walks a block once and keeps, for every value that is still a cheap view of a weight,
the weight and the operations on it (`View`). Whatever else reads such a value is a
`Use`: there the weight must be gathered. A loop that scans over a stack of weights gets
the stack of shards instead, and its body sees one layer's shard as a weight of its own;
a stack that the loop hands on (the residuals that reverse-mode differentiation keeps)
is not computed at all, but becomes a view of the same stack outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from .._program import Atom, Barrier, Block, Loop, Operation, Value, movable_ops
from .._sharding import DimSharding


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedParam:
    """A split array as a block sees it: a parameter, or one layer of a stack of them."""

    leaf: int  # which parameter it comes from, counted over all sharded arguments
    name: str
    shape: tuple[int, ...]  # full
    dtype: Any
    layout: DimSharding


@dataclasses.dataclass(frozen=True)
class View:
    """A weight, and operations not yet applied to it."""

    weight: ShardedParam
    ops: tuple[movable_ops.Op, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.weight.shape
        for op in self.ops:
            shape = op.out_shape(shape)
        return shape

    @property
    def dtype(self) -> Any:
        casts = [op.dtype for op in self.ops if isinstance(op, movable_ops.ConvertDtype)]
        return casts[-1] if casts else self.weight.dtype

    def then(self, *ops: movable_ops.Op) -> View:
        return View(self.weight, (*self.ops, *ops))


@dataclasses.dataclass(frozen=True)
class Use:
    """The operation at `index` (or, past the last, the block's output) needs `view` whole."""

    index: int
    view: View


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """A stack of weights that a loop scans: the shards of `view`, one layer at a time."""

    view: View  # its operations are applied to the shards, before the loop
    layer: ShardedParam


@dataclasses.dataclass(frozen=True)
class LoopUses:
    """What a loop does with the weights."""

    stacks: tuple[Stack, ...]
    handed_on: frozenset[int]  # outputs that are views outside, and not computed
    body: BlockUses


@dataclasses.dataclass(frozen=True)
class BlockUses:
    """What a block does with the weights."""

    views: Mapping[Atom, View]
    uses: tuple[Use, ...]
    loops: dict[int, LoopUses]
    conflicts: frozenset[int]  # leaves that are scanned or sliced along the split dim


def find_uses(block: Block, inputs: Mapping[Value, View]) -> BlockUses:
    """Find every place in `block` that needs a weight whole.

    Args:
        block: the program, or a loop's body.
        inputs: which of its inputs are views of weights.
    """
    walk = _UseFinder(block, {**inputs})
    walk.walk()
    return walk.finish()


class _UseFinder:
    """One pass over a block, in program order."""

    def __init__(self, block: Block, known: dict[Atom, View]):
        self.block = block
        self.views = known
        self.uses: list[Use] = []
        self.loops: dict[int, LoopUses] = {}
        self.conflicts: set[int] = set()

    def walk(self) -> None:
        for index, operation in enumerate(self.block.operations):
            if isinstance(operation, Loop):
                self._loop(index, operation)
            elif isinstance(operation, Barrier):
                pairs = zip(operation.inputs, operation.outputs, strict=True)
                self.views.update((o, self.views[i]) for i, o in pairs if i in self.views)
            elif not self._stays_view(operation):
                self._need(index, operation.inputs)

    def finish(self, handed_on: frozenset[int] = frozenset()) -> BlockUses:
        """Count the outputs as uses, except those that the caller takes as views."""
        outputs = [out for i, out in enumerate(self.block.outputs) if i not in handed_on]
        self._need(len(self.block.operations), outputs)
        return BlockUses(self.views, tuple(self.uses), self.loops, frozenset(self.conflicts))

    def _need(self, index: int, atoms: Iterable[Any]) -> None:
        needed = dict.fromkeys(self.views[atom] for atom in atoms if atom in self.views)
        self.uses += [Use(index, view) for view in needed]

    def _stays_view(self, operation: Operation) -> bool:
        source = operation.source
        view = None if source is None else self.views.get(source)
        op = operation.view() if view else None
        if view is None or op is None:
            return False
        self.views[operation.outputs[0]] = view.then(op)
        if isinstance(op, (movable_ops.Slice, movable_ops.Reverse)):
            pushed = movable_ops.push(view.ops, view.weight.layout, view.weight.shape)
            if pushed and op.through(*pushed) is None:
                self.conflicts.add(view.weight.leaf)
        return True

    def _loop(self, index: int, loop: Loop) -> None:
        first = loop.num_constants + loop.num_carry
        stacks: dict[tuple, Stack] = {}
        inner: dict[Atom, View] = {}
        whole = list(loop.inputs[:first])
        for outside, inside in zip(loop.inputs[first:], loop.body.inputs[first:], strict=True):
            view = self.views.get(outside)
            layer = view and self._layer(view, stacks)
            if layer:
                inner[inside] = layer
            elif view:
                whole.append(outside)
        self._need(index, tuple(whole))

        body = _UseFinder(loop.body, inner)
        body.walk()
        handed_on = self._take_back(loop, body.views, tuple(stacks.values()))
        uses = body.finish(handed_on)
        self.conflicts |= uses.conflicts
        self.loops[index] = LoopUses(tuple(stacks.values()), handed_on, uses)

    def _take_back(
        self, loop: Loop, inside: Mapping[Atom, View], stacks: tuple[Stack, ...]
    ) -> frozenset[int]:
        """Make outputs of the loop that stack up views of its own layers views here."""
        by_layer = {stack.layer: stack.view for stack in stacks}
        handed_on = set()
        for i in range(loop.num_carry, len(loop.outputs)):
            out = loop.body.outputs[i]
            view = inside.get(out)
            if view is not None and view.weight in by_layer:
                stacked = (op.of_stack(loop.length) for op in view.ops)
                self.views[loop.outputs[i]] = by_layer[view.weight].then(*stacked)
                handed_on.add(i)
        return frozenset(handed_on)

    def _layer(self, view: View, stacks: dict[tuple, Stack]) -> View | None:
        """What the body sees of a scanned view, as a view of one layer; None: gather it."""
        weight = view.weight
        sliced = _of_slice(view)
        if sliced is not None and weight.layout.dim != 0:
            stack = stacks.setdefault((weight, ()), _stack(View(weight)))
            return View(stack.layer, sliced)
        pushed = movable_ops.push(view.ops, weight.layout, weight.shape)
        if pushed is not None and pushed[0].dim != 0:
            stack = stacks.setdefault((weight, view.ops), _stack(view))
            return View(stack.layer)
        if sliced is not None or pushed is not None:
            self.conflicts.add(weight.leaf)
        return None


def _of_slice(view: View) -> tuple[movable_ops.Op, ...] | None:
    shape, sliced = view.weight.shape, []
    for op in view.ops:
        one = op.of_slice(shape)
        if one is None:
            return None
        sliced.append(one)
        shape = op.out_shape(shape)
    return tuple(sliced)


def _stack(view: View) -> Stack:
    weight = view.weight
    pushed = movable_ops.push(view.ops, weight.layout, weight.shape)
    assert pushed is not None
    layout, shape = pushed
    name = f"{weight.name}[i]"
    return Stack(
        view, ShardedParam(weight.leaf, name, shape[1:], view.dtype, layout.moved(layout.dim - 1))
    )
