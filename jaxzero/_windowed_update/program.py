"""Trace an optimizer's update on leaves of their true shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh

from .._program import Atom, Block, Constant, Loop, Operation, Value, trace
from .._sharding import TreePlan, flatten, is_array
from .layouts import UpdateLayouts


@dataclasses.dataclass(frozen=True)
class UpdateProgram:
    """`tx.update` and `optax.apply_updates` as one list of operations.

    Attributes:
        block: its inputs are gradients, state, parameters and the arrays among the extra
            arguments; its outputs are the new state and the new parameters.
        producers: for each value that an operation computes, the operation's position.
    """

    block: Block
    producers: Mapping[Value, int]

    def producer(self, value: Value) -> Operation | None:
        """The operation that computes a value; None for an input."""
        position = self.producers.get(value)
        return None if position is None else self.block.operations[position]

    def operations_for(self, wanted: Iterable[Atom], known: Container[Value]) -> list[Operation]:
        """The operations that compute `wanted` from `known`, in program order."""
        found: set[int] = set()
        waiting = list(wanted)
        while waiting:
            atom = waiting.pop()
            if isinstance(atom, Constant) or atom in known:
                continue
            position = self.producers[atom]
            if position not in found:
                found.add(position)
                waiting += self.block.operations[position].inputs
        return [self.block.operations[i] for i in sorted(found)]

    def run(self, wanted: Sequence[Atom], known: Mapping[Value, Any]) -> list[Any]:
        """Compute `wanted` on full arrays, from the arrays of `known`."""
        env = dict(known)
        for operation in self.operations_for(wanted, env):
            _run_operation(operation, env)
        return [_read(atom, env) for atom in wanted]


def trace_update(
    tx: optax.GradientTransformation, layouts: UpdateLayouts, extra_args: Mapping[str, Any]
) -> tuple[UpdateProgram, list[Any]]:
    """Trace an update.

    Returns:
        The program, and the arrays among `extra_args`, which are its last inputs; padded ones are
        `StoredArray`s.

    Raises:
        ValueError: the update returns a tree of another structure, or arrays of other shapes.
    """
    update = optax.with_extra_args_support(tx).update
    trees = (layouts.gradients, layouts.state, layouts.params)
    _, extras, structure = flatten(extra_args)
    traced = [i for i, x in enumerate(extras) if is_array(x)]

    def flat(*arrays: Any) -> list[Any]:
        remaining = iter(arrays)
        gradients, state, params = (
            plan.whole([next(remaining) for _ in plan.leaves]) for plan in trees
        )
        values = dict(zip(traced, remaining, strict=True))
        arguments = jax.tree.unflatten(structure, [values.get(i, x) for i, x in enumerate(extras)])
        updates, new_state = update(gradients, state, params, **arguments)
        new_params = optax.apply_updates(params, updates)
        return [
            *_arrays_like(layouts.state, new_state, "state"),
            *_arrays_like(layouts.params, new_params, "parameters"),
        ]

    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layouts.leaves]
    given = [extras[i] for i in traced]
    structs += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
    no_mesh = AbstractMesh((), ())  # in place of one that the user may have set
    with jax.sharding.use_abstract_mesh(no_mesh):
        block, _ = trace(flat, *structs)
    producers = {
        value: i for i, operation in enumerate(block.operations) for value in operation.outputs
    }
    return UpdateProgram(block, producers), given


def _arrays_like(plan: TreePlan, tree: Any, what: str) -> list[Any]:
    """The arrays of a new tree, in the places of the old one's."""
    try:
        arrays = plan.flatten_like(tree)
    except ValueError as error:
        raise ValueError(
            f"The optimizer returns {what} of another structure than it was given: {error}"
        ) from error
    for leaf, x in zip(plan.leaves, arrays, strict=True):
        if tuple(getattr(x, "shape", ())) != leaf.shape:
            raise ValueError(
                f"The optimizer returns {what} whose leaf `{leaf.path}` has the shape "
                f"{tuple(x.shape)}; it was given {leaf.shape}."
            )
    return arrays


def _run_operation(operation: Operation, env: dict[Value, Any]) -> None:
    inputs = [_read(atom, env) for atom in operation.inputs]
    run: Callable[..., list[Any]] = operation.bind
    if isinstance(operation, Loop):
        run = _loop(operation)
    env.update(zip(operation.outputs, run(inputs), strict=True))


def _loop(loop: Loop) -> Callable[[list[Any]], list[Any]]:
    first_stack = loop.num_constants + loop.num_carry

    def run(inputs: list[Any]) -> list[Any]:
        constants = inputs[: loop.num_constants]

        def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            env = dict(zip(loop.body.inputs, [*constants, *carry, *slices], strict=True))
            for operation in loop.body.operations:
                _run_operation(operation, env)
            outputs = [_read(atom, env) for atom in loop.body.outputs]
            return outputs[: loop.num_carry], outputs[loop.num_carry :]

        carry, stacks = loop.scan(
            body, inputs[loop.num_constants : first_stack], inputs[first_stack:]
        )
        return [*carry, *stacks]

    return run


def _read(atom: Atom, env: Mapping[Value, Any]) -> Any:
    return atom.value if isinstance(atom, Constant) else env[atom]
