"""Find where a block needs each weight in full, and where its shard is enough.

The analysis walks a block once. For every value that is a cheap view of a weight (a cast, slice,
transpose, ...), it tracks the weight and the operations on it (`View`). Any other operation that
reads such a value is a `Use`: there the weight must be gathered. A loop that scans a stack of
weights scans the stack of shards instead, and its body sees the shard of one layer as a weight of
its own. A loop may also output views of these layers, which are stacked up (the residuals that
reverse-mode differentiation saves). Such an output is not computed: it is a view of the stack of
weights that the loop scans. A weight that enters a loop as a constant is needed in full there, or
is a weight of the body (`held_by_loops`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._program import Atom, Barrier, Block, Branch, Loop, Operation, Value, movable_ops
from .._sharding import DimSharding
from .held_by_loops import is_better_inside


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedParam:
    """A sharded array as a block sees it: a parameter, or one layer of a stack.

    Instances compare by identity: two layers may be equal in all fields.
    """

    leaf: int  # index of its parameter among the leaves of all sharded arguments
    name: str
    shape: tuple[int, ...]  # of the full array
    dtype: Any
    layout: DimSharding  # the split dim, and its padding
    in_host: bool = False  # whether the shards lie in host memory, to be fetched before a gather


@dataclasses.dataclass(frozen=True)
class View:
    """A value that cheap operations make of a weight, on its shard or after its gather."""

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

    @property
    def gathered(self) -> View:
        """This view without the operations that run after the gather: what is gathered."""
        before, _ = movable_ops.before_gather(self.ops, self.weight.layout, self.weight.shape)
        return View(self.weight, before)

    @property
    def num_bytes(self) -> int:
        """Bytes of the full array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def then(self, *ops: movable_ops.Op) -> View:
        return View(self.weight, (*self.ops, *ops))


@dataclasses.dataclass(frozen=True)
class Use:
    """A place in a block where a view of a weight is needed in full: the operation `index`.

    If `index` is the number of operations, the outputs of the block need the view.
    """

    index: int
    view: View


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """A stack of weights that a loop scans, one layer in each iteration."""

    view: View  # the stack outside; its operations are applied to the shards before the loop
    layer: ShardedParam  # one layer, as the body sees it

    @property
    def in_host(self) -> bool:
        """Whether the loop copies each layer from host memory.

        If operations have to be applied to the stack first, it is copied in full before the loop.
        """
        return self.view.weight.in_host and not self.view.ops


@dataclasses.dataclass(frozen=True)
class LoopUses:
    """How a loop uses weights."""

    stacks: tuple[Stack, ...]
    constants: tuple[ShardedParam, ...]  # weights outside, that the body gathers in each iteration
    view_outputs: frozenset[int]  # indices of outputs that are views of weights: not computed
    body: BlockUses


@dataclasses.dataclass(frozen=True)
class BlockUses:
    """How a block uses weights; `loops` says it of each loop's body, by index of its operation."""

    views: Mapping[Atom, View]
    uses: tuple[Use, ...]
    loops: dict[int, LoopUses]
    conflicts: frozenset[int]  # leaves that the block scans or slices along their split dim


def find_uses(
    block: Block, inputs: Mapping[Value, View], loop_constant_bytes: int | None = None
) -> BlockUses:
    """Find every operation in `block` that needs a weight in full.

    Args:
        block: the program, or a loop's body.
        inputs: the inputs of the block that are views of weights.
        loop_constant_bytes: see `CommSchedule`.
    """
    walk = _UseFinder(block, {**inputs}, loop_constant_bytes)
    walk.walk()
    return walk.finish()


