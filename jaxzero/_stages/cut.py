"""Cut a program of loss and gradients at its layer loops.

The program of one micro-batch has a forward loop, which scans the stacks of the layers' weights,
and a backward loop, which makes the gradients of the stacks. A stage runs a part of the iterations
of both loops. The operations around the loops belong to the first or to the last stage:

    before the forward loop            embeddings: the first stage
    between the loops                  head and loss: the last stage
    after the backward loop            gradients of the embeddings: the first stage

Values that the loops read and that depend on neither loop, such as positions and masks, are
computed on every stage. The gradient of a weight outside of the layers may have terms on the first
stage and on the last: `evaluation.Sums` tells them apart.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxtyping import Array

from .._mesh import equations_inside
from .._program import (
    Atom,
    Barrier,
    Block,
    Loop,
    Operation,
    Value,
    exchanges,
    has_host_effect,
    makes_zeros,
    movable_ops,
    scan_indexed_stacks,
    sink_into_loops,
)


@dataclasses.dataclass(frozen=True)
class LayersOf:
    """How a stack is computed from a source stack: by the same operations on each layer.

    Attributes:
        source: the stack to start from: an input of the program, or an output of the backward loop.
        ops: the operations on one layer, in order.
    """

    source: Value
    ops: tuple[movable_ops.Op, ...] = ()

    def then(self, op: movable_ops.Op) -> LayersOf:
        return LayersOf(self.source, (*self.ops, op))

    def of(self, x: Array) -> Array:
        """Compute layers of the stack from the same layers of the source, both `[layers, ...]`."""
        for op in self.ops:
            x = op.of_stack(len(x)).apply(x)
        return x


@dataclasses.dataclass(frozen=True, eq=False)
class LayerCut:
    """A program, its two layer loops, and the values that pass between its parts.

    Attributes:
        block: the program.
        forward: the loop that scans the stacks.
        backward: the loop that makes the gradients of the stacks; None if there are none.
        stacks: for each stack of layers, how it is computed from an input of the program.
        stack_gradients: for each output of the program that is the gradient of a stack, by index,
            how it is computed from an output of the backward loop; None for zeros.
        from_forward: all values that depend on the forward loop.
        from_backward: all values that depend on the backward loop.
        saved: numbers of the forward loop's stacked outputs that the backward loop scans.
        collected: numbers of the forward loop's stacked outputs that are read outside of both
            loops, such as a loss of each layer.
        travelling: values that are computed between the loops, and that each layer of the backward
            loop reads.
    """

    block: Block
    forward: Loop
    backward: Loop | None
    stacks: Mapping[Value, LayersOf]
    stack_gradients: Mapping[int, LayersOf | None]
    from_forward: frozenset[Value]
    from_backward: frozenset[Value]
    saved: tuple[int, ...]
    collected: tuple[int, ...]
    travelling: tuple[Value, ...]

    def effects(self, part: str) -> list[Operation]:
        """Return a part's operations that have no results but effects on the host, such as prints.

        Args:
            part: "start" (before the forward loop), "head" (between the loops), or "end".
        """
        of_part = []
        for operation in self.block.operations:
            if not operation.outputs and has_host_effect(operation):
                is_end = not self.from_backward.isdisjoint(operation.inputs)
                is_head = not self.from_forward.isdisjoint(operation.inputs)
                if part == ("end" if is_end else "head" if is_head else "start"):
                    of_part.append(operation)
        return of_part

    def stacked(self, i: int) -> Value:
        """Return stacked output number `i` of the forward loop."""
        return self.forward.outputs[self.forward.num_carry + i]

    @property
    def activations(self) -> list[Value]:
        """The outputs of the forward loop that a stage sends to the next stage."""
        carry = self.forward.outputs[: self.forward.num_carry]
        return [*carry, *map(self.stacked, self.collected)]

    @property
    def cotangents(self) -> list[Atom]:
        """The inputs of the backward loop that the last stage computes and other stages receive."""
        loop = self.backward
        if loop is None:
            return []
        return [*loop.inputs[loop.num_constants : loop.first_stack], *self.travelling]


def cut_at_layers(
    block: Block,
    stacks: Mapping[Value, str],
    gradients: Mapping[int, Value],
) -> LayerCut:
    """Find the layer loops of a program, and the values that pass between its parts.

    Args:
        block: the program of one micro-batch.
        stacks: the path of each input of the program that is a stack of layers.
        gradients: for each output that is the gradient of a stack, by index, that stack.

    Raises:
        NotImplementedError: the program does not have one forward loop over the layers and at most
            one backward loop. The error names the line and what to do.
    """
    weights = list(stacks)
    block = scan_indexed_stacks(block, weights)
    block = sink_into_loops(block, weights, list(gradients))
    layer_gradients = {k: _stack_gradient(block, k, stacks[gradients[k]]) for k in gradients}
    views = _views(block, weights)
    backward = _backward(block, layer_gradients.values(), views)
    forward = _forward(block, backward, {x: stacks[views[x].source] for x in views}, views)
    _check_loops(forward, backward)
    _check_exchanges(block, forward, backward)
    from_forward = dependents(block, forward.outputs)
    from_backward = dependents(block, backward.outputs) if backward else set()
    return LayerCut(
        block,
        forward,
        backward,
        views,
        layer_gradients,
        frozenset(from_forward),
        frozenset(from_backward),
        *_passed(block, forward, backward, from_forward),
    )


def dependents(block: Block, roots: Iterable[Value]) -> set[Value]:
    """Return the roots, and all values of the block that depend on a root."""
    reached = set(roots)
    for operation in block.operations:
        if not reached.isdisjoint(operation.inputs):
            reached.update(operation.outputs)
    return reached


def dtypes_read(block: Block, value: Value) -> set[Any]:
    """Return the float dtypes to which the operations that read a value round it.

    If an operation does not round the value to a narrower float first, None is among the dtypes.
    """
    dtypes: set[Any] = {None} if value in block.outputs else set()
    for operation in block.operations:
        for i, x in enumerate(operation.inputs):
            if x is not value:
                continue
            op = operation.view()
            if isinstance(op, movable_ops.ConvertDtype) and op.narrows:
                dtypes.add(operation.outputs[0].dtype)
            elif isinstance(operation, Barrier):
                dtypes |= dtypes_read(block, operation.outputs[i])
            elif (
                isinstance(operation, Loop)
                and not 0 <= i - operation.num_constants < operation.num_carry
            ):
                dtypes |= dtypes_read(operation.body, operation.body.inputs[i])
            else:
                dtypes.add(None)
    return dtypes


def _views(block: Block, stacks: Iterable[Value]) -> dict[Value, LayersOf]:
    """Find all stacks made layer by layer from inputs in `stacks`; return how, by stack."""
    views = {x: LayersOf(x) for x in stacks}
    for operation in block.operations:
        if isinstance(operation, Barrier):
            for x, out in zip(operation.inputs, operation.outputs, strict=True):
                if x in views:
                    views[out] = views[x]
        elif (op := _of_layer(operation)) is not None and operation.source in views:
            views[operation.outputs[0]] = views[operation.source].then(op)
    return views


def _of_layer(operation: Operation) -> movable_ops.Op | None:
    """Convert an operation on a stack of layers to the same operation on one layer.

    Return None if the operation mixes layers, or does more than move, scale or round.
    """
    op, source = operation.view(), operation.source
    return None if op is None or source is None else op.of_slice(source.shape)


def _stack_gradient(block: Block, k: int, path: str) -> LayersOf | None:
    """Return how output `k`, a stack's gradient, is computed from a loop's output; None for zeros.

    Raises:
        NotImplementedError: the gradient is not computed from a loop's output layer by layer.
    """
    value, ops = block.outputs[k], []
    while isinstance(value, Value) and value in block.makers:
        maker = block.makers[value]
        if isinstance(maker, Loop) and value in maker.outputs[maker.num_carry :]:
            return LayersOf(value, tuple(reversed(ops)))
        if isinstance(maker, Barrier):
            value = maker.inputs[maker.outputs.index(value)]
            continue
        if makes_zeros(maker):
            return None
        if (op := _of_layer(maker)) is None:
            break
        ops.append(op)
        value = maker.source
    where = f" at {block.makers[value].where}" if value in block.makers else ""
    raise NotImplementedError(
        f"The gradient of the stack `{path}` is not made by one loop over the layers{where}, so "
        "its layers cannot be on different nodes. Scan each stack of `layers` once, in one loop, "
        f"and read it nowhere else; {_hint_of_list(path)}or leave out `stages`."
    )


def _hint_of_list(path: str) -> str:
    """Return advice how to name a list of layers, if `path` looks like a leaf in one; else ""."""
    match = re.match(r"(.*?\.)\d+(\.|$)", path)
    return f'name a list of layers by "{match[1]}*"; ' if match else ""


def _backward(
    block: Block, gradients: Iterable[LayersOf | None], stacks: Mapping[Value, LayersOf]
) -> Loop | None:
    makers = {block.makers[x.source] for x in gradients if x is not None}
    loops = [x for x in makers if isinstance(x, Loop)]
    if len(loops) > 1:
        lines = ", ".join(sorted({loop.where for loop in loops}))
        raise NotImplementedError(
            f"The gradients of the layers are made by {len(loops)} loops ({lines}). Stages need "
            "one loop over all layers: put them into one stack that one `jax.lax.scan` scans, or "
            "leave the others out of `layers`."
        )
    return loops[0] if loops else _of_frozen(block, stacks)


def _of_frozen(block: Block, stacks: Mapping[Value, LayersOf]) -> Loop | None:
    """Return the backward loop over frozen layers, if gradients pass through them; else None."""
    scans = [
        x
        for x in block.operations
        if isinstance(x, Loop) and not stacks.keys().isdisjoint(x.inputs[x.first_stack :])
    ]
    if len(scans) != 2 or scans[0].is_reversed == scans[1].is_reversed:
        return None
    depends = dependents(block, scans[0].outputs)
    return None if depends.isdisjoint(scans[1].inputs) else scans[1]


def _check_loops(forward: Loop, backward: Loop | None) -> None:
    """Raise `NotImplementedError` if stages cannot divide the iterations of the layer loops."""
    if forward.is_reversed or (backward is not None and not backward.is_reversed):
        raise NotImplementedError(
            f"The loop over the layers at {forward.where} runs from the last layer to the first. "
            "Reverse the stacks where they are made, or leave out `stages`."
        )
    for loop in (forward, backward):
        if loop is None:
            continue
        if loop.uses_host_memory:
            raise NotImplementedError(
                f"The loop over the layers at {forward.where} keeps activations in host memory. "
                "Take a policy of `jax.checkpoint` that does not offload, or leave out `stages`."
            )
        if any(x.primitive.name == "while" for x in equations_inside(loop.equation)):
            raise NotImplementedError(
                f"A layer of the loop at {forward.where} has a `while` loop, which may not end on "
                "a stage that has no micro-batch, and so runs on zeros. Use `jax.lax.scan`, or a "
                "`fori_loop` with static bounds, or leave out `stages`."
            )


def _check_exchanges(block: Block, *loops: Loop | None) -> None:
    """Raise `NotImplementedError` for a `ppermute` outside of the layer loops `loops`.

    XLA makes the devices of all stages wait for each other in a `ppermute`. Outside of the layer
    loops only one stage would run it, so that stage would wait forever.
    """
    for operation in block.operations:
        if operation not in loops and any(name == "ppermute" for name, _ in exchanges(operation)):
            raise NotImplementedError(
                f"`ppermute` at {operation.where} is outside of the layers, where only one stage "
                "would take part, and XLA lets all devices wait for each other. Use `all_gather` "
                "or `all_to_all`, or leave out `stages`."
            )


def _forward(
    block: Block,
    backward: Loop | None,
    paths: Mapping[Value, str],
    stacks: Mapping[Value, LayersOf],
) -> Loop:
    """Return the forward loop, which scans the stacks.

    Raises:
        NotImplementedError: an operation other than this loop and `backward` reads a stack.
    """
    scans: dict[Loop, None] = {}
    for operation in block.operations:
        read = [x for x in operation.values if x in stacks]
        is_view = isinstance(operation, Barrier) or stacks.keys() >= {*operation.outputs}
        if not read or operation is backward or is_view:
            continue
        if not isinstance(operation, Loop) or not {*read}.isdisjoint(
            operation.inputs[: operation.first_stack]
        ):
            raise NotImplementedError(
                f"`{operation.name}` at {operation.where} reads the stack `{paths[read[0]]}` of "
                "all layers, which lie on different nodes. Compute it in the loop over the layers, "
                "or leave out `stages`."
            )
        scans[operation] = None
    if len(scans) != 1:
        lines = ", ".join(loop.where for loop in scans) or "none"
        raise NotImplementedError(
            "Stages need one forward loop over the layers of `jz.Stages`, `jax.lax.scan`; the "
            f"program has {len(scans)} ({lines}). Put all layers into one stack, use "
            "`jax.checkpoint` on the body of the loop and not around it, or leave out `stages`."
        )
    (forward,) = scans
    if backward is not None and backward.length != forward.length:
        raise NotImplementedError(
            f"The loop at {forward.where} runs {forward.length} layers and its derivative "
            f"{backward.length}. Leave out `stages`."
        )
    return forward


def _passed(
    block: Block,
    forward: Loop,
    backward: Loop | None,
    from_forward: Collection[Value],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Value, ...]]:
    """Return the fields `saved`, `collected` and `travelling` of `LayerCut`."""
    stacked = forward.outputs[forward.num_carry :]
    others = [x for x in block.operations if x is not forward and x is not backward]
    read = {x for operation in others for x in operation.values} | {*block.outputs}
    saved: list[int] = []
    travelling: dict[Value, None] = {}
    if backward is not None:
        first = backward.first_stack
        in_layers = [x for x in backward.inputs[first:] if isinstance(x, Value)]
        constants = [x for x in backward.inputs[: backward.num_constants] if isinstance(x, Value)]
        saved = [i for i, x in enumerate(stacked) if x in in_layers]
        for x in dict.fromkeys([*constants, *in_layers]):
            if x not in from_forward:
                continue
            if x not in stacked:
                travelling[x] = None
            elif x in constants:
                raise NotImplementedError(
                    f"The loop over the layers at {forward.where} keeps something of all layers "
                    "that each layer of backward reads. Leave out `stages`."
                )
    collected = tuple(i for i, x in enumerate(stacked) if x in read)
    return tuple(saved), collected, tuple(travelling)