class _UseFinder:
    """A walk over the operations of a block, in program order, that collects its `BlockUses`."""

    def __init__(self, block: Block, known: dict[Atom, View], loop_constant_bytes: int | None):
        self.block = block
        self.views = known
        self.loop_constant_bytes = loop_constant_bytes
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

    def finish(self, view_outputs: frozenset[int] = frozenset()) -> BlockUses:
        """Record the block's outputs as uses, except those in `view_outputs`; return the result."""
        outputs = [out for i, out in enumerate(self.block.outputs) if i not in view_outputs]
        self._need(len(self.block.operations), outputs)
        return BlockUses(self.views, tuple(self.uses), self.loops, frozenset(self.conflicts))

    def _need(self, index: int, atoms: Sequence[Any]) -> None:
        if self.views.keys().isdisjoint(atoms):
            return
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
            # A slice or a reversal along the split dim needs elements of other devices.
            if pushed and op.through(*pushed) is None:
                self.conflicts.add(view.weight.leaf)
        return True

    def _loop(self, index: int, loop: Loop) -> None:
        first = loop.num_constants + loop.num_carry
        stacks: dict[tuple, Stack] = {}
        inner: dict[Atom, View] = {}
        full: list[Atom] = []
        for outside, inside in zip(loop.inputs[first:], loop.body.inputs[first:], strict=True):
            view = self.views.get(outside)
            layer = view and self._layer(view, stacks)
            if layer:
                inner[inside] = layer
            elif view:
                full.append(outside)
        body, inside = self._body(loop, inner)
        pairs = zip(loop.inputs[:first], loop.body.inputs[:first], strict=True)
        before = [outside for outside, given in pairs if given not in inside]
        self._need(index, (*before, *full))
        view_outputs = self._views_of_stacked_outputs(loop, body.views, tuple(stacks.values()))
        uses = body.finish(view_outputs)
        self.conflicts |= uses.conflicts
        weights = tuple(dict.fromkeys(view.weight for view in inside.values()))
        self.loops[index] = LoopUses(tuple(stacks.values()), weights, view_outputs, uses)

    def _body(self, loop: Loop, layers: dict[Atom, View]) -> tuple[_UseFinder, dict[Atom, View]]:
        """Walk the body of a loop.

        Args:
            loop: the loop.
            layers: the inputs of the body that are layers of scanned stacks, with their views.

        Returns:
            The walk; and the inputs of the body that are weights which it gathers in each iteration
            (constants of the loop), with their views.
        """
        limit = self.loop_constant_bytes
        constants = zip(loop.inputs[: loop.num_constants], loop.body.inputs, strict=False)
        # Weights in host memory are copied to the device once, before the loop.
        inside: dict[Atom, View] = {
            given: view
            for outside, given in constants
            if (view := self.views.get(outside)) and not view.weight.in_host
        }
        views = {*inside.values()}
        if isinstance(loop, Branch):  # those of all branches would be held
            views |= {view for x in loop.operands if (view := self.views.get(x))}
        held = sum(view.num_bytes for view in {view.gathered for view in views})
        if inside and is_better_inside(loop, held, 0, limit):
            body = _UseFinder(loop.body, {**layers, **inside}, limit)
            body.walk()
            if is_better_inside(loop, held, _most_at_once(body.uses, body.loops), limit):
                return body, inside
        body = _UseFinder(loop.body, {**layers}, limit)
        body.walk()
        return body, {}

    def _views_of_stacked_outputs(
        self, loop: Loop, inside: Mapping[Atom, View], stacks: tuple[Stack, ...]
    ) -> frozenset[int]:
        """Find the stacked outputs of a loop whose rows are views of the layers that it scans.

        Each such output is registered as a view of the stack of weights, and so is not computed.

        Args:
            loop: the loop.
            inside: the views of weights in the body.
            stacks: the stacks that the loop scans.

        Returns:
            The indices of these outputs.
        """
        by_layer = {stack.layer: stack.view for stack in stacks}
        view_outputs = set()
        for i in range(loop.num_carry, len(loop.outputs)):
            out = loop.body.outputs[i]
            view = inside.get(out)
            if view is not None and view.weight in by_layer:
                stacked = (op.of_stack(loop.length) for op in view.ops)
                self.views[loop.outputs[i]] = by_layer[view.weight].then(*stacked)
                view_outputs.add(i)
        return frozenset(view_outputs)

    def _layer(self, view: View, stacks: dict[tuple, Stack]) -> View | None:
        """Return what the body sees of a scanned stack: a view of one layer.

        None if the loop needs the stack in full.
        """
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


def _most_at_once(uses: Iterable[Use], loops: Mapping[int, LoopUses]) -> int:
    """Return the largest number of bytes of full weights that one operation needs.

    A loop counts as one operation: it needs the weights that it holds from its first iteration to
    its last, and also those of one iteration.
    """
    gathered: dict[int, set[View]] = {index: set() for index in loops}
    for use in uses:
        gathered.setdefault(use.index, set()).add(use.view.gathered)
    inside = {i: _most_at_once(loop.body.uses, loop.body.loops) for i, loop in loops.items()}
    sizes = (sum(x.num_bytes for x in views) + inside.get(i, 0) for i, views in gathered.items())
    return max(sizes, default=0)


def _of_slice(view: View) -> tuple[movable_ops.Op, ...] | None:
    """Return the operations of a view of a stack, rewritten for one layer of the stack.

    None if an operation mixes layers (elements of dim 0), as a transpose of dim 0 does.
    """
    shape, sliced = view.weight.shape, []
    for op in view.ops:
        layer_op = op.of_slice(shape)
        if layer_op is None:
            return None
        sliced.append(layer_op)
        shape = op.out_shape(shape)
    return tuple(sliced)


def _stack(view: View) -> Stack:
    """Return a `Stack` for a scanned view, with a new `ShardedParam` for one layer of it."""
    weight = view.weight
    pushed = movable_ops.push(view.ops, weight.layout, weight.shape)
    assert pushed is not None
    layout, shape = pushed
    name = f"{weight.name}[i]"
    return Stack(
        view, ShardedParam(weight.leaf, name, shape[1:], view.dtype, layout.moved(layout.dim - 1))
    )
